"""The agent: eyes (history, scales), mind (two Q-networks) and memory (replay) put together."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.agent import policy as policies
from fedglimpse.agent.attention import entropy
from fedglimpse.agent.config import NUMBERS, AgentConfig
from fedglimpse.agent.flops import forward_flops, update_flops
from fedglimpse.agent.history import History, RunningScale
from fedglimpse.agent.identity import TableIdentity
from fedglimpse.agent.inputs import Observation, client_features, finite
from fedglimpse.agent.learner import Batch, DoubleDQN, class_scores
from fedglimpse.agent.memory import Replay
from fedglimpse.agent.network import QNetwork
from fedglimpse.types import View

_PARTS = ("learner", "replay", "history", "scale")  # what a saved agent consists of


class Glance(NamedTuple):
    """What the agent makes of a view."""

    clients: Tensor  # [V, F] features as the network read them
    sketch: Tensor  # [D] of the global model
    scores: Tensor  # [V] Q, on the CPU
    mean: float  # of the scores
    entropy: float | None  # of the cross-attention, None without one
    flops: int
    attention: Tensor | None  # [h, H+1, V] weights of every head, newest model last


class Lesson(NamedTuple):
    """What an agent did to its networks in one round."""

    td_loss: float | None  # mean over the mini-batches, None before learning starts
    flops: int


class Agent:
    """Scores visible clients and learns from rounds; knows nothing about how sets are picked."""

    def __init__(
        self, config: AgentConfig, *, sketch_dim: int, num_classes: int, seed: int, device: str
    ) -> None:
        """Start without experience (Algorithm 1, lines 2-4).

        Args:
            config: every choice of the agent.
            sketch_dim: D, floats of a client's and of the global sketch.
            num_classes: C.
            seed: of the run.
            device: where the networks live; memories stay on the CPU.
        """
        self.config, self.seed, self.device = config, seed, torch.device(device)
        self.known = 0  # ids below this one have been seen
        self._sizes = {"sketch_dim": sketch_dim, "num_classes": num_classes}
        features = sketch_dim if config.reads_sketches else 1 + len(NUMBERS[config.input])
        outputs = num_classes if config.q_output == "per_class" else 1
        self.shape = {"features": features, "sketch_dim": sketch_dim, "outputs": outputs}
        self._flops: dict[tuple[int, int], int] = {}
        self.net = QNetwork(config, features=features, seed=seed, **self._sizes).to(self.device)
        self.learner = build_learner(self.net, config)
        self.history = History(config.history, sketch_dim)
        self.scale = RunningScale(sketch_dim)
        self.replay = Replay(
            config.buffer,
            features=features,
            rewards=outputs,
            history=config.history,
            n_step=config.n_step,
            gamma=config.gamma,
            **self._sizes,
        )

    def take_in(self, view: View, sketch: Tensor) -> None:
        """Add the sketch `[D]` of the global model to the history; make room for new clients."""
        if self.history.push(sketch, view.round_num):
            self.scale.add(sketch)
        self.make_room(max(view.ids.tolist()) + 1)

    def look(self, view: View) -> Glance:
        """Take in a view (Algorithm 1, line 7) and score every visible client."""
        sketch = finite(view.server["global_sketch"].float())
        self.take_in(view, sketch)
        clients = client_features(view, self.config.input, self.config.standardise)
        mask = torch.ones(1, view.num_visible, dtype=torch.bool)
        past, past_mask = self.history.window()
        if self.config.normalise_history:
            past = self.scale(past)
        obs = Observation(clients[None], view.ids[None], mask, past[None], past_mask[None])
        with torch.no_grad():
            q, weights = self.net.explain(obs.to(self.device))
        scores = class_scores(q, self.config.per_class_score)[0].cpu()
        spread = None if weights is None else float(entropy(weights))
        flops = self.forward_flops(1, view.num_visible)
        attention = None if weights is None else weights.cpu()
        return Glance(clients, sketch, scores, float(scores.mean()), spread, flops, attention)

    def draw(self, round_num: int) -> Tensor | None:
        """Draw the transitions of this round's mini-batches `[m, size]`; None: too few yet."""
        starts, times = self.replay.starts(), self.config.updates_per_round
        count = len(starts)
        if count < self.config.learn_start or not times:
            return None
        size = min(self.config.batch_size, count)
        orders = rng.shuffles(self.seed, "replay", round_num, times, count)[:, :size]
        return torch.from_numpy(starts.numpy()[orders.numpy()])

    def learn(self, round_num: int) -> Lesson:
        """Run Algorithm 2 after a round was added to `replay`."""
        entries = self.draw(round_num)
        if entries is None:
            return Lesson(None, 0)
        times, size = entries.shape
        joined = self._standardised(self.replay.gather(entries.flatten()))
        targets = self.learner.targets(joined) if self.config.targets_once else None
        losses = []
        for i in range(times):
            part = slice(i * size, (i + 1) * size)
            batch = joined.rows(part)
            extra = self._histogram_loss(batch) if self.config.aux_weight else None
            y = None if targets is None else targets[part]
            losses.append(self.learner.update(batch, extra, y))
        return Lesson(float(torch.stack(losses).mean()), self.lesson_flops(entries))

    def lesson_flops(self, entries: Tensor) -> int:
        """Count what learning from the transitions at `entries` `[m, size]` takes."""
        replay, sets = self.replay, entries.numel()
        now = self.forward_flops(sets, replay.most_visible(entries))
        later = self.forward_flops(sets, replay.most_visible(entries, replay.n_step))
        return update_flops(now, later)

    def _standardised(self, batch: Batch) -> Batch:
        """Standardise the histories as of now and bring the tensors to the networks."""
        moved = {
            name: value.to(self.device)
            for name, value in batch._asdict().items()
            if isinstance(value, Tensor)
        }
        obs, later = batch.obs.to(self.device), batch.next_obs.to(self.device)
        batch = batch._replace(obs=obs, next_obs=later, **moved)
        if not self.config.normalise_history:
            return batch
        obs, later = (
            o._replace(history=self.scale(o.history)) for o in (batch.obs, batch.next_obs)
        )
        return batch._replace(obs=obs, next_obs=later)

    def _histogram_loss(self, batch: Batch) -> Tensor:
        """Return the auxiliary loss of the release; rounds without a histogram do not count."""
        assert batch.histogram is not None
        known = batch.histogram.isfinite().all(dim=1)
        wanted = batch.histogram[known]
        if not len(wanted):
            return torch.zeros((), device=self.device)
        loss = F.l1_loss(self.net.histogram(batch.obs)[known], wanted)
        return self.config.aux_weight * loss

    def make_room(self, rows: int) -> None:
        """Let the identity tables know clients up to id `rows` - 1."""
        if rows > self.known:
            self.known = rows
            self.grow_tables(rows)

    def grow_tables(self, rows: int) -> None:
        """Give the identity tables at least so many rows."""
        if self.net.identity.grow(rows):
            self.learner.target.identity.grow(rows)
            self.learner.fit_optimizer()

    @property
    def table_rows(self) -> int:
        """Rows of the identity table; 0 where it does not grow."""
        return len(self.net.identity.weight) if isinstance(self.net.identity, TableIdentity) else 0

    def forward_flops(self, sets: int, visible: int) -> int:
        """Count one pass over visible sets of a size; each size is counted once."""
        if (sets, visible) not in self._flops:
            count = forward_flops(self.config, sets=sets, visible=visible, **self.shape)
            self._flops[sets, visible] = count
        return self._flops[sets, visible]

    def policy(self) -> dict[str, Any]:
        """Return the artefact another run can load."""
        packed = policies.pack(self.net, self.config, self._sizes, self.known)
        return packed | {"scale": self.scale.state_dict()}

    def load_policy(self, policy: dict[str, Any], keep_scale: bool = False) -> None:
        """Take over a policy's network, for both the online and the target network.

        Args:
            policy: of `policy()`.
            keep_scale: also take over the statistics of the global sketches; right only where
                this run continues the same model. Otherwise the run measures its own.
        """
        policies.check(policy, self.config, self._sizes)
        policies.unpack(policy, self.net)
        self.known = max(self.known, policy["known_ids"])
        self.learner = build_learner(self.net, self.config)
        if keep_scale:
            self.scale.load_state_dict(policy["scale"])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue: tensors and plain values, copied."""
        return {name: getattr(self, name).state_dict() for name in _PARTS} | {"known": self.known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.known = state["known"]
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])


def build_learner(net: QNetwork, config: AgentConfig) -> DoubleDQN[QNetwork]:
    """Return a fresh learner around `net`, with the target as a copy of it."""
    weight = getattr(net.identity, "weight", None)
    spared = [weight] if isinstance(weight, nn.Parameter) and not config.identity_decay else []
    return DoubleDQN(
        net,
        lr=config.lr,
        weight_decay=config.weight_decay,
        tau=config.tau,
        grad_clip=config.grad_clip,
        loss=config.loss,
        optimizer=config.optimizer,
        score=config.per_class_score,
        undecayed=spared,
    )
