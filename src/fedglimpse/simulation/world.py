"""The simulated federation: something a server can only observe and commit to.

A World runs R lanes (seeds, or methods on the same model) in step. It knows nothing about methods
beyond what a selector needs, and nothing about files or progress bars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.dataset import Dataset
from fedglimpse.federation.costs import CostModel
from fedglimpse.simulation.client_reports import Asked, Reporter, proxy_examples
from fedglimpse.simulation.evaluation import Evaluator, Scores
from fedglimpse.simulation.lane import (
    Lane,
    LaneRound,
    Upload,
    check_choice,
    check_method,
    check_state,
)
from fedglimpse.simulation.local_training import Finished, Holdings, mean_losses, train_round
from fedglimpse.simulation.merge import merge
from fedglimpse.simulation.results import Played, ScoresByLane
from fedglimpse.simulation.trained_clients import TrainedClients, pick_each
from fedglimpse.simulation.trainers.jobs import LocalTrainer
from fedglimpse.types import Choice, Outcome, View

__all__ = ["Lane", "World"]


class World:
    """R federations under partial visibility, trained together."""

    def __init__(
        self,
        dataset: Dataset,
        lanes: Sequence[Lane],
        start: Tensor,
        trainer: LocalTrainer,
        evaluator: Evaluator,
        reporter: Reporter,
        costs: CostModel,
    ) -> None:
        """Put lanes at their initial states.

        Args:
            dataset: on the training device, shared by all lanes.
            lanes: the federations.
            start: initial global states.  # [R, d]
            trainer: runs all local trainings of a round.
            evaluator: scores global states.
            reporter: computes what clients and server report.
            costs: turns what happened into bytes and FLOPs.

        Raises:
            UserError: for a method that cannot be run.
        """
        self.dataset, self.lanes, self.states = dataset, list(lanes), start.clone()
        self.trainer, self.evaluator, self.reporter = trainer, evaluator, reporter
        self.costs = costs
        self._now: list[LaneRound] = []
        self._played: Played | None = None
        self._holdings = Holdings()
        self._kept_proxies: dict[int, tuple[list[Lane], Tensor, Tensor]] = {}  # by their size
        for lane in self.lanes:
            check_method(lane.method)

    def observe(self, meanwhile: Callable[[], None] | None = None) -> list[View | None]:
        """Return what each lane's server sees; None where it has nothing to choose from.

        Selectors that need trained reports make all their visible clients train here, all lanes
        together. A client whose update is not finite is left out of the view.

        Args:
            meanwhile: called once, on a GPU while the clients train.
        """
        self._now = [LaneRound.begin(lane) for lane in self.lanes]
        lanes = list(enumerate(zip(self.lanes, self._now, strict=True)))
        early = {r: now.ids for r, (lane, now) in lanes if lane.trains_first and not now.idle}
        for r, done in self._train(early, meanwhile).items():
            self._now[r].have_trained(done.clients, done.kept)
        self._look([r for r, (_, now) in lanes if not now.idle and len(now.ids)])
        return [now.view for now in self._now]

    def trained(self, r: int) -> TrainedClients:
        """Return the visible clients of a lane that trained before the choice."""
        clients = self._now[r].clients
        if clients is None:
            raise ValueError(f"lane {r} has a method whose clients train after the choice")
        return clients

    def commit(self, choices: Sequence[Choice | None]) -> list[Outcome | None]:
        """Aggregate what the selectors chose; returns what came of it, lane by lane."""
        self._played = self.play(choices, may_pass=False)
        return self._played.outcomes()

    def records(
        self, metrics: Sequence[Mapping[str, float] | None], evaluate: Sequence[bool]
    ) -> list[dict[str, Any]]:
        """Return one record for each lane of the round that was just committed.

        Args:
            metrics: what each selector's feedback returned.
            evaluate: which lanes' new global models are scored on the test set.
        """
        played, self._played = self._played, None  # what its clients sent is not needed any more
        if played is None:
            raise ValueError("commit a round before its records")
        return played.records(metrics, self.score(evaluate))

    def play(self, choices: Sequence[Choice | None], may_pass: bool = True) -> Played:
        """Aggregate what was chosen and start to score it on the proxy sets.

        Args:
            choices: lane by lane; None where there is nothing to choose from.
            may_pass: None may also let a round pass.
        """
        chosen: dict[int, Choice] = {}
        for r, (now, choice) in enumerate(zip(self._now, choices, strict=True)):
            if now.view is not None and not (choice is None and may_pass):
                lane = self.lanes[r]
                k = lane.method.budget(lane.k, now.view.num_visible)
                chosen[r] = check_choice(choice, now.view, k, lane.method.selector)
        late = {r: c for r, c in chosen.items() if self._now[r].clients is None}
        trained = self._train({r: self._now[r].ids[c.slots] for r, c in late.items()})
        picked = self._pick({r: c.slots for r, c in chosen.items() if r not in late})
        uploads: dict[int, Upload] = {}
        for r, choice in chosen.items():
            clients, weights = picked.get(r), choice.weights
            if clients is None:
                clients, weights = trained[r].clients, choice.weights_at(trained[r].kept)
            self._now[r].info = choice.info
            uploads[r] = Upload.of(clients, self._now[r].examples, weights)
        self._ask_the_chosen(uploads)
        self._aggregate(uploads)
        scores, rounds = self._proxy_scores(list(uploads)), [lane.round_num for lane in self.lanes]
        for lane in self.lanes:
            lane.round_num += 1
        return Played(list(self.lanes), self._now, rounds, uploads, scores, self.costs)

    def score(self, evaluate: Sequence[bool]) -> ScoresByLane:
        """Start to score the global models of some lanes on the test set."""
        places = [r for r, wanted in enumerate(evaluate) if wanted]
        if not places:
            return dict
        x, y = self.dataset.x_test, self.dataset.y_test
        same_x, same_y = x.expand(len(places), *x.shape), y.expand(len(places), -1)
        found = self.evaluator.scores_later(self._states(places), same_x, same_y)
        return lambda: dict(zip(places, found(), strict=True))

    def retire(self, lanes: Sequence[Lane]) -> None:
        """Take lanes out of the world; the others go on."""
        gone = {id(lane) for lane in lanes}
        keep = [r for r, lane in enumerate(self.lanes) if id(lane) not in gone]
        self.lanes, self.states = [self.lanes[r] for r in keep], self.states[keep]
        self._kept_proxies.clear()

    def restart(self, r: int, lane: Lane, state: Tensor) -> None:
        """Put another federation in the place of lane `r`, at its initial state `[d]`."""
        check_method(lane.method)
        self.lanes[r] = lane
        self.states[r] = state

    def lane_state(self, r: int) -> dict[str, Any]:
        """Everything a lane needs to continue between two rounds, but for its selector."""
        lane = self.lanes[r]
        merged = lane.method.aggregator.state_dict()
        check_state(lane.method.aggregator, merged)
        return {
            "round": lane.round_num,
            "visits": lane.visits,
            "state": self.states[r].cpu().clone(),
            "aggregator": merged,
            "reward": lane.reward.state_dict(),
        }

    def load_lane_state(self, r: int, saved: Mapping[str, Any]) -> None:
        """Let a lane continue from what `lane_state` returned."""
        lane = self.lanes[r]
        lane.round_num, lane.visits = saved["round"], saved["visits"]
        self.states[r] = saved["state"].to(self.states.device)
        lane.method.aggregator.load_state_dict(_on_device(saved["aggregator"], self.states))
        lane.reward.load_state_dict(saved["reward"])

    def _look(self, places: Sequence[int]) -> None:
        """Make the views of these lanes."""
        asked = []
        states = self.states.unbind()
        for r in places:
            lane, now = self.lanes[r], self._now[r]
            needs = lane.method.selector.needs
            asked.append(Asked(needs, lane.population, states[r], now.ids, now.clients))
        if not asked:
            return
        probes, trained, server = (
            self.reporter.report(phase, asked) for phase in ("probe", "trained", "server")
        )
        for i, r in enumerate(places):
            lane, now = self.lanes[r], self._now[r]
            now.view = View(
                round_num=lane.round_num,
                ids=now.ids.clone(),  # whatever a method does with them
                sizes=now.sizes.clone(),
                reports=probes[i] | trained[i],
                server=server[i],
                rng=rng.generator(lane.seed, "select", lane.round_num),
            )

    def _train(
        self, ids_of: Mapping[int, Tensor], meanwhile: Callable[[], None] | None = None
    ) -> dict[int, Finished]:
        """Train these clients of these lanes and note who trained."""
        trained = train_round(
            self.trainer, self.lanes, self.states, ids_of, self._holdings, meanwhile
        )
        losses = mean_losses([done.clients.loss for done in trained.values()])
        for (r, done), loss in zip(trained.items(), losses, strict=True):
            now = self._now[r]
            self.lanes[r].visits += len(ids_of[r])
            now.trained, now.rejected, now.train_loss = ids_of[r].tolist(), done.rejected, loss
        return trained

    def _pick(self, slots: Mapping[int, Tensor]) -> dict[int, TrainedClients]:
        """Return those of the trained clients that these lanes chose."""
        clients = [early for r in slots if (early := self._now[r].clients) is not None]
        return dict(zip(slots, pick_each(clients, list(slots.values())), strict=True))

    def _ask_the_chosen(self, uploads: Mapping[int, Upload]) -> None:
        """Add what the chosen send with their updates; probes are at the global model."""
        some = {r: upload for r, upload in uploads.items() if self.lanes[r].needs_after}
        asked = []
        for r, upload in some.items():
            lane, clients = self.lanes[r], upload.clients
            names, population = lane.needs_after, lane.population
            asked.append(Asked(names, population, self.states[r], clients.ids, clients))
        for phase in ("probe", "trained", "server") if asked else ():
            answers = self.reporter.report(phase, asked)
            for upload, answer in zip(some.values(), answers, strict=True):
                upload.reports |= answer

    def _aggregate(self, uploads: Mapping[int, Upload]) -> None:
        """Make the next global models."""
        some = {r: upload for r, upload in uploads.items() if len(upload.clients.ids)}
        merge(self.lanes, self.states, some, self.reporter.num_params)
        for r, upload in uploads.items():
            self._now[r].selected = upload.clients.ids.tolist()
            self._now[r].weights = upload.weights.tolist()

    def _proxy_scores(self, places: Sequence[int]) -> ScoresByLane:
        """Start to score lanes on their own proxy sets; those with sets of one size together."""
        by_size: dict[int, list[int]] = {}
        for r in places:
            by_size.setdefault(len(self.lanes[r].population.proxy), []).append(r)
        parts = []
        for size, some in by_size.items():
            x, y = self._proxies(size, [self.lanes[r] for r in some])
            parts.append((some, self.evaluator.scores_later(self._states(some), x, y)))

        def wait() -> dict[int, Scores]:
            found = {r: s for some, own in parts for r, s in zip(some, own(), strict=True)}
            return {r: found[r] for r in places}

        return wait

    def _states(self, places: Sequence[int]) -> Tensor:
        """Return the global states of some lanes to read, in order; nothing is copied for all."""
        return self.states if len(places) == len(self.lanes) else self.states[places]

    def _proxies(self, size: int, lanes: list[Lane]) -> tuple[Tensor, Tensor]:
        """Return proxy sets of one size side by side, gathered anew where the lanes changed."""
        kept = self._kept_proxies.get(size)
        if kept is None or kept[0] != lanes:
            pairs = [proxy_examples(lane.population) for lane in lanes]
            x, y = (torch.stack(column) for column in zip(*pairs, strict=True))
            self._kept_proxies[size] = kept = (lanes, x, y)
        return kept[1:]


def _on_device(value: Any, like: Tensor) -> Any:
    """Move the model states in a saved tree to where `like` `[R, d]` is; leave the rest."""
    if isinstance(value, dict):
        return {k: _on_device(v, like) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_device(v, like) for v in value)
    if isinstance(value, Tensor) and value.shape[-1:] == like.shape[-1:]:
        return value.to(like.device)
    return value
