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
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom
from fedglimpse.types import Method, Update

EPSILON = 1e-8


@dataclass(frozen=True)
class Options:
    """`options.*` of FedAWAC."""

    mode: str = option(
        "class_var",
        "variance over classes, or ensemble_dev: distance to the mean logits",
        choices=("class_var", "ensemble_dev"),
    )
    map: str = option(
        "inverse",
        "n / v; softmax: n exp(-v / T); proportional: n v",
        choices=("inverse", "softmax", "proportional"),
    )
    temperature: float = option(1.0, "T of softmax", above=0)
    window: int = option(2, "M, models averaged; 1: none", at_least=1)
    history: str = option(
        "recent",
        "or most_correlated: those with the highest cosine to the newest",
        choices=("recent", "most_correlated"),
    )
    store: int = option(10, "models kept for most_correlated", at_least=1)


def variances(logits: Tensor, mode: str) -> Tensor:
    """Return v_i `[K]` of logits `[K, P, C]`: population variance, mean over the proxy set."""
    dim = 2 if mode == "class_var" else 0  # over classes, or over clients
    centre = logits.mean(dim, keepdim=True)
    squares = (logits - centre).square()
    return squares.mean((1, 2))


def consistency_weights(v: Tensor, sizes: Tensor, options: Options) -> Tensor:
    """Return a_i `[K]`, summing to one, from variances and client sizes.

    A variance that is not finite is of a model that diverged: it gets no weight beside others.
    """
    usable = v.isfinite()
    if not usable.any():
        return sizes.double() / sizes.sum()
    weights = torch.zeros(len(v), dtype=torch.float64)
    weights[usable] = _weights_of_finite(
        v[usable].double(),
        sizes[usable].double(),
        options,
    )
    return weights


def _weights_of_finite(v: Tensor, sizes: Tensor, options: Options) -> Tensor:
    """Return a_i `[K]` from variances and sizes in float64."""
    smallest = 0.01 * v.quantile(0.5)
    v = torch.maximum(v, smallest) + EPSILON
    if options.map == "softmax":
        logits = sizes.log() - v / options.temperature
        return torch.softmax(logits, dim=0)
    factor = v if options.map == "proportional" else 1 / v
    weights = sizes * factor
    return weights / weights.sum()


class ConsistencyWindow(TemporalWindow):
    """Weighs by consistency, then averages with earlier aggregates (never with averages)."""

    needs = frozenset({"proxy_logits"})

    def __init__(self, options: Options, num_classes: int) -> None:
        """Start with an empty history."""
        self.options = options
        self.num_classes = num_classes
        self.num_averaged = options.window - 1  # earlier aggregates, besides the newest
        num_stored = self.num_averaged
        if options.history == "most_correlated" and self.num_averaged:
            num_stored = max(num_stored, options.store)
        super().__init__(num_stored + 1, "raw")

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        flat = update.reports["proxy_logits"].double()  # [K, P * C]
        logits = flat.view(len(flat), -1, self.num_classes)
        v = variances(logits, self.options.mode)
        self.applied = consistency_weights(v, update.sizes, self.options)
        weighed = replace(update, weights=self.applied.to(state))
        aggregate = weighted_delta(state, weighed)
        past = [model.to(state) for model in self.past]
        if len(past) > self.num_averaged:
            past = self._most_similar(past, aggregate, update.num_params)
        self.past.append(aggregate)
        averaged = torch.stack([aggregate, *past])
        return averaged.mean(dim=0)

    def _most_similar(
        self,
        past: list[Tensor],
        aggregate: Tensor,
        num_params: int,
    ) -> list[Tensor]:
        """Return the stored models whose parameters have the highest cosine to the newest."""
        parameters = torch.stack(past)[:, :num_params]
        newest = aggregate[None, :num_params]
        similarity = F.cosine_similarity(parameters, newest)
        best_first = similarity.argsort(descending=True).tolist()
        return [past[i] for i in best_first[: self.num_averaged]]


def build(setting: Setting) -> Method:
    """Return FedAWAC."""
    options = setting.options(Options)
    aggregator = ConsistencyWindow(options, setting.num_classes)
    return Method(UniformRandom(), aggregator)


INFO = MethodInfo(
    name="fedawac",
    summary="models weighted by the variance of their logits, averaged over time (our reading)",
    source="FedAWAC, abstract only",
    build=build,
    confidence="low",
)
