"""The agents of R lanes: what they see (history, scales), their networks and their memory.

One agent is the case R = 1. Agents choose and learn together in one pass over all lanes, on a GPU
replayed from a recording; the state of a lane is a slice that can be saved and loaded by itself.
Who shares a pass may change the last bits of a Q-value; the same lanes give the same numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse import rng
from fedglimpse.agent import policy as policies
from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.cuda_graph import Graphed
from fedglimpse.agent.flops import forward_flops, update_flops
from fedglimpse.agent.inputs import (
    History,
    Observation,
    RunningScale,
    features_of,
    finite,
    standardised,
)
from fedglimpse.agent.learner import AgentLearner, class_scores
from fedglimpse.agent.memory import ReplayMemory, Round, Sampled
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


class Drawn(NamedTuple):
    """The transitions of a lane's mini-batches."""

    entries: np.ndarray[Any, Any]  # [m, size] number of the round in which each begins
    visible: np.ndarray[Any, Any]  # [2, m, size] clients visible in that round, and n steps later
    has_history: bool  # no past round of any of them is missing


class LearningTask(NamedTuple):
    """What one round of learning works on, besides memory and networks."""

    entries: Tensor  # [R, m * B] where the transitions of m mini-batches begin
    weights: Tensor  # [R, m * B] of a transition in its mini-batch's mean; 0: padding
    active: Tensor  # [R, 1] 1 for lanes that learn
    oldest: Tensor  # [R, 1] number of the oldest round that is still remembered
    mean: Tensor  # [R, D] by which sketches of global models are standardised
    factor: Tensor  # [R, D]


