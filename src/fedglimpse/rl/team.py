"""Agents of several lanes that look and learn together: one pass, whatever their number.

`Agent.look` and `Agent.learn` are the readable twins; an agent in a team does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.rl.agent import Agent, Glance, Lesson
from fedglimpse.rl.attention import entropy
from fedglimpse.rl.bank import Bank, Draw, Transitions, distinct
from fedglimpse.rl.dqn import class_scores, set_value, top_members
from fedglimpse.rl.graphed import Graphed
from fedglimpse.rl.history import LIMIT
from fedglimpse.rl.observation import Observation
from fedglimpse.rl.stack import StackedLearner
from fedglimpse.rl.stacked_q import Parameters, arrange, histogram, q_values
from fedglimpse.types import View


class Task(NamedTuple):
    """What a lesson works on, besides the memories: small tensors that change every round."""

    entries: Tensor  # [R, m * B] where the transitions of m mini-batches begin
    weights: Tensor  # [R, m * B] of a transition in its mini-batch's mean; 0: padding
    active: Tensor  # [R, 1] 1 for agents that learn
    oldest: Tensor  # [R] oldest entry that still exists
    centre: Tensor  # [R, 1, 1, D] by which histories are standardised
    scale: Tensor  # [R, 1, 1, D]


class Team:
    """R agents with the same settings."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        """Agents stay their own: what the team does to them is theirs to save."""
        self.agents = list(agents)
        self.config, self.device = agents[0].config, agents[0].device
        self.net = agents[0].net  # for its architecture
        self._learner: StackedLearner | None = None
        self._bank: Bank | None = None
        self._graphed = Graphed() if self.device.type == "cuda" else None

    def look(self, views: Sequence[View | None]) -> list[Glance | None]:
        """Score the visible clients of every lane that sees some: `Agent.look`."""
        seen = [None if v is None else a.see(v) for a, v in zip(self.agents, views, strict=True)]
        some = [one for one in seen if one is not None]
        if not some:
            return [None] * len(seen)
        learner = self._stacked()
        width = max(one.obs.ids.shape[1] for one in some)
        padded = [(some[0] if one is None else one).obs.widened(width) for one in seen]
        parts = zip(*padded, strict=True)
        together = Observation(*(torch.stack(part).to(self.device) for part in parts))
        with torch.no_grad():
            arranged = arrange(together, self.config.heads, full=False)
            q, weights = q_values(self.net, learner.online.tensors, arranged)
        scores = class_scores(q.flatten(0, 1), self.config.per_class_score).cpu()  # [R, V]
        if weights is not None:
            weights = weights.cpu().view(len(seen), self.config.heads, -1, width)
        glances: list[Glance | None] = []
        for r, (agent, one) in enumerate(zip(self.agents, seen, strict=True)):
            if one is None:
                glances.append(None)
                continue
            count = one.obs.ids.shape[1]
            spread = None if weights is None else float(entropy(weights[r, :, :, :count]))
            flops = agent.forward_flops(1, count)
            heeded = None if weights is None else weights[r, :, :, :count].mean(dim=0).t()
            glances.append(
                Glance(one.clients, one.sketch, scores[r, :count], spread, flops, heeded)
            )
        return glances

    def learn(self, rounds: Sequence[int | None]) -> list[Lesson]:
        """Let the agents whose round is given learn from their memories: `Agent.learn`."""
        drawn = [
            None if round_num is None else agent.draw(round_num)
            for agent, round_num in zip(self.agents, rounds, strict=True)
        ]
        if all(entries is None for entries in drawn):
            return [Lesson(None, 0)] * len(drawn)
        learner, bank = self._stacked(), self._stacked_memories()
        task, plan = self._task(bank, drawn)
        if self._graphed is None:
            losses = self._study(learner, bank, task, plan.width, plan.full)
        else:
            width, rows = bank.width, bank.rows["clients"]  # of fixed shape, to be replayed
            losses = self._graphed(
                lambda *tensors: self._study(learner, bank, Task(*tensors), width, False),
                [tensor.to(self.device) for tensor in task],
                learner.changed,
                key=(learner, rows),
            )
        return [
            Lesson(None, 0) if entries is None else Lesson(loss, agent.lesson_flops(entries))
            for agent, entries, loss in zip(self.agents, drawn, losses.tolist(), strict=True)
        ]

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

    def _task(self, bank: Bank, drawn: Sequence[Tensor | None]) -> tuple[Task, Draw]:
        """Put the agents' draws `[m, size]` into one task, padded to full mini-batches."""
        times, size = self.config.updates_per_round, self.config.batch_size
        entries = torch.stack(
            [a.replay.oldest + torch.zeros(times, size).long() for a in self.agents]
        )
        weights = torch.zeros(len(drawn), times, size)
        for r, some in enumerate(drawn):
            if some is not None:
                entries[r, :, : some.shape[1]] = some
                weights[r, :, : some.shape[1]] = 1 / some.shape[1]
        scales = [agent.scale.numbers(self.config.normalise_history) for agent in self.agents]
        plan = bank.plan(entries.flatten(1))
        task = Task(
            entries=plan.entries,
            weights=weights.flatten(1),
            active=torch.tensor([[float(some is not None)] for some in drawn]),
            oldest=plan.oldest,
            centre=torch.stack([centre for centre, _ in scales])[:, None, None],
            scale=torch.stack([scale for _, scale in scales])[:, None, None],
        )
        return task, plan

    def _study(
        self, learner: StackedLearner, bank: Bank, task: Task, width: int, full: bool
    ) -> Tensor:
        """Take the steps of one lesson; returns the mean TD loss of every agent `[R]`."""
        batch = bank.gather(task.entries, task.oldest, width)
        if self.config.normalise_history:
            batch = batch._replace(obs=_standardised(batch.obs, task))
        times, size = self.config.updates_per_round, self.config.batch_size
        once = self.config.targets_once
        targets = self._targets(learner, bank, task, batch.returns, width, full) if once else None
        losses = []
        for i in range(times):
            part = slice(i * size, (i + 1) * size)
            some, weights = batch.part(part), task.weights[:, part]
            if targets is None:
                own = task._replace(entries=task.entries[:, part])
                y = self._targets(learner, bank, own, some.returns, width, full)
            else:
                y = targets[:, part]
            seen = arrange(some.obs, self.config.heads, full)
            q = q_values(self.net, learner.online.tensors, seen)[0]
            value = set_value(q.flatten(0, 1), some.chosen.flatten(0, 1)).view(y.shape)
            wrong = F.mse_loss if self.config.loss == "mse" else F.smooth_l1_loss
            each = wrong(value, y, reduction="none")  # [R, B] or [R, B, C]
            each = each if each.dim() == 2 else each.mean(dim=2)
            loss = (each * weights).sum(dim=1)  # [R]
            total = loss.sum()
            if self.config.aux_weight:
                found = histogram(self.net, learner.online.tensors, seen)
                total = total + self._histogram_loss(found, some, weights)
            learner.step(total, task.active)
            losses.append(loss.detach())
        return torch.stack(losses).mean(dim=0)

    @torch.no_grad()
    def _targets(
        self,
        learner: StackedLearner,
        bank: Bank,
        task: Task,
        returns: Tensor,
        width: int,
        full: bool,
    ) -> Tensor:
        """Return y `[R, B]` or `[R, B, C]`: the online networks pick, the target networks judge.

        What several draws of one transition lead to is judged once, but not within a recording:
        there the number of different ones must not change.
        """
        entries, places = task.entries, None
        if self._graphed is None:
            entries, places = distinct(task.entries)
        later = bank.later(entries, task.oldest, width)
        obs = _standardised(later.obs, task) if self.config.normalise_history else later.obs
        seen = arrange(obs, self.config.heads, full)

        def values(parameters: Parameters) -> Tensor:
            return q_values(self.net, parameters, seen)[0].flatten(0, 1)  # [R * U, V]

        scores = class_scores(values(learner.online.tensors), self.config.per_class_score)
        best = top_members(scores, obs.mask.flatten(0, 1), later.k.flatten())
        future = set_value(values(learner.target.tensors), best)
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


def _standardised(obs: Observation, task: Task) -> Observation:
    history = ((obs.history - task.centre) * task.scale).clamp(-LIMIT, LIMIT)
    return obs._replace(history=history)
