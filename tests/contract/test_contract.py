"""What every registered method must do, whatever it is: one suite for all of them."""

from __future__ import annotations

import copy
import io
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fakes
from fedglimpse.methods import registry
from fedglimpse.runs.experiment import Result, Stopped, run
from fedglimpse.types import Choice, Method, View

K = 3
VISIBLE = {
    "some": [1, 3, 4, 6, 8, 11],
    "fewer than K": [2, 9],
    "one": [5],
    "all": list(range(fakes.N)),
}

OWN = os.environ.get("FEDGLIMPSE_METHODS", "").split()  # such as my_method:build
every_method = pytest.mark.parametrize("name", [*registry.MODULES, *OWN])


def choose(method: Method, view: View) -> Choice:
    return method.selector.select(view, method.budget(K, view.num_visible))


def play(method: Method, rounds: Sequence[int], ids: Sequence[int] = VISIBLE["some"]) -> list[Any]:
    """Play some rounds against made-up outcomes; returns everything the selector answered."""
    answers: list[Any] = []
    for t in rounds:
        view = fakes.view(method.selector, ids, t)
        choice = choose(method, view)
        metrics = method.selector.feedback(fakes.outcome(method.selector, view, choice))
        weights = None if choice.weights is None else choice.weights.tolist()
        answers.append((choice.slots.tolist(), weights, dict(choice.info), dict(metrics)))
    return answers


def aggregate(method: Method, state: torch.Tensor, rounds: Sequence[int]) -> torch.Tensor:
    """Aggregate made-up updates of changing clients."""
    for t in rounds:
        ids = [t % fakes.N, (t + 3) % fakes.N, (2 * t + 7) % fakes.N]
        update = fakes.random_update(method, state, t, sorted(set(ids)))
        state = method.aggregator.step(state, update)
    return state


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Send a state through a file, as a checkpoint does."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


@every_method
@pytest.mark.parametrize("who", VISIBLE)
def test_slots_are_legal(name: str, who: str) -> None:
    method = fakes.build(name)
    ids = VISIBLE[who]
    for slots, weights, _, metrics in play(method, range(4), ids):
        assert 1 <= len(slots) <= min(method.budget(K, len(ids)), len(ids))
        assert len(set(slots)) == len(slots)
        assert all(0 <= s < len(ids) for s in slots)
        assert weights is None or (len(weights) == len(slots) and np.isfinite(weights).all())
        assert all(isinstance(v, float | int) for v in metrics.values())


@every_method
def test_the_view_is_left_alone(name: str) -> None:
    method = fakes.build(name)
    for t in range(3):
        view = fakes.view(method.selector, VISIBLE["some"], t)
        before = copy.deepcopy((view.ids, view.sizes, dict(view.reports), dict(view.server)))
        choice = choose(method, view)
        method.selector.feedback(fakes.outcome(method.selector, view, choice))
        after = (view.ids, view.sizes, dict(view.reports), dict(view.server))
        for was, now in zip(before[:2], after[:2], strict=True):
            assert torch.equal(was, now)  # type: ignore[arg-type]
        for old, new in zip(before[2:], after[2:], strict=True):
            assert old.keys() == new.keys()  # type: ignore[union-attr]
            assert all(torch.equal(old[k], new[k]) for k in old)  # type: ignore[index, union-attr]


@every_method
def test_permuting_the_slots_permutes_the_answer(name: str) -> None:
    """A choice that draws no lots must not move at all; a random one must keep its law."""
    method = fakes.build(name)
    play(method, range(3))  # learn something first
    state = saved(method.selector.state_dict())
    ids = VISIBLE["some"]
    other = [8, 1, 11, 4, 3, 6]

    def answer(order: Sequence[int], seed: int) -> dict[int, float]:
        method.selector.load_state_dict(copy.deepcopy(state))
        view = fakes.view(method.selector, order, round_num=3, seed=seed)
        choice = choose(method, view)
        weights = torch.zeros(len(choice.slots)) if choice.weights is None else choice.weights
        return dict(zip(view.ids[choice.slots].tolist(), weights.tolist(), strict=True))

    first = answer(ids, 0)
    if all(answer(ids, seed).keys() == first.keys() for seed in range(1, 6)):
        assert answer(other, 0) == pytest.approx(first, rel=1e-5)
        return
    draws = 200
    there, back = (dict.fromkeys(ids, 0) for _ in range(2))
    for seed in range(draws):
        for order, hits in ((ids, there), (other, back)):
            for client in answer(order, seed):
                hits[client] += 1
    difference = max(abs(there[i] - back[i]) / draws for i in ids)
    assert difference < 0.25  # five standard errors


