"""What a server does while its clients train changes nothing, and is done exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import small_world as small
import torch
from torch import Tensor

from fedglimpse.federation.aggregation import TemporalWindow
from fedglimpse.simulation.trainers.jobs import JobsSummary, TrainingJobs, TrainingResults
from fedglimpse.simulation.transfer import on_its_way, sent
from fedglimpse.types import Choice, LocalObjective, Method

NEEDS = {"early": frozenset({"sketch"}), "late": frozenset[str]()}


def world(needs: frozenset[str], poison: tuple[int, ...] = (), **options: Any) -> small.World:
    def lane(seed: int) -> small.Lane:
        choice = small.Fixed([1, 3, 0], needs=needs)
        return small.lane(Method(choice, TemporalWindow(2, "raw")), seed=seed, **options)

    return small.world([lane(0), lane(1)], poison=poison)


@pytest.mark.parametrize("when", NEEDS)
def test_it_is_called_once_after_training_began(when: str) -> None:
    there, order = world(NEEDS[when]), list[str]()
    train = there.trainer.train

    def noted(start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        order.append("train")
        return train(start, jobs)

    there.trainer.train = noted  # type: ignore[method-assign]
    there.observe(lambda: order.append("meanwhile"))
    assert order == (["train", "meanwhile"] if when == "early" else ["meanwhile"])


def test_it_is_called_where_nobody_can_be_seen() -> None:
    there, calls = world(NEEDS["early"], visible=[]), list[int]()
    there.observe(lambda: calls.append(1))
    assert calls == [1]


@pytest.mark.parametrize("when", NEEDS)
@pytest.mark.parametrize("poison", [(), (1,)])
def test_books_done_while_the_next_round_trains_say_the_same(
    when: str, poison: tuple[int, ...]
) -> None:
    """`commit` and `records` one after the other are the readable twin."""
    plain, overlapped = world(NEEDS[when], poison), world(NEEDS[when], poison)
    expected = [small.play(plain) for _ in range(4)]
    found: list[list[dict[str, Any]]] = []
    views = overlapped.observe()
    for _ in range(4):
        seen = [(view, lane) for view, lane in zip(views, overlapped.lanes, strict=True)]
        chosen: list[Choice | None] = [
            None if view is None else lane.method.selector.select(view, lane.k)
            for view, lane in seen
        ]
        played, on_test = overlapped.play(chosen), overlapped.score([True, True])

        def books(played: Any = played, on_test: Any = on_test) -> None:
            played.outcomes()
            found.append(played.records([{}, {}], on_test))

        views = overlapped.observe(books)
    assert found == expected
    assert torch.equal(plain.states, overlapped.states)


def test_records_are_asked_for_once() -> None:
    there = world(NEEDS["late"])
    small.play(there)
    with pytest.raises(ValueError, match="commit a round"):
        there.records([{}, {}], [False, False])


def test_the_precomputed_summary_is_that_of_the_jobs() -> None:
    objectives = [
        LocalObjective(),
        LocalObjective(proximal_mu=0.5, proximal_squared=False),
        LocalObjective(distill=0.5),
        LocalObjective(block_cycle=True),
    ]
    for some in (*([one] for one in objectives), objectives):
        lanes = [
            small.lane(Method(small.Fixed([3, 0]), TemporalWindow(2, "raw"), one), seed=i)
            for i, one in enumerate(some)
        ]
        there, asked = small.world(lanes), list[TrainingJobs]()
        train = there.trainer.train

        def noted(
            start: Tensor, jobs: TrainingJobs, train: Any = train, asked: Any = asked
        ) -> TrainingResults:
            asked.append(jobs)
            return train(start, jobs)

        there.trainer.train = noted  # type: ignore[method-assign]
        small.play(there)
        assert [jobs.precomputed for jobs in asked] == [JobsSummary.of(jobs) for jobs in asked]
        picked = asked[0].pick(torch.tensor([1]))
        assert picked.precomputed == JobsSummary.of(picked)


def test_transfers_on_a_cpu_are_the_values_themselves() -> None:
    values = torch.arange(6.0)
    assert torch.equal(on_its_way(values)(), values)
    assert torch.equal(sent(values, torch.device("cpu")), values)