class Agents:
    """Score visible clients and learn from rounds; know nothing about how sets are picked."""

    def __init__(
        self, config: AgentConfig, sizes: AgentSizes, seeds: Sequence[int], device: torch.device
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
        self._flops: dict[int, int] = {}  # of one set by the number of its clients
        on_gpu = device.type == "cuda"
        self._recorded_q: Graphed[tuple[Tensor, Tensor | None]] | None = (
            Graphed() if on_gpu else None
        )
        self._recorded_learning: Graphed[Tensor] | None = Graphed() if on_gpu else None

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
        seen = {lane: view for lane, view in enumerate(views) if view is not None}
        if not seen:
            return [None] * self.lanes
        sketches = self._take_in(seen)
        rows = features_of(list(seen.values()), self.config.input, self.config.standardise)
        features = dict(zip(seen, rows, strict=True))
        q, weights = self._q_values(self._observation(seen, features))
        scores = class_scores(q.squeeze(1), self.config.per_class_score).cpu()  # [R, V]
        entropies = None
        if weights is not None:  # [R * h, H+1, V], B being 1
            weights = weights.view(self.lanes, self.config.heads, *weights.shape[1:]).cpu()
            entropies = -torch.special.xlogy(weights, weights).sum(dim=2)  # [R, h, V]
        scored: list[ScoredView | None] = [None] * self.lanes
        for lane, view in seen.items():
            count = view.num_visible
            scored[lane] = ScoredView(
                features=features[lane],
                sketch=sketches[lane],
                scores=scores[lane, :count],
                attention=None if weights is None else weights[lane, :, :, :count],
                entropy=None if entropies is None else float(entropies[lane, :, :count].mean()),
                flops=self._flops_of_set(count),
            )
        return scored

    def _take_in(self, seen: Mapping[int, View]) -> dict[int, Tensor]:
        """Add the sketches `[D]` of the global models to the histories; returns them by lane."""
        sketches = {}
        for lane, view in seen.items():
            sketch = finite(view.server["global_sketch"].float())
            if self.history.push(lane, sketch, view.round_num):
                self.scale.add(lane, sketch)
            sketches[lane] = sketch
        return sketches

    def _observation(self, seen: Mapping[int, View], features: Mapping[int, Tensor]) -> Observation:
        """Put together what the lanes see now, one round each; lanes that see nobody are masked."""
        width = max(view.num_visible for view in seen.values())
        if self.device.type == "cuda":
            width = max(width, self.memory.width)  # the same in most rounds: one recording
        clients = torch.zeros(self.lanes, width, self.num_features)
        ids = torch.zeros(self.lanes, width, dtype=torch.int64)
        mask = torch.zeros(self.lanes, width, dtype=torch.bool)
        for lane, view in seen.items():
            count = view.num_visible
            clients[lane, :count] = features[lane]
            ids[lane, :count] = view.ids
            mask[lane, :count] = True
        history, exists = self.history.window()  # [R, H+1, D], [R, H+1]
        if self.config.normalise_history:
            history = standardised(history, *self.scale.numbers())
        tensors = (clients, ids, mask, history, exists)
        return Observation(*(tensor.unsqueeze(1).to(self.device) for tensor in tensors))

    def _q_values(self, obs: Observation) -> tuple[Tensor, Tensor | None]:
        """Return Q and attention weights of the online networks; on a GPU from a recording."""
        if self._recorded_q is None:
            q: tuple[Tensor, Tensor | None] = self.learner.online(obs)
            return q
        return self._recorded_q(
            lambda *tensors: self.learner.online(Observation(*tensors)), obs, (), key=()
        )

    def learn(self, rounds: Mapping[int, Round]) -> dict[int, LearningResult]:
        """Store finished rounds of some lanes and learn from what they remember: Algorithm 2.

        Returns:
            The result of each lane that remembers enough.
        """
        if not rounds:
            return {}
        self.memory.add(rounds)
        drawn: dict[int, Drawn] = {}
        for lane, item in rounds.items():
            of_lane = self._draw(lane, item.round_num)
            if of_lane is not None:
                drawn[lane] = of_lane
        if not drawn:
            return {}
        task = self._task(drawn)
        if self._recorded_learning is None:
            width = max(int(of_lane.visible.max()) for of_lane in drawn.values())
            least = min(int(of_lane.visible.min()) for of_lane in drawn.values())
            complete = all(of_lane.has_history for of_lane in drawn.values())
            full = complete and least == width and len(drawn) == self.lanes
            td_losses = self._study(task, width, full)
        else:  # recorded once, with the room of every round
            td_losses = self._recorded_learning(
                lambda *tensors: self._study(LearningTask(*tensors), self.memory.width, full=False),
                [tensor.to(self.device) for tensor in task],
                list(self.learner.changed.values()),
                key=(self.memory.rows["clients"],),
            )
        results = {}
        for lane, td_loss in enumerate(td_losses.tolist()):
            if lane in drawn:
                flops_now, flops_later = (
                    self._flops_of_set(visible)
                    for visible in drawn[lane].visible.max(axis=(1, 2)).tolist()
                )
                flops = update_flops(flops_now, flops_later)
                results[lane] = LearningResult(td_loss, drawn[lane].entries.size * flops)
        return results

    def _draw(self, lane: int, round_num: int) -> Drawn | None:
        """Draw the transitions of a lane's mini-batches; None: too few yet."""
        memory = self.memory
        starts = memory.starts(lane)
        times = self.config.updates_per_round
        count = len(starts)
        if count < self.config.learn_start or not times:
            return None
        orders = rng.shuffles(self.seeds[lane], "replay", round_num, times, count).numpy()
        entries = starts[orders[:, : self.config.batch_size]]  # [m, size]
        first_and_last = np.stack([entries, entries + self.config.n_step])
        oldest_needed = entries.min() - self.config.history
        return Drawn(
            entries,
            visible=memory.visible[lane, first_and_last % memory.capacity],
            has_history=bool(oldest_needed >= memory.oldest[lane]),
        )

    def _task(self, drawn: Mapping[int, Drawn]) -> LearningTask:
        """Put the draws of all lanes together, padded to full mini-batches."""
        times = self.config.updates_per_round
        size = self.config.batch_size
        oldest = torch.from_numpy(self.memory.oldest)[:, None]  # [R, 1]
        entries = oldest[:, None].repeat(1, times, size)
        weights = torch.zeros(self.lanes, times, size)
        active = torch.zeros(self.lanes, 1)
        for lane, of_lane in drawn.items():
            count = of_lane.entries.shape[1]
            entries[lane, :, :count] = torch.from_numpy(of_lane.entries)
            weights[lane, :, :count] = 1 / count
            active[lane] = 1.0
        mean, factor = self.scale.numbers()
        return LearningTask(entries.flatten(1), weights.flatten(1), active, oldest, mean, factor)

    def _study(self, task: LearningTask, width: int, full: bool) -> Tensor:
        """Take the steps of one round of learning; returns the mean TD loss of lanes `[R]`.

        Args:
            task: what is learnt from.
            width: slots of an observation.
            full: no slot and no past round of any transition is missing.
        """
        sketches = self.memory.rows["sketch"]
        if self.device.type == "cpu":
            sketches = sketches[:, : int(self.memory.count.max())]  # rows in use
        if self.config.normalise_history:
            sketches = standardised(sketches, task.mean, task.factor)
        lanes = torch.arange(self.lanes, device=self.device)[:, None]
        sampled = Sampled(lanes, task.entries, task.oldest, sketches)
        all_futures = None
        if self.config.targets_once:
            all_futures = self._future(sampled, width, full)
        size = self.config.batch_size
        losses = torch.zeros(self.lanes, device=self.device)
        for start in range(0, task.entries.shape[1], size):
            mini_batch = slice(start, start + size)  # of each lane
            in_batch = sampled._replace(entries=task.entries[:, mini_batch])
            if all_futures is None:
                future = self._future(in_batch, width, full)
            else:
                future = all_futures[:, mini_batch]
            batch = self.memory.gather(in_batch, width)
            weights = task.weights[:, mini_batch]
            losses += self.learner.update(batch, future, weights, task.active, full)
        return losses / self.config.updates_per_round

    def _future(self, sampled: Sampled, width: int, full: bool) -> Tensor:
        """Return the value of what transitions lead to `[R, B]` or `[R, B, C]`.

        What several draws of one transition lead to is valued once, but not on a GPU: within a
        recording the number of different ones must not change.
        """
        if self.device.type == "cuda":
            return self.learner.future(self.memory.gather_next(sampled, width), full)
        entries, positions = distinct(sampled.entries)
        later = self.memory.gather_next(sampled._replace(entries=entries), width)
        values = self.learner.future(later, full)  # [R, U] or [R, U, C]
        of_lanes = zip(values, positions, strict=True)
        return torch.stack([of_lane[position] for of_lane, position in of_lanes])

    def _flops_of_set(self, visible: int) -> int:
        """Count one pass over one visible set; each size is counted once."""
        if visible not in self._flops:
            self._flops[visible] = forward_flops(
                self.config,
                features=self.num_features,
                sketch_dim=self.sizes.sketch_dim,
                outputs=self.sizes.outputs(self.config),
                sets=1,
                visible=visible,
            )
        return self._flops[visible]

    def policy(self, lane: int) -> dict[str, Any]:
        """Return the artefact of a lane that another run can load."""
        weights = self.learner.online.lane_weights(lane)
        packed = policies.pack(weights, self.config, self.sizes)
        return packed | {"scale": self.scale.state_dict(lane)}

    def load_policy(self, lane: int, policy: dict[str, Any], keep_scale: bool = False) -> None:
        """Take over a policy's network, for both the online and the target network of a lane.

        Args:
            lane: that starts with the policy.
            policy: of `policy()`.
            keep_scale: also take over the statistics of the global sketches; right only where
                this run continues the same model. Otherwise the run measures its own.
        """
        policies.check(policy, self.config, self.sizes)
        fresh = self.learner.online.lane_weights(lane)
        self.learner.start_from(lane, policies.fitted(policy, fresh))
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


def distinct(entries: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return each entry number of a lane once, and where each of `entries` is among these.

    Args:
        entries: with repetitions.  # [R, B]

    Returns:
        Entry numbers `[R, U]`, padded with repetitions, and positions `[B]` for each lane.
    """
    unique: list[Tensor] = []
    positions: list[Tensor] = []
    for of_lane in entries:
        numbers, inverse = of_lane.unique(return_inverse=True)
        unique.append(numbers)
        positions.append(inverse)
    longest = max(map(len, unique))
    padded = []
    for numbers in unique:
        padded.append(F.pad(numbers, (0, longest - len(numbers)), value=int(numbers[0])))
    return torch.stack(padded), positions