@every_method
def test_a_saved_state_goes_on_exactly(name: str) -> None:
    method = fakes.build(name)
    twin = fakes.build(name)
    start = torch.randn(fakes.STATE, generator=torch.Generator().manual_seed(0)).abs()
    play(method, range(4))
    state = aggregate(method, start, range(4))
    twin.selector.load_state_dict(saved(method.selector.state_dict()))
    twin.aggregator.load_state_dict(saved(method.aggregator.state_dict()))
    assert play(twin, range(4, 8)) == play(method, range(4, 8))
    assert torch.equal(aggregate(twin, state, range(4, 8)), aggregate(method, state, range(4, 8)))


@every_method
def test_a_state_does_not_change_after_it_was_taken(name: str) -> None:
    method = fakes.build(name)
    play(method, range(3))
    middle = aggregate(method, torch.ones(fakes.STATE), range(3))
    taken = {"s": method.selector.state_dict(), "a": method.aggregator.state_dict()}
    before = saved(taken)
    play(method, range(3, 6))
    aggregate(method, middle, range(3, 6))
    torch.testing.assert_close(saved(taken), before, rtol=0, atol=0, equal_nan=True)


@every_method
def test_aggregation_leaves_its_arguments_alone(name: str) -> None:
    method = fakes.build(name)
    state = torch.ones(fakes.STATE)
    for t in range(3):
        update = fakes.random_update(method, state, t, [0, 4, 5])
        before = copy.deepcopy(vars(update))
        new = method.aggregator.step(state, update)
        assert new.shape == state.shape
        assert new.isfinite().all()
        assert (state == 1).all()
        for key, value in before.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(update, key))


@every_method
def test_global_randomness_is_neither_used_nor_touched(name: str) -> None:
    answers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())  # noqa: NPY002
        method = fakes.build(name)
        answers.append(
            (play(method, range(5)), aggregate(method, torch.ones(7), range(3)).tolist())
        )
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (str(np.random.get_state()), random.getstate())  # noqa: NPY002
    assert answers[0] == answers[1]


def settings(name: str, **keys: Any) -> dict[str, Any]:
    options = fakes.example_options(name)
    small = {"data.clients": 12, "visibility.cluster_size": 4, "selection.k": 2, "local.epochs": 1}
    return {
        "method": name,
        "data.name": "digits",
        "rounds": 3,
        "engine.trainer": "serial",
        **small,
        **options,
        **keys,
    }


SEEDS = [4, 5]  # no mean of Q-values is near zero, where rounding is a large share of it


@cache
def together(name: str) -> Result:
    return run(settings(name, seeds=SEEDS))


def untimed(records: list[dict[str, Any]], lane: int | None = None) -> list[dict[str, Any]]:
    drop = ("seconds",) if lane is None else ("seconds", "lane")
    kept = [r for r in records if lane is None or r["lane"] == lane]
    return [{k: v for k, v in r.items() if k not in drop} for r in kept]


@every_method
def test_lanes_together_equal_lanes_alone(name: str) -> None:
    both = together(name)
    for lane, seed in enumerate(SEEDS):
        alone = run(settings(name, seeds=[seed]))
        ours = untimed(alone.records, 0)
        theirs = untimed(both.records, lane)
        if hasattr(alone.world.lanes[0].method.selector, "group_key"):  # sums in another order
            chosen = [[(r["selected"], r["visible"]) for r in some] for some in (ours, theirs)]
            assert chosen[0] == chosen[1]
            assert [r["mean_q"] for r in ours] == pytest.approx([r["mean_q"] for r in theirs])
        else:
            assert ours == theirs
        assert torch.equal(alone.world.states[0], both.world.states[lane])


@every_method
def test_a_stopped_run_resumes_exactly(name: str, tmp_path: Path) -> None:
    calls = iter([False, True])
    with pytest.raises(Stopped):
        run(settings(name, seeds=SEEDS), tmp_path / "r", should_stop=lambda: next(calls))
    resumed = run(settings(name, seeds=SEEDS), tmp_path / "r", resume=True)
    assert untimed(resumed.records) == untimed(together(name).records)
    assert torch.equal(resumed.world.states, together(name).world.states)
