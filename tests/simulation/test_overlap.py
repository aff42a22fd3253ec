"""Learning from a round while the clients of the next one train: when, and with what records."""

from __future__ import annotations

from typing import Any

import pytest
import small_world as small
import torch
from torch import Tensor

from fedglimpse.config.loading import resolve
from fedglimpse.federation.aggregation import TemporalWindow
from fedglimpse.runs.experiment import Pack
from fedglimpse.runs.progress import Silent
from fedglimpse.runs.rounds import selectors_of
from fedglimpse.simulation.evaluation import PendingScores, Scores
from fedglimpse.simulation.trainers.jobs import (
    JobsSummary,
    LocalTrainer,
    TrainingJobs,
    TrainingResults,
)
from fedglimpse.types import LocalObjective, Method

NEEDS = {"early": frozenset({"sketch"}), "late": frozenset[str]()}


class AsynchronousTrainer:
    """Trains like another trainer, and notes when a training is launched and when awaited."""

    def __init__(self, trainer: LocalTrainer, events: list[str]) -> None:
        self.trainer = trainer
        self.events = events

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        self.events.append("launched")
        results = self.trainer.train(start, jobs)
        pending: Any = PendingResults(results, self.events)
        return pending


class PendingResults:
    """Results of a training that are awaited when they are first read."""

    def __init__(self, results: TrainingResults, events: list[str]) -> None:
        self._results = results
        self._events = events

    def __getattr__(self, name: str) -> Tensor:
        if self._events[-1] != "awaited":
            self._events.append("awaited")
        return getattr(self._results, name)


def events_of_a_run(
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    events: list[str] | None = None,
    **keys: Any,
) -> list[str]:
    """Run three rounds on an asynchronous trainer; returns what happened in which order.

    Args:
        method: name of the method.
        monkeypatch: lets the run think that clients train in the background.
        events: where events are noted; None: in a new list.
        keys: of the configuration.
    """
    if events is None:
        events = []
    monkeypatch.setattr("fedglimpse.runs.experiment.trains_in_background", lambda world: True)
    keys = {"data.name": "digits", "method": method, "rounds": 3, "selection.k": 2} | keys
    pack = Pack([(resolve(keys), None)], Silent())
    pack.world.trainer = AsynchronousTrainer(pack.world.trainer, events)
    feedback = pack.selectors.feedback

    def noted(outcomes: Any) -> Any:
        events.append("learning")
        return feedback(outcomes)

    pack.selectors.feedback = noted  # type: ignore[method-assign]
    pack.run(resume=False, should_stop=lambda: False)
    return events


def test_learning_overlaps_the_training_of_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_run("glimpse", monkeypatch)
    overlapped = ["launched", "learning", "awaited"]
    assert events == ["launched", "awaited", *overlapped, *overlapped, "learning"]


def test_scores_are_awaited_after_the_next_training_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    launched_before: list[int] = []  # trainings, each time that scores are awaited
    wait = PendingScores.wait

    def noted(scores: PendingScores) -> dict[int, Scores]:
        launched_before.append(events.count("launched"))
        return wait(scores)

    monkeypatch.setattr(PendingScores, "wait", noted)
    events_of_a_run("glimpse", monkeypatch, events)
    assert launched_before == [2, 2, 3, 3, 3, 3]  # of a round: on the proxy and on the test set


def test_learning_comes_before_a_choice_that_training_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = events_of_a_run("fedavg", monkeypatch)
    assert events == ["launched", "awaited", "learning"] * 3


def test_a_round_that_is_saved_is_learnt_from_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_run("glimpse", monkeypatch, **{"checkpoint.every": 1})
    assert events == ["launched", "awaited", "learning"] * 3


def world(needs: frozenset[str], poison: tuple[int, ...] = (), **options: Any) -> small.World:
    def lane(seed: int) -> small.Lane:
        choice = small.Fixed([1, 3, 0], needs=needs)
        return small.lane(Method(choice, TemporalWindow(2, "raw")), seed=seed, **options)

    return small.world([lane(0), lane(1)], poison=poison)


@pytest.mark.parametrize("when", NEEDS)
@pytest.mark.parametrize("poison", [(), (1,)])
def test_results_read_while_the_next_round_trains_are_the_same(
    when: str, poison: tuple[int, ...]
) -> None:
    plain = world(NEEDS[when], poison)
    overlapped = world(NEEDS[when], poison)
    expected = [small.run_round(plain) for _ in range(4)]
    records: list[list[dict[str, Any]]] = []
    selectors = selectors_of(overlapped)
    training = overlapped.start_round()
    for _ in range(4):
        choices = selectors.select(overlapped.views(training))
        overlapped.aggregate(overlapped.collect(choices))
        results = overlapped.score([True, True])
        training = overlapped.start_round()
        records.append(results.records(selectors.feedback(results.outcomes())))
    assert records == expected
    assert torch.equal(plain.states, overlapped.states)


def test_a_round_in_which_nobody_is_visible_passes() -> None:
    federation = world(NEEDS["early"], visible=[])
    assert federation.views(federation.start_round()) == [None, None]
    assert [record["selected"] for record in small.run_round(federation)] == [[], []]


def test_the_summary_of_objectives_is_that_of_the_jobs() -> None:
    objectives = [
        LocalObjective(),
        LocalObjective(proximal_mu=0.5, proximal_squared=False),
        LocalObjective(distill=0.5),
        LocalObjective(block_cycle=True),
    ]
    for chosen in (*([objective] for objective in objectives), objectives):
        lanes = []
        for seed, objective in enumerate(chosen):
            method = Method(small.Fixed([3, 0]), TemporalWindow(2, "raw"), objective)
            lanes.append(small.lane(method, seed=seed))
        federation = small.world(lanes)
        trained: list[TrainingJobs] = []
        train = federation.trainer.train

        def noted(
            start: Tensor, jobs: TrainingJobs, train: Any = train, trained: Any = trained
        ) -> TrainingResults:
            trained.append(jobs)
            return train(start, jobs)

        federation.trainer.train = noted  # type: ignore[method-assign]
        small.run_round(federation)
        assert all(jobs.objectives for jobs in trained)
        assert [jobs.summary for jobs in trained] == [JobsSummary.of(jobs) for jobs in trained]
        picked = trained[0].pick(torch.tensor([1]))
        assert not picked.objectives
        assert picked.summary == JobsSummary.of(picked)
