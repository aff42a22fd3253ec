"""FedAWAC: client models weighted by the variance of their logits, then averaged over time.

"Federated adaptive weighted aggregation based on model consistency". No primary source for its
weighting was available, only the abstract and two sentences of Hou et al.: this is our reading.

    v_i = variance of client i's proxy logits     a_i ~ n_i / v_i     W_hat = sum a_i W_i
    W^{t+1} = mean of W_hat and the last M - 1 of its kind
Deviation 1: v_i is at least a hundredth of the median, or one constant model would take all weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.federation.aggregation import TemporalWindow, weighted_delta
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom, one_of, require
from fedglimpse.types import Method, Update

EPSILON = 1e-8


@dataclass(frozen=True)
class Options:
    """`options.*` of FedAWAC."""

    mode: str = "class_var"  # variance over classes, or ensemble_dev: distance to the mean logits
    map: str = "inverse"  # n / v; softmax: n exp(-v / T); proportional: n v
    temperature: float = 1.0  # T of softmax
    window: int = 2  # M, models averaged; 1: none
    history: str = "recent"  # or most_correlated: those with the highest cosine to the newest
    store: int = 10  # models kept for most_correlated

    def __post_init__(self) -> None:
        one_of("mode", self.mode, "class_var", "ensemble_dev")
        one_of("map", self.map, "inverse", "softmax", "proportional")
        one_of("history", self.history, "recent", "most_correlated")
        require(self.temperature > 0, "temperature", self.temperature, "a number above 0")
        require(self.window >= 1, "window", self.window, "1 for no averaging, 2 or more")
        require(self.store >= 1, "store", self.store, "1 or more models")


def variances(logits: Tensor, mode: str) -> Tensor:
    """Return v_i `[K]` of logits `[K, P, C]`: population variance, mean over the proxy set."""
    centre = logits.mean(2, keepdim=True) if mode == "class_var" else logits.mean(0, keepdim=True)
    return (logits - centre).square().mean((1, 2))


def consistency_weights(v: Tensor, sizes: Tensor, options: Options) -> Tensor:
    """Return a_i `[K]`, summing to one, from variances and client sizes.

    A variance that is not finite is of a model that diverged: it gets no weight beside others.
    """
    usable = v.isfinite()
    if not usable.all():
        weights = torch.zeros(len(v), dtype=torch.float64)
        if not usable.any():
            return sizes.double() / sizes.sum()
        weights[usable] = consistency_weights(v[usable], sizes[usable], options)
        return weights
    v = torch.maximum(v.double(), 0.01 * v.double().quantile(0.5)) + EPSILON
    if options.map == "softmax":
        return torch.softmax(sizes.double().log() - v / options.temperature, dim=0)
    raw = sizes.double() * (v if options.map == "proportional" else 1 / v)
    return raw / raw.sum()


class ConsistencyWindow(TemporalWindow):
    """Weighs by consistency, then averages with earlier aggregates (never with averages)."""

    needs = frozenset({"proxy_logits"})

    def __init__(self, options: Options, num_classes: int) -> None:
        """Start with an empty history."""
        self.options, self.num_classes, self.keep = options, num_classes, options.window - 1
        longer = options.store if options.history == "most_correlated" and self.keep else 0
        super().__init__(max(self.keep, longer) + 1, "raw")

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        logits = update.reports["proxy_logits"].double()
        v = variances(logits.view(len(logits), -1, self.num_classes), self.options.mode)
        self.applied = consistency_weights(v, update.sizes, self.options)
        fresh = weighted_delta(state, replace(update, weights=self.applied.to(state)))
        past = [model.to(state) for model in self.past]
        if len(past) > self.keep:
            cut = update.num_params
            alike = F.cosine_similarity(torch.stack(past)[:, :cut], fresh[None, :cut])
            past = [past[i] for i in alike.argsort(descending=True)[: self.keep].tolist()]
        self.past.append(fresh)
        return torch.stack([fresh, *past]).mean(0)


def build(setting: Setting) -> Method:
    """Return FedAWAC."""
    options = setting.options(Options)
    return Method(UniformRandom(), ConsistencyWindow(options, setting.num_classes))


INFO = MethodInfo(
    name="fedawac",
    summary="models weighted by the variance of their logits, averaged over time (our reading)",
    source="FedAWAC, abstract only",
    build=build,
    confidence="low",
)
