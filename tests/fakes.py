"""Hand-made settings, views, updates and outcomes, so that methods are tested without a world.

Every report is a function of (client, round), so that a view and its permutation agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedglimpse.config.loading import resolve
from fedglimpse.federation.reports import CATALOGUE
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from fedglimpse.methods.build import build_method, is_oracle
from fedglimpse.rng import generator
from fedglimpse.types import Choice, Method, Outcome, Selector, Update, View

N, D, C, P = 12, 8, 3, 6  # clients, floats of a sketch, classes, proxy examples
STATE, PARAMS = 7, 5  # floats of a model, the last two are buffers
SIZES = torch.tensor([10, 20, 30, 40, 50, 15, 25, 35, 45, 55, 12, 22])


def example_options(method: str) -> dict[str, Any]:
    """Return the options that a registered method cannot do without."""
    if method not in registry.MODULES:
        return {"options.allow_oracle": True} if is_oracle(method) else {}
    return {f"options.{k}": v for k, v in registry.info(method).example_options.items()}


def setting(method: str, sizes: Tensor = SIZES, **keys: Any) -> Setting:
    """Return a small setting; keys are written with `__` for the dot."""
    values = {"method": method, "sketch.size": D, "data.clients": len(sizes), "selection.k": 3}
    values |= example_options(method) | {k.replace("__", "."): v for k, v in keys.items()}
    values["visibility.cluster_size"] = min(10, len(sizes))
    return Setting(resolve(values), seed=0, sizes=sizes, num_classes=C, num_params=PARAMS)


def build(method: str, sizes: Tensor = SIZES, **keys: Any) -> Method:
    """Build a registered method for a small setting."""
    return build_method(method, setting(method, sizes, **keys))


def report(name: str, ids: Tensor, round_num: int) -> Tensor:
    """Return what these clients would report `[V]` or `[V, ...]`."""
    draws = [generator(int(i), name, round_num) for i in ids]
    if name == "delta_similarity":
        unit = torch.nn.functional.normalize(_normal(ids, round_num, D), dim=1)
        return unit @ unit.T
    if name in ("sketch", "delta_sketch"):
        return torch.stack([torch.randn(D, generator=g) for g in draws])
    if name == "proxy_logits":
        return torch.stack([torch.randn(P * C, generator=g) for g in draws])
    if name == "proxy_predictions":
        return torch.stack([torch.randn(P, C, generator=g).softmax(1).flatten() for g in draws])
    if name == "label_histogram":
        return torch.stack([torch.randint(0, 20, (C,), generator=g).float() for g in draws])
    return torch.stack([torch.rand((), generator=g) + 0.1 for g in draws])  # scalars


def _normal(ids: Tensor, round_num: int, width: int) -> Tensor:
    return torch.stack(
        [torch.randn(width, generator=generator(int(i), "rows", round_num)) for i in ids]
    )


def server_report(name: str, round_num: int) -> Tensor:
    draw = generator(0, name, round_num)
    return torch.rand(C, generator=draw) if "histogram" in name else torch.randn(D, generator=draw)


def view(
    selector: Selector | None = None,
    ids: Sequence[int] = range(6),
    round_num: int = 0,
    sizes: Tensor = SIZES,
    reports: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> View:
    """Return a view with what `selector` needs, or with the given reports."""
    at = torch.tensor(list(ids))
    needs = selector.needs if selector is not None and reports is None else frozenset()
    server = {n for n in needs if CATALOGUE[n].phase == "server"} - {"reward"}
    made = {n: report(n, at, round_num) for n in needs if CATALOGUE[n].phase != "server"}
    return View(
        round_num=round_num,
        ids=at,
        sizes=sizes[at],
        reports=made if reports is None else reports,
        server={n: server_report(n, round_num) for n in server},
        rng=generator(seed, "select", round_num),
    )


def outcome(selector: Selector, seen: View, choice: Choice) -> Outcome:
    """Return an outcome of `choice`, with what the selector learns from."""
    ids = seen.ids[choice.slots]
    per_class = torch.rand(C, generator=generator(0, "outcome", seen.round_num))
    even = torch.full((len(ids),), 1 / len(ids))
    return Outcome(
        round_num=seen.round_num,
        selected=ids,
        reward=float(per_class.mean()),
        score=float(per_class.mean()),
        per_class=per_class,
        reward_per_class=per_class,
        weights=even if choice.weights is None else choice.weights.float(),
        reports={
            n: report(n, ids, seen.round_num)
            for n in selector.learns_from
            if CATALOGUE[n].phase != "server"
        },
    )


def update(
    deltas: Tensor,
    *,
    ids: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    starts: Tensor | None = None,
    weights: Sequence[float] | None = None,
    num_params: int | None = None,
    round_num: int = 0,
    reports: Mapping[str, Tensor] | None = None,
) -> Update:
    """Return an update; `deltas` is `[K, d]`, the rest is even and simple unless given."""
    count, width = deltas.shape
    return Update(
        round_num=round_num,
        ids=torch.arange(count) if ids is None else torch.tensor(list(ids)),
        sizes=torch.full((count,), 10) if sizes is None else torch.tensor(list(sizes)),
        starts=torch.zeros(count, width) if starts is None else starts,
        deltas=deltas,
        weights=torch.full((count,), 1 / count) if weights is None else torch.tensor(weights),
        num_params=width if num_params is None else num_params,
        reports=reports or {},
    )


def random_update(method: Method, state: Tensor, round_num: int, ids: Sequence[int]) -> Update:
    """Return an update of random deltas, from the starts and with the reports of the method."""
    at = torch.tensor(list(ids))
    return update(
        _normal(at, round_num, len(state)),
        ids=ids,
        sizes=SIZES[at].tolist(),
        starts=method.aggregator.starts(state, at),
        num_params=PARAMS,
        round_num=round_num,
        reports={n: report(n, at, round_num) for n in method.aggregator.needs},
    )
