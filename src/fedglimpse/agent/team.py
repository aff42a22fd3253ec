"""Agents of several lanes that look and learn together: one pass, whatever their number.

`Agent.look` and `Agent.learn` are the readable twins; an agent in a team does the same. On a CPU
only agents that need the same room share a pass: then every agent's numbers are, bit for bit,
those it would find alone, whoever else is in its team (with one thread; more split a product
otherwise when it is the only one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.agent import Agent, Glance, Lesson
from fedglimpse.agent.bank import LEAST, Bank, Room, Transitions, distinct, room_for
from fedglimpse.agent.cuda_graph import Graphed
from fedglimpse.agent.history import Numbers, standardised
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.learner import class_scores, set_value, top_members
from fedglimpse.agent.shared_view import (
    alike,
    features,
    means_of,
    observe,
    scales,
    spreads_of,
    take_in,
)
from fedglimpse.agent.stack import StackedLearner
from fedglimpse.agent.stacked_q import Parameters, arrange, histogram, q_values
from fedglimpse.types import View


class Task(NamedTuple):
    """What a lesson works on, besides the memories: small tensors that change every round."""

    lanes: Tensor  # [R', 1] agents that take part
    entries: Tensor  # [R', m * B] where the transitions of m mini-batches begin
    weights: Tensor  # [R', m * B] of a transition in its mini-batch's mean; 0: padding
    active: Tensor  # [R, 1] 1 for agents that learn
    oldest: Tensor  # [R'] oldest entry that still exists
    centre: Tensor  # [R', 1, 1, D] by which histories are standardised
    scale: Tensor  # [R', 1, 1, D]


class Team:
    """R agents with the same settings."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        """Agents stay their own: what the team does to them is theirs to save."""
        self.agents = list(agents)
        self.config, self.device = agents[0].config, agents[0].device
        self.net = agents[0].net  # for its architecture
        self._learner: StackedLearner | None = None
        self._bank: Bank | None = None
        cuda = self.device.type == "cuda"
        self._graphed: Graphed[Tensor] | None = Graphed() if cuda else None
        self._looking: Graphed[tuple[Tensor, Tensor | None]] | None = Graphed() if cuda else None

    def look(self, views: Sequence[View | None]) -> list[Glance | None]:
        """Score the visible clients of every lane that sees some: `Agent.look`."""
        seen = {r: view for r, view in enumerate(views) if view is not None}
        glances: list[Glance | None] = [None] * len(views)
        if not seen:
            return glances
        sketches = take_in(self.agents, seen)
        clients = features(seen, self.config)
        widths = {r: max(view.num_visible, LEAST) for r, view in seen.items()}
        if self._graphed is not None:  # fewer passes are worth more than the last bits
            known = (agent.replay.width for agent in self.agents)  # most rounds: one recording
            widths = dict.fromkeys(widths, max(*known, *widths.values()))
        for width, lanes in alike(widths).items():
            found = self._pass([(r, seen[r], clients[r], sketches[r]) for r in lanes], width)
            for r, glance in zip(lanes, found, strict=True):
                glances[r] = glance
        return glances

    @torch.no_grad()
    def _pass(self, seen: Sequence[tuple[int, View, Tensor, Tensor]], width: int) -> list[Glance]:
        """Score what some lanes see in one pass with `width` slots."""
        lanes, views, clients, sketches = (list(part) for part in zip(*seen, strict=True))
        together = observe([self.agents[r] for r in lanes], views, clients, width)
        scores, weights = self._scores(lanes, together)
        scores = scores.cpu()  # [R', V]
        if weights is not None:
            weights = weights.cpu().view(len(lanes), self.config.heads, -1, width)
        counts = [view.num_visible for view in views]
        means, spreads = means_of(scores, counts), spreads_of(weights, counts)
        glances = []
        for i, (r, count) in enumerate(zip(lanes, counts, strict=True)):
            own = None if weights is None else weights[i, :, :, :count]
            flops = self.agents[r].forward_flops(1, count)
            said = scores[i, :count], means[i], spreads[i], flops, own
            glances.append(Glance(clients[i], sketches[i], *said))
        return glances

    def _scores(self, lanes: list[int], together: Observation) -> tuple[Tensor, Tensor | None]:
        """Return the scores `[R', V]` of what some lanes see, and the cross-attention weights."""
        learner = self._stacked()

        def scores(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
            arranged = arrange(Observation(*tensors), self.config.heads, full=False)
            q, weights = q_values(self.net, learner.online.of(lanes), arranged)
            return class_scores(q.flatten(0, 1), self.config.per_class_score), weights

        if self._looking is None or len(lanes) < len(self.agents):
            return scores(*together)
        return self._looking(scores, together, (), key=(learner,))

    def learn(self, rounds: Sequence[int | None]) -> list[Lesson]:
        """Let the agents whose round is given learn from their memories: `Agent.learn`."""
        drawn = {
            r: entries
            for r, (agent, round_num) in enumerate(zip(self.agents, rounds, strict=True))
            if round_num is not None and (entries := agent.draw(round_num)) is not None
        }
        lessons = [Lesson(None, 0)] * len(self.agents)
        if not drawn:
            return lessons
        learner, bank = self._stacked(), self._stacked_memories()
        losses = self._losses(learner, bank, drawn)
        for r, entries in drawn.items():
            lessons[r] = Lesson(losses[r], self.agents[r].lesson_flops(entries))
        return lessons

    def _losses(
        self, learner: StackedLearner, bank: Bank, drawn: Mapping[int, Tensor]
    ) -> dict[int, float]:
        """Let those who drew transitions learn; returns everyone's mean TD loss."""
        if self._graphed is not None:  # recorded once for everyone, with the room of every round
            everyone, room = range(len(self.agents)), Room(bank.width, full=False)
            found = self._graphed(
                lambda *tensors: self._study(learner, bank, everyone, Task(*tensors), room),
                [tensor.to(self.device) for tensor in self._task(everyone, drawn)],
                learner.changed,
                key=(learner, bank.rows["clients"]),
            )
            return dict(enumerate(found.tolist()))
        rooms = {r: room_for(self.agents[r].replay, entries) for r, entries in drawn.items()}
        losses: dict[int, float] = {}
        for room, lanes in alike(rooms).items():
            found = self._study(learner, bank, lanes, self._task(lanes, drawn), room)
            losses.update(zip(lanes, found.tolist(), strict=True))
        return losses

    def _stacked(self) -> StackedLearner:
        """Return the agents' learners side by side; stacked anew where one has changed."""
        learners = [agent.learner for agent in self.agents]
        if self._learner is None or not self._learner.holds(learners):
            self._even_tables()
            self._learner = StackedLearner(learners)
        return self._learner

    def _stacked_memories(self) -> Bank:
        if self._bank is None:
            self._bank = Bank([agent.replay for agent in self.agents], self.device)
        self._bank.update()
        return self._bank

    def _even_tables(self) -> None:
        """Give all identity tables as many rows as the largest has."""
        for agent in self.agents:
            agent.grow_tables(max(other.table_rows for other in self.agents))

    def _task(self, lanes: Sequence[int], drawn: Mapping[int, Tensor]) -> Task:
        """Put the draws `[m, size]` of some agents into one task, padded to full mini-batches."""
        times, size = self.config.updates_per_round, self.config.batch_size
        agents = [self.agents[r] for r in lanes]
        oldest = torch.tensor([agent.replay.oldest for agent in agents])
        entries = oldest[:, None, None].repeat(1, times, size)
        weights = torch.zeros(len(lanes), times, size)
        active = torch.zeros(len(self.agents), 1)
        counts = {r: drawn[r].shape[1] for r in lanes if r in drawn}
        for count, learning in alike(counts).items():
            places = [lanes.index(r) for r in learning]
            entries[places, :, :count] = torch.stack([drawn[r] for r in learning])
            weights[places, :, :count] = 1 / count
            active[learning] = 1.0
        numbers = scales(agents)
        return Task(
            lanes=torch.tensor(list(lanes))[:, None],
            entries=entries.flatten(1),
            weights=weights.flatten(1),
            active=active,
            oldest=oldest,
            **{name: number[:, None] for name, number in numbers._asdict().items()},
        )

    def _study(
        self, learner: StackedLearner, bank: Bank, lanes: Sequence[int], task: Task, room: Room
    ) -> Tensor:
        """Take the steps of one lesson; returns the mean TD loss of every agent `[R']`."""
        batch = bank.gather(task.lanes, task.entries, task.oldest, room.width)
        batch = batch._replace(obs=self._standardised(batch.obs, task))
        times, size = self.config.updates_per_round, self.config.batch_size
        once = self.config.targets_once
        targets = self._targets(learner, bank, lanes, task, batch.returns, room) if once else None
        whole = arrange(batch.obs, self.config.heads, room.full)
        losses = torch.zeros(len(lanes), device=self.device)
        for i in range(times):
            part = slice(i * size, (i + 1) * size)
            some, weights = batch.part(part), task.weights[:, part]
            if targets is None:
                own = task._replace(entries=task.entries[:, part])
                y = self._targets(learner, bank, lanes, own, some.returns, room)
            else:
                y = targets[:, part]
            seen = whole.part(part)
            online = learner.online.of(lanes)
            q = q_values(self.net, online, seen)[0]
            value = set_value(q.flatten(0, 1), some.chosen.flatten(0, 1)).view(y.shape)
            wrong = F.mse_loss if self.config.loss == "mse" else F.smooth_l1_loss
            each = wrong(value, y, reduction="none")  # [R, B] or [R, B, C]
            each = each if each.dim() == 2 else each.mean(dim=2)
            loss = (each * weights).sum(dim=1)  # [R]
            total = loss.sum()
            if self.config.aux_weight:
                found = histogram(self.net, online, seen)
                total = total + self._histogram_loss(found, some, weights)
            learner.step(total, task.active)
            losses += loss.detach()
        return losses / times

    @torch.no_grad()
    def _targets(
        self,
        learner: StackedLearner,
        bank: Bank,
        lanes: Sequence[int],
        task: Task,
        returns: Tensor,
        room: Room,
    ) -> Tensor:
        """Return y `[R, B]` or `[R, B, C]`: the online networks pick, the target networks judge.

        What several draws of one transition lead to is judged once, but not within a recording:
        there the number of different ones must not change.
        """
        entries, places = task.entries, None
        if self._graphed is None:
            entries, places = distinct(task.entries)
        later = bank.later(task.lanes, entries, task.oldest, room.width)
        obs = self._standardised(later.obs, task)
        seen = arrange(obs, self.config.heads, room.full)

        def values(parameters: Parameters) -> Tensor:
            return q_values(self.net, parameters, seen)[0].flatten(0, 1)  # [R * U, V]

        scores = class_scores(values(learner.online.of(lanes)), self.config.per_class_score)
        best = top_members(scores, obs.mask.flatten(0, 1), later.k.flatten())
        future = set_value(values(learner.target.of(lanes)), best)
        future = future.view(*entries.shape, *future.shape[1:])  # [R, U] or [R, U, C]
        if places is not None:
            future = torch.stack([row[where] for row, where in zip(future, places, strict=True)])
        return returns + self.config.gamma**self.config.n_step * future

    def _histogram_loss(self, found: Tensor, batch: Transitions, weights: Tensor) -> Tensor:
        """Return the auxiliary loss of the release; rounds without a histogram do not count."""
        known = batch.histogram.isfinite().all(dim=2) & (weights > 0)  # [R, B]
        apart = (found - batch.histogram.nan_to_num()).abs().mean(dim=2)
        each = torch.where(known, apart, 0.0).sum(dim=1) / known.sum(dim=1).clamp_min(1)
        return self.config.aux_weight * each.sum()

    def _standardised(self, obs: Observation, task: Task) -> Observation:
        if not self.config.normalise_history:
            return obs
        numbers = Numbers(task.centre, task.scale)
        history = standardised(obs.history, numbers)
        return obs._replace(history=history)
