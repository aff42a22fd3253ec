"""The simulated federation: something a server can only observe and commit to.

A World runs R lanes (seeds, or methods on the same model) in step. It knows nothing about methods
beyond what a selector needs, and nothing about files or progress bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedglimpse import needs as catalogue
from fedglimpse import rng
from fedglimpse.cost import Activity, CostModel
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.population import Population
from fedglimpse.errors import UserError
from fedglimpse.sim.evaluate import Evaluator, Reward, Scores
from fedglimpse.sim.jobs import Jobs, LocalTrainer
from fedglimpse.sim.reports import Reporter, TrainedClients
from fedglimpse.types import Choice, Method, Outcome, Update, View, Visibility


@dataclass
class Lane:
    """One federation among those that run side by side."""

    seed: int
    population: Population
    visibility: Visibility
    method: Method
    reward: Reward
    k: int
    min_visible: int = 1  # rounds with fewer visible clients pass without training


@dataclass
class _Round:
    """What one lane has seen and done in the current round."""

    ids: Tensor  # [V] visible and usable
    sizes: Tensor  # [V]
    visible: list[int]  # all visible, also clients whose update was refused
    idle: bool  # too few are visible: the round passes without training
    rejected: list[int] = field(default_factory=list)
    clients: TrainedClients | None = None  # of the slots in `ids`, once they have trained
    trained: list[int] = field(default_factory=list)  # ids that trained
    view: View | None = None
    selected: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    info: Mapping[str, Any] = field(default_factory=dict)
    train_loss: float | None = None
    reward: float = 0.0


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
        """
        self.dataset, self.lanes, self.states = dataset, list(lanes), start
        self.trainer, self.evaluator, self.reporter = trainer, evaluator, reporter
        self.costs = costs
        self.round_num = 0
        self._now: list[_Round] = []
        for lane in self.lanes:
            catalogue.check(lane.method.selector.needs | lane.method.selector.learns_from)

    def observe(self) -> list[View | None]:
        """Return what each lane's server sees; None where it has nothing to choose from.

        Selectors that need trained reports make all their visible clients train here, all lanes
        together. A client whose update is not finite is left out of the view.
        """
        self._now = [self._look(lane) for lane in self.lanes]
        early = [
            r
            for r, lane in enumerate(self.lanes)
            if catalogue.trains_before_choice(lane.method.selector.needs) and not self._now[r].idle
        ]
        self._train({r: self._now[r].ids for r in early})
        for r, (lane, now) in enumerate(zip(self.lanes, self._now, strict=True)):
            if not now.idle and len(now.ids):
                now.view = self._view(r, lane, now)
        return [now.view for now in self._now]

    def commit(self, choices: Sequence[Choice | None]) -> list[Outcome | None]:
        """Aggregate what was chosen; returns what came of it, lane by lane."""
        for now, choice, lane in zip(self._now, choices, self.lanes, strict=True):
            if now.view is not None and choice is not None:
                check_choice(choice, now.view, lane.k)
        late = {
            r: now.ids[choice.slots]
            for r, (now, choice) in enumerate(zip(self._now, choices, strict=True))
            if now.view is not None and choice is not None and now.clients is None
        }
        kept = self._train(late)
        outcomes: list[Outcome | None] = []
        for r, choice in enumerate(choices):
            if choice is None or self._now[r].view is None:
                outcomes.append(None)
                continue
            slots = torch.arange(len(kept[r])) if r in kept else choice.slots
            weights = choice.weights
            if r in kept and weights is not None:
                weights = weights[kept[r]]
            outcomes.append(self._aggregate(r, slots, weights, choice))
        self.round_num += 1
        return outcomes

    def records(
        self, metrics: Sequence[Mapping[str, float]], evaluate: bool
    ) -> list[dict[str, Any]]:
        """Return one record for each lane of the round that was just committed.

        Args:
            metrics: what each selector's feedback returned.
            evaluate: score the new global models on the test set.
        """
        return [self._record(r, metrics[r], evaluate) for r in range(len(self.lanes))]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue between two rounds."""
        return {
            "round": self.round_num,
            "states": self.states.cpu(),
            "aggregators": [lane.method.aggregator.state_dict() for lane in self.lanes],
            "rewards": [lane.reward.state_dict() for lane in self.lanes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.round_num = state["round"]
        self.states = state["states"].to(self.states.device)
        for lane, aggregator, reward in zip(
            self.lanes, state["aggregators"], state["rewards"], strict=True
        ):
            lane.method.aggregator.load_state_dict(aggregator)
            lane.reward.load_state_dict(reward)

    def _look(self, lane: Lane) -> _Round:
        visible = lane.visibility.visible(lane.seed, self.round_num)
        sizes = lane.population.sizes[visible]
        usable = sizes > 0
        idle = int(usable.sum()) < lane.min_visible
        return _Round(visible[usable], sizes[usable], visible.tolist(), idle)

    def _view(self, r: int, lane: Lane, now: _Round) -> View:
        needs = lane.method.selector.needs
        reports = self.reporter.probes(needs, self.states[r], lane.population, now.ids)
        if now.clients is not None:
            reports |= self.reporter.trained(needs, now.clients)
        return View(
            round_num=self.round_num,
            ids=now.ids,
            sizes=now.sizes,
            reports=reports,
            server=self.reporter.server(needs, self.states[r]),
            rng=rng.generator(lane.seed, "select", self.round_num),
        )

    def _train(self, ids_of: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Train these clients of these lanes at once and keep the finite updates.

        Returns, for each lane, the positions in its ids whose update is finite.
        """
        if not ids_of:
            return {}
        trained = self.trainer.train(self.states, self._jobs(ids_of))
        kept, at = {}, 0
        for r, ids in ids_of.items():
            part = slice(at, at + len(ids))
            at += len(ids)
            states, now = trained.states[part], self._now[r]
            finite = states.isfinite().all(dim=1).cpu()  # [V]
            keep = finite.nonzero().flatten()
            kept[r] = keep
            now.trained = ids.tolist()
            now.rejected = ids[~finite].tolist()
            states = states[keep.to(states.device)]
            loss = trained.loss[part][keep.to(states.device)]
            now.clients = TrainedClients(states, states - self.states[r], loss)
            now.ids = ids[keep]
            now.sizes = self.lanes[r].population.sizes[now.ids]
            now.train_loss = float(loss.mean()) if len(keep) else None
        return kept

    def _jobs(self, ids_of: Mapping[int, Tensor]) -> Jobs:
        rows, sizes, lane_of, keys, mu, squared = [], [], [], [], [], []
        for r, ids in ids_of.items():
            lane = self.lanes[r]
            some_rows, some_sizes = lane.population.take(ids)
            rows.append(some_rows)
            sizes.append(some_sizes)
            lane_of += [r] * len(ids)
            keys += [rng.key(lane.seed, "train", self.round_num, i) for i in ids.tolist()]
            mu += [lane.method.objective.proximal_mu] * len(ids)
            squared += [lane.method.objective.proximal_squared] * len(ids)
        width = max(part.shape[1] for part in rows)
        padded = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in rows]
        jobs = Jobs(
            lane=torch.tensor(lane_of),
            keys=torch.tensor(keys),
            rows=torch.cat(padded),
            sizes=torch.cat(sizes),
            mu=torch.tensor(mu, dtype=torch.float32),
            squared=torch.tensor(squared),
        )
        return jobs.to(self.states.device)

    def _aggregate(self, r: int, slots: Tensor, weights: Tensor | None, choice: Choice) -> Outcome:
        lane, now = self.lanes[r], self._now[r]
        assert now.clients is not None
        sizes = now.sizes[slots].double()
        weights = sizes / sizes.sum() if weights is None else weights.double()
        chosen = slots.to(self.states.device)
        if len(slots):
            update = Update(
                round_num=self.round_num,
                ids=now.ids[slots],
                sizes=now.sizes[slots],
                starts=self.states[r].expand(len(slots), -1),
                deltas=now.clients.deltas[chosen],
                weights=weights.to(self.states),
                num_params=self.reporter.num_params,
                reports={},
            )
            self.states[r] = lane.method.aggregator.step(self.states[r].clone(), update)
        now.selected, now.weights = now.ids[slots].tolist(), weights.tolist()
        now.info = choice.info
        scores = self._score_proxy(r)
        now.reward, per_class = lane.reward.update(scores)
        after = TrainedClients(*(v[chosen] for v in vars(now.clients).values()))
        return Outcome(
            round_num=self.round_num,
            selected=now.ids[slots],
            reward=now.reward,
            score=lane.reward.score(scores),
            per_class=scores.per_class_f1,
            reward_per_class=per_class,
            weights=weights.float(),
            reports=self.reporter.trained(lane.method.selector.learns_from, after),
        )

    def _score_proxy(self, r: int) -> Scores:
        rows = self.lanes[r].population.proxy.to(self.dataset.y_train.device)
        x, y = self.dataset.x_train[rows], self.dataset.y_train[rows]
        return self.evaluator.score(self.states[r], x, y)

    def _record(self, r: int, metrics: Mapping[str, float], evaluate: bool) -> dict[str, Any]:
        lane, now = self.lanes[r], self._now[r]
        test = (self.dataset.x_test, self.dataset.y_test)
        scores = self.evaluator.score(self.states[r], *test) if evaluate else None
        sizes = lane.population.sizes
        method = lane.method
        active = now.visible if now.view is not None or now.trained else []
        activity = Activity(
            needs=method.selector.needs,
            needs_after=method.selector.learns_from | method.aggregator.needs,
            visible=len(active),
            visible_examples=int(sizes[active].sum()),
            trained=len(now.trained),
            trained_examples=int(sizes[now.trained].sum()),
            chosen=len(now.selected),
            chosen_examples=int(sizes[now.selected].sum()),
            selector_flops=int(metrics.get("server_flops", 0)),
        )
        cost = self.costs.round(activity)
        return {
            "lane": r,
            "seed": lane.seed,
            "round": self.round_num - 1,
            "visible": now.visible,
            "selected": now.selected,
            "rejected": now.rejected,
            "weights": now.weights,
            "accuracy": None if scores is None else scores.accuracy,
            "macro_f1": None if scores is None else scores.macro_f1,
            "per_class_f1": None if scores is None else scores.per_class_f1.tolist(),
            "loss": None if scores is None else scores.loss,
            "train_loss": now.train_loss,
            "reward": now.reward if now.view is not None else lane.reward.total,
            **now.info,
            **{k: v for k, v in metrics.items() if k != "server_flops"},
            **vars(cost),
        }


def check_choice(choice: Choice, view: View, k: int) -> None:
    """Raise UserError where a selector's answer is not a legal set of slots."""
    slots, limit = choice.slots.tolist(), min(k, view.num_visible)
    if not 1 <= len(slots) <= limit:
        problem = f"{len(slots)} slots, but 1 to {limit} are allowed"
    elif len(set(slots)) < len(slots):
        problem = f"slots {slots} with a repetition"
    elif min(slots) < 0 or max(slots) >= view.num_visible:
        problem = f"slots {slots}, but only 0 to {view.num_visible - 1} exist"
    elif choice.weights is not None and choice.weights.shape != choice.slots.shape:
        problem = f"{len(choice.weights)} weights for {len(slots)} slots"
    elif choice.weights is not None and not choice.weights.isfinite().all():
        problem = f"weights {choice.weights.tolist()} that are not finite"
    else:
        return
    raise UserError(f"The selector answered round {view.round_num} with {problem}: mend select().")
