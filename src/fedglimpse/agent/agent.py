"""The agents of R lanes: what they see (history, scales), their networks and their memory.

One agent is the case R = 1. Agents choose and learn together in one pass over all lanes, on a GPU
replayed from a recording; the state of a lane is a slice that can be saved and loaded by itself.
Who shares a pass may change the last bits of a Q-value; the same lanes give the same numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.cuda_graph import Graphed
from fedglimpse.agent.inputs import (
    History,
    Observation,
    RunningScale,
    features_of,
    finite,
    standardised,
)
from fedglimpse.agent.learner import AgentLearner
from fedglimpse.agent.memory import ReplayMemory, Round, Sampled
from fedglimpse.agent.network import forward_flops, update_flops
from fedglimpse.agent.policy import check_fit, fitted, pack
from fedglimpse.types import View


class ScoredView(NamedTuple):
    """What the agent of a lane makes of a view."""

    features: Tensor  # [V, F] of the clients, as the network read them
    sketch: Tensor  # [D] of the global model
    scores: Tensor  # [V] Q, on the CPU
    attention: Tensor | None  # [h, H+1, V] weights of the cross-attention, newest model last
    entropy: float | None  # of these weights, in nats
    flops: int


class LearningResult(NamedTuple):
    """What learning in one round of a lane came to."""

    td_loss: float  # mean over the mini-batches
    flops: int


class LearningTask(NamedTuple):
    """What one round of learning works on, besides memory and networks."""

    entries: Tensor  # [R, m * B] where the transitions of m mini-batches begin
    weights: Tensor  # [R, m * B] of a transition in its mini-batch's mean; 0: padding
    active: Tensor  # [R, 1] 1 for lanes that learn
    oldest: Tensor  # [R, 1] number of the oldest round that is still remembered
    mean: Tensor  # [R, D] by which sketches of global models are standardised
    factor: Tensor  # [R, D]


class DrawnTask(NamedTuple):
    """A round of learning that was drawn."""

    task: LearningTask
    width: int  # slots of the widest observation in it
    flops: dict[int, int]  # what it costs, by the lanes that learn


class Agents:
    """Score visible clients and learn from rounds; know nothing about how sets are picked."""

    def __init__(
        self,
        config: AgentConfig,
        sizes: AgentSizes,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        """Start without experience (Algorithm 1, lines 2-4).

        Args:
            config: every choice of the agents.
            sizes: of what they see.
            seeds: of the lanes.
            device: where networks and memory live.
        """
        self.config = config
        self.sizes = sizes
        self.seeds = list(seeds)
        self.device = device
        self.lanes = len(self.seeds)
        self.learner = AgentLearner(config, sizes, seeds, device)
        self.memory = ReplayMemory(self.lanes, config, sizes, device)
        self.history = History(self.lanes, config.history, sizes.sketch_dim)
        self.scale = RunningScale(self.lanes, sizes.sketch_dim)
        self.num_features = sizes.features(config)  # F
        self.on_gpu = device.type == "cuda"
        self._recorded_q: Graphed[tuple[Tensor, Tensor | None]] = Graphed()  # used on a GPU only
        self._recorded_learning: Graphed[Tensor] = Graphed()

    @classmethod
    def joined(cls, members: Sequence[tuple[Agents, int]]) -> Agents:
        """Return agents with these lanes of other agents of the same settings, as copies."""
        first = members[0][0]
        seeds = [agents.seeds[lane] for agents, lane in members]
        joined = cls(first.config, first.sizes, seeds, first.device)
        for new_lane, (agents, lane) in enumerate(members):
            joined.load_state_dict(new_lane, agents.state_dict(lane))
        return joined

    @torch.no_grad()
    def score(self, views: Sequence[View | None]) -> list[ScoredView | None]:
        """Take in the views (Algorithm 1, line 7) and score every visible client.

        Args:
            views: of each lane, None where nobody is seen.
        """
        seen: dict[int, View] = {}
        for lane, view in enumerate(views):
            if view is not None:
                seen[lane] = view
        scored: list[ScoredView | None] = [None] * self.lanes
        if not seen:
            return scored
        obs = self._take_in(seen)
        on_device = Observation(*(tensor.to(self.device) for tensor in obs))
        if self.on_gpu:
            q, weights = self._replayed_q(on_device)
        else:
            q, weights = self.learner.online(on_device)
        q_of_clients = q.squeeze(1)  # [R, V, C], B being 1
        scores = self.learner.class_scores(q_of_clients, dim=2).cpu()  # [R, V]
        if weights is not None:  # [R * h, H+1, V]
            shape = (self.lanes, self.config.heads, *weights.shape[1:])
            weights = weights.view(shape).cpu()
            entropies = -torch.special.xlogy(weights, weights).sum(dim=2)  # [R, h, V]
        for lane, view in seen.items():
            count = len(view.ids)
            attention = None
            entropy = None
            if weights is not None:
                attention = weights[lane, :, :, :count]
                entropy_of_rows = entropies[lane, :, :count]
                entropy = float(entropy_of_rows.mean())
            scored[lane] = ScoredView(
                features=obs.clients[lane, 0, :count],
                sketch=self.history.sketches[lane, -1].clone(),
                scores=scores[lane, :count],
                attention=attention,
                entropy=entropy,
                flops=forward_flops(self.config, self.sizes, 1, count),
            )
        return scored

    def _take_in(self, seen: Mapping[int, View]) -> Observation:
        """Put together what the lanes see now, one round each; lanes that see nobody are masked."""
        width = max(len(view.ids) for view in seen.values())
        if self.on_gpu:
            width = max(width, self.memory.width)  # the same in most rounds: one recording
        slots_of_all = (self.lanes, 1, width)  # B being 1
        clients = torch.zeros(*slots_of_all, self.num_features)
        ids = torch.zeros(slots_of_all, dtype=torch.int64)
        mask = torch.zeros(slots_of_all, dtype=torch.bool)
        for lane, view in seen.items():
            sketch = finite(view.server["global_sketch"].float())
            is_new = self.history.push(lane, sketch, view.round_num)
            if is_new:
                self.scale.add(lane, sketch)
            features = features_of(view, self.config.input, self.config.standardise)
            slots = slice(len(view.ids))
            clients[lane, 0, slots] = features
            ids[lane, 0, slots] = view.ids
            mask[lane, 0, slots] = True
        history = self.history.sketches  # [R, H+1, D]
        if self.config.normalise_history:
            history = standardised(history, *self.scale.numbers())
        exists = self.history.exists  # [R, H+1]
        return Observation(
            clients=clients,
            ids=ids,
            mask=mask,
            history=history.unsqueeze(1),
            history_mask=exists.unsqueeze(1),
        )

    def _replayed_q(self, obs: Observation) -> tuple[Tensor, Tensor | None]:
        """Return Q and attention weights of the online networks from a recording on the GPU."""
        return self._recorded_q(
            lambda *tensors: self.learner.online(Observation(*tensors)),
            obs,
            (),
            key=(),
        )

    def learn(self, rounds: Mapping[int, Round]) -> dict[int, LearningResult]:
        """Store finished rounds of some lanes and learn from what they remember: Algorithm 2.

        Returns:
            The result of each lane that remembers enough.
        """
        if not rounds:
            return {}
        self.memory.add(rounds)
        drawn = self._draw(rounds)
        if not drawn.flops:
            return {}
        if self.on_gpu:
            td_losses = self._replayed_study(drawn.task)
        else:
            td_losses = self._study(drawn.task, drawn.width)
        loss_of_lane = td_losses.tolist()
        results: dict[int, LearningResult] = {}
        for lane, flops in drawn.flops.items():
            results[lane] = LearningResult(loss_of_lane[lane], flops)
        return results

    def _draw(self, rounds: Mapping[int, Round]) -> DrawnTask:
        """Draw the mini-batches of all lanes, padded to one size; lanes with too little sit out."""
        memory = self.memory
        times = self.config.updates_per_round
        size = self.config.batch_size
        oldest = torch.from_numpy(memory.oldest).unsqueeze(1)  # [R, 1]
        entries = oldest.unsqueeze(2).repeat(1, times, size)  # [R, m, B]
        weights = torch.zeros(self.lanes, times, size)
        active = torch.zeros(self.lanes, 1)
        width = 0
        flops: dict[int, int] = {}
        for lane, item in rounds.items():
            starts = memory.starts(lane)
            if len(starts) < self.config.learn_start or not times:
                continue
            order = rng.shuffles(
                self.seeds[lane],
                "replay",
                item.round_num,
                times,
                len(starts),
            )
            of_lane = starts[order[:, :size].numpy()]  # [m, up to B]
            count = of_lane.shape[1]
            entries[lane, :, :count] = torch.from_numpy(of_lane)
            weights[lane, :, :count] = 1 / count
            active[lane] = 1.0
            later = of_lane + self.config.n_step
            num_visible = memory.visible[lane]  # [capacity]
            visible = int(num_visible[of_lane % memory.capacity].max())
            visible_later = int(num_visible[later % memory.capacity].max())
            width = max(width, visible, visible_later)
            of_transition = update_flops(self.config, self.sizes, visible, visible_later)
            flops[lane] = of_lane.size * of_transition
        mean, factor = self.scale.numbers()
        task = LearningTask(
            entries=entries.flatten(1),
            weights=weights.flatten(1),
            active=active,
            oldest=oldest,
            mean=mean,
            factor=factor,
        )
        return DrawnTask(task, width, flops)

    def _replayed_study(self, task: LearningTask) -> Tensor:
        """Do what `_study` does from a recording on the GPU, made once with room for any round."""
        return self._recorded_learning(
            lambda *tensors: self._study(LearningTask(*tensors), self.memory.width),
            [tensor.to(self.device) for tensor in task],
            list(self.learner.changed.values()),
            key=(self.memory.rows["clients"],),
        )

    def _study(self, task: LearningTask, width: int) -> Tensor:
        """Take the steps of one round of learning; returns the mean TD loss of lanes `[R]`.

        Args:
            task: what is learnt from.
            width: slots of an observation.
        """
        sketches = self.memory.rows["sketch"]
        if self.device.type == "cpu":
            rows_in_use = int(self.memory.count.max())
            sketches = sketches[:, :rows_in_use]
        if self.config.normalise_history:
            sketches = standardised(sketches, task.mean, task.factor)
        lanes = torch.arange(self.lanes, device=self.device)
        sampled = Sampled(
            lanes=lanes.unsqueeze(1),  # [R, 1]
            entries=task.entries,
            oldest=task.oldest,
            sketches=sketches,
        )
        all_futures = None
        if self.config.targets_once:
            all_futures = self._future(sampled, width)
        size = self.config.batch_size
        losses = torch.zeros(self.lanes, device=self.device)
        num_entries = task.entries.shape[1]  # m * B
        for start in range(0, num_entries, size):
            mini_batch = slice(start, start + size)  # of each lane
            starts = sampled._replace(entries=task.entries[:, mini_batch])
            if all_futures is None:
                future = self._future(starts, width)
            else:
                future = all_futures[:, mini_batch]
            batch = self.memory.gather(starts, width)
            weights = task.weights[:, mini_batch]
            losses += self.learner.update(batch, future, weights, task.active)
        return losses / self.config.updates_per_round

    def _future(self, starts: Sampled, width: int) -> Tensor:
        """Return the value of what transitions lead to, n steps later `[R, B, C]`.

        What several draws of one transition lead to is valued once, but not on a GPU: within a
        recording the number of different ones must not change.
        """
        entries = starts.entries + self.config.n_step
        if not self.on_gpu:
            entries, positions = distinct(entries)
        later = starts._replace(entries=entries)
        obs = self.memory.observe(later, width)
        (k,) = self.memory.rows_of(later.lanes, later.entries, "k")
        values = self.learner.future(obs, k)
        if not self.on_gpu:
            values = values[later.lanes, positions]  # [R, U, C] -> [R, B, C]
        return values

    def policy(self, lane: int) -> dict[str, Any]:
        """Return the artefact of a lane that another run can load."""
        weights = self.learner.online.lane_weights(lane)
        packed = pack(weights, self.config, self.sizes)
        return packed | {"scale": self.scale.state_dict(lane)}

    def load_policy(self, lane: int, policy: dict[str, Any], keep_scale: bool = False) -> None:
        """Take over a policy's network, for both the online and the target network of a lane.

        Args:
            lane: that starts with the policy.
            policy: of `policy()`.
            keep_scale: also take over the statistics of the global sketches; right only where
                this run continues the same model. Otherwise the run measures its own.
        """
        check_fit(policy, self.config, self.sizes)
        fresh = self.learner.online.lane_weights(lane)
        self.learner.start_from(lane, fitted(policy, fresh))
        if keep_scale:
            self.scale.load_state_dict(lane, policy["scale"])

    def state_dict(self, lane: int) -> dict[str, Any]:
        """Return everything needed to resume a lane: tensors and plain values, copied."""
        return {
            "learner": self.learner.state_dict(lane),
            "memory": self.memory.state_dict(lane),
            "history": self.history.state_dict(lane),
            "scale": self.scale.state_dict(lane),
        }

    def load_state_dict(self, lane: int, state: dict[str, Any]) -> None:
        """Resume a lane from `state`."""
        self.learner.load_state_dict(lane, state["learner"])
        self.memory.load_state_dict(lane, state["memory"])
        self.history.load_state_dict(lane, state["history"])
        self.scale.load_state_dict(lane, state["scale"])


def distinct(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return each entry number of a lane once, and where each of `entries` is among these.

    Args:
        entries: with repetitions.  # [R, B]

    Returns:
        Entry numbers `[R, U]`, padded with zeros, and positions `[R, B]` in them.
    """
    numbers: list[Tensor] = []
    positions: list[Tensor] = []
    for of_lane in entries:
        numbers_of_lane, positions_of_lane = of_lane.unique(return_inverse=True)
        numbers.append(numbers_of_lane)
        positions.append(positions_of_lane)
    padded = pad_sequence(numbers, batch_first=True)
    return padded, torch.stack(positions)
