"""Deep Q-learning with one output for every client of the population: FAVOR and its kin.

The state is what the server last saw of everybody, so that clients can be judged before they train.
What consecutive rounds share is stored once: a round keeps, for every client, the number of its
newest sketch, and states are put together when they are needed.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.agent.flops import update_flops
from fedglimpse.agent.inputs import finite
from fedglimpse.agent.learner import set_value
from fedglimpse.errors import UserError
from fedglimpse.methods.learners.double_dqn import DoubleDQN, Transitions
from fedglimpse.types import View

MOST_WEIGHTS = 200_000_000  # of a Q-network: 3.2 GB with its target and Adam's memory
MOST_FEATURES = 100  # q of the reproductions


class PopulationObs(NamedTuple):
    """Who could be chosen in which state; several rows may share a state."""

    states: Tensor  # [S, F]
    rows: Tensor  # [B] the state of each row
    mask: Tensor  # [B, N] True for visible clients


class PopulationQ(nn.Module):
    """Q of every client from the state of the whole population, by one hidden layer."""

    def __init__(self, inputs: int, hidden: int, num_clients: int, seed: int) -> None:
        """Build with weights drawn from `seed` alone."""
        super().__init__()
        with rng.isolated(seed, "population-q"):
            self.layers = nn.Sequential(
                nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, num_clients)
            )

    def forward(self, obs: PopulationObs) -> Tensor:
        """Return Q `[B, N]`; values of invisible clients mean nothing."""
        return self.layers(obs.states)[obs.rows]


class PopulationMemory:
    """The newest sketch of every client, and a ring of rounds to learn from."""

    def __init__(self, num_clients: int, features: int, capacity: int) -> None:
        """Start with nobody seen.

        Args:
            num_clients: N.
            features: q, floats kept of a sketch.
            capacity: rounds that are kept.
        """
        self.capacity, self.count = capacity, 0  # round number e lies in row e % capacity
        self.latest = torch.zeros(num_clients, dtype=torch.int32)  # [N] rows of `versions`
        self.versions = torch.zeros(1, features)  # [M, q], row 0 for clients never seen
        self.seen_in = torch.zeros(1, dtype=torch.int64)  # [M] round of each version
        self.rows = {
            "latest": torch.zeros(capacity, num_clients, dtype=torch.int32),
            "visible": torch.zeros(capacity, num_clients, dtype=torch.bool),
            "chosen": torch.zeros(capacity, num_clients, dtype=torch.bool),
            "rewards": torch.zeros(capacity, num_clients),  # of the chosen
            "sketch": torch.zeros(capacity, features),  # of the global model
            "round_num": torch.zeros(capacity, dtype=torch.int64),
            "k": torch.zeros(capacity, dtype=torch.int64),
        }

    def states(self, latest: Tensor, sketches: Tensor, round_nums: Tensor) -> Tensor:
        """Put states together: global sketch, everybody's sketch, "seen" flags, ages.

        Args:
            latest: which version of each client was known.  # [S, N]
            sketches: of the global models.  # [S, q]
            round_nums: when; the age of a sketch is log(1 + rounds), 0 for the unseen.  # [S]
        """
        known = latest > 0  # [S, N]
        age = (round_nums[:, None] - self.seen_in[latest]).clamp_min(0).float().log1p() * known
        clients = self.versions[latest].flatten(1)  # [S, N * q]
        return torch.cat([sketches, clients, known.float(), age], dim=1)

    def add(self, round_num: int, **values: Any) -> None:
        """Store a round over the oldest one, with what was known of clients before it."""
        row = self.count % self.capacity
        for name, value in {"latest": self.latest, "round_num": round_num, **values}.items():
            self.rows[name][row] = value
        self.count += 1

    def see(self, ids: Tensor, sketches: Tensor, round_num: int) -> None:
        """Keep new sketches `[K, q]` of these clients; now and then forget unused ones."""
        new = torch.arange(len(ids)) + len(self.versions)
        self.versions = torch.cat([self.versions, sketches])
        self.seen_in = torch.cat([self.seen_in, torch.full((len(ids),), round_num)])
        self.latest[ids] = new.int()
        if self.count % self.capacity == 0:
            self._forget()

    def _forget(self) -> None:
        """Drop the versions that neither the present nor a stored round refers to."""
        used = [self.latest.new_zeros(1), self.latest, self.rows["latest"].flatten()]
        kept = torch.cat(used).unique()  # sorted, so that 0 stays 0
        self.versions, self.seen_in = self.versions[kept], self.seen_in[kept]
        for pointers in (self.latest, self.rows["latest"]):
            pointers.copy_(torch.searchsorted(kept, pointers))

    def starts(self) -> Tensor:
        """Entry numbers whose successor exists and whose choice was carried out."""
        oldest = max(self.count - self.capacity, 0)
        entries = torch.arange(oldest, max(self.count - 1, oldest))
        return entries[self.rows["chosen"][entries % self.capacity].any(dim=1)]

    def observe(self, entries: Tensor) -> PopulationObs:
        """Rebuild what was seen in these rounds."""
        row = entries % self.capacity
        kept = (self.rows[name][row] for name in ("latest", "sketch", "round_num"))
        return PopulationObs(self.states(*kept), torch.arange(len(row)), self.rows["visible"][row])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue; only rows in use."""
        used = min(self.count, self.capacity)
        kept = {name: getattr(self, name) for name in ("count", "latest", "versions", "seen_in")}
        return {**kept, "rows": {name: rows[:used] for name, rows in self.rows.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name in ("count", "latest", "versions", "seen_in"):
            setattr(self, name, deepcopy(state[name]))
        for name, saved in state["rows"].items():
            self.rows[name].zero_()
            self.rows[name][: len(saved)] = saved


class PopulationAgent:
    """Scores visible clients from stored sketches and learns by Double DQN."""

    def __init__(
        self,
        *,
        num_clients: int,
        sketch_dim: int,
        seed: int,
        features: int,
        hidden: int,
        gamma: float,
        lr: float,
        buffer: int,
        batch: int,
        sync: int,
        per_client: bool = False,
    ) -> None:
        """Start without experience.

        Args:
            num_clients: N.
            sketch_dim: D, floats of a sketch.
            seed: of the run.
            features: q, floats kept of a sketch; 0 for min(100, N, D).
            hidden: units of the Q-network.
            gamma: discount.
            lr: step size of Adam.
            buffer: rounds that are kept.
            batch: rounds in a mini-batch.
            sync: updates between two copies of the online into the target network.
            per_client: every chosen client has its own reward and target; else the mean Q of the
                chosen is fitted to the mean reward.
        """
        width = min(features or MOST_FEATURES, num_clients, sketch_dim)
        inputs = (num_clients + 1) * width + 2 * num_clients
        _check_size(num_clients, width, inputs, hidden)
        self.seed, self.gamma, self.batch, self.sync = seed, gamma, batch, sync
        self.per_client, self.updates = per_client, 0
        self.flops = 2 * hidden * (inputs + num_clients)  # of one state through the network
        draw = rng.generator(seed, "population-q-projection")
        narrow = torch.randn(sketch_dim, width, generator=draw) / math.sqrt(width)
        self.projection = narrow if width < sketch_dim else None  # [D, q]
        self.memory = PopulationMemory(num_clients, width, buffer)
        net = PopulationQ(inputs, hidden, num_clients, seed)
        self.learner = DoubleDQN(net, lr=lr, grad_clip=0.0, loss="mse")

    def narrow(self, sketches: Tensor) -> Tensor:
        """Project sketches `[..., D]` to `[..., q]`, again at random."""
        rows = finite(sketches.float())
        return rows if self.projection is None else rows @ self.projection

    @torch.no_grad()
    def look(self, view: View) -> Tensor:
        """Return the Q of the visible clients `[V]`."""
        sketch = self.narrow(view.server["global_sketch"])[None]  # [1, q]
        now = torch.tensor([view.round_num])
        states = self.memory.states(self.memory.latest[None], sketch, now)
        mask = self._members(view.ids)[None]
        q = self.learner.online(PopulationObs(states, torch.zeros(1, dtype=torch.int64), mask))
        return q[0, view.ids]

    def remember(
        self, view: View, k: int, selected: Tensor, rewards: Tensor, sketches: Tensor
    ) -> None:
        """Store a round, then the sketches of those who took part.

        Args:
            view: what was seen.
            k: budget of the choice.
            selected: ids whose update was used.  # [K]
            rewards: of each of them.  # [K]
            sketches: of each of them.  # [K, D]
        """
        spread = torch.zeros(len(self.memory.latest)).index_put((selected,), rewards.float())
        self.memory.add(
            view.round_num,
            visible=self._members(view.ids),
            chosen=self._members(selected),
            rewards=spread,
            sketch=self.narrow(view.server["global_sketch"]),
            k=k,
        )
        self.memory.see(selected, self.narrow(sketches), view.round_num)

    def learn(self, round_num: int) -> tuple[float | None, int]:
        """Take one step on one mini-batch; returns the TD loss and the FLOPs."""
        starts = self.memory.starts()
        if not len(starts):
            return None, 0
        order = torch.randperm(
            len(starts), generator=rng.generator(self.seed, "population-q-replay", round_num)
        )
        entries = starts[order[: self.batch]]
        loss = self.learner.update(self.transitions(entries))
        self.updates += 1
        if self.updates % self.sync == 0:
            self.learner.sync_target()
        forward = len(entries) * self.flops
        return float(loss), update_flops(forward, forward)

    def transitions(self, entries: Tensor) -> Transitions:
        """Build the one-step transitions of these rounds, one row for each, or for each client."""
        row = entries % self.memory.capacity
        after = (entries + 1) % self.memory.capacity
        chosen, rewards = self.memory.rows["chosen"][row], self.memory.rows["rewards"][row]
        obs, next_obs = self.memory.observe(entries), self.memory.observe(entries + 1)
        next_k = self.memory.rows["k"][after]
        if self.per_client:  # a row for each chosen client; its next action is one client
            of, who = torch.where(chosen)  # [B], [B]
            obs = obs._replace(rows=of, mask=obs.mask[of])
            next_obs = next_obs._replace(rows=of, mask=next_obs.mask[of])
            rewards, next_k = rewards[of], torch.ones_like(of)
            chosen = torch.zeros_like(rewards, dtype=torch.bool)
            chosen[torch.arange(len(who)), who] = True
        discount = torch.full((len(chosen),), self.gamma)
        return Transitions(obs, chosen, set_value(rewards, chosen), discount, next_obs, next_k)

    def _members(self, ids: Tensor) -> Tensor:
        """Mark these clients among all `[N]`."""
        mask = torch.zeros(len(self.memory.latest), dtype=torch.bool)
        mask[ids] = True
        return mask

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue: tensors and plain values, copied."""
        parts = {"learner": self.learner.state_dict(), "memory": self.memory.state_dict()}
        return deepcopy({**parts, "updates": self.updates})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.updates = state["updates"]
        self.learner.load_state_dict(deepcopy(state["learner"]))
        self.memory.load_state_dict(state["memory"])


def _check_size(num_clients: int, width: int, inputs: int, hidden: int) -> None:
    """Raise UserError where the network would not fit: its input and output grow with N."""
    if (weights := hidden * (inputs + num_clients)) <= MOST_WEIGHTS:
        return
    fits = (MOST_WEIGHTS // hidden - 3 * num_clients) // (num_clients + 1)
    fix = f"set options.features={fits}" if fits >= 1 else "take fewer clients (data.clients)"
    raise UserError(
        f"A Q-network over {num_clients} clients with {width} features each has {weights:,} "
        f"weights, more than {MOST_WEIGHTS:,}: {fix}, or method=glimpse, whose network does not "
        "grow with the population."
    )
