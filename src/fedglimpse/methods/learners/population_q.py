"""Deep Q-learning with one output for every client of the population: FAVOR and its kin.

The state is the last known sketch of every client, so that clients can be judged before they train.
What consecutive rounds share is stored once: sketches lie in a table of versions, a round keeps for
every client the row of its newest version, and states are put together when they are needed.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.agent.inputs import finite
from fedglimpse.agent.learner import set_value
from fedglimpse.errors import UserError
from fedglimpse.methods.learners.double_dqn import UPDATE_PASSES, CandidateDQN, ReplayBatch
from fedglimpse.types import View

MOST_WEIGHTS = 200_000_000  # of a Q-network: 3.2 GB with its target and Adam's memory
MOST_FEATURES = 100  # q of the reproductions


class PopulationObservation(NamedTuple):
    """Who could be chosen in which state; several rows may share a state."""

    states: Tensor  # [S, F]
    rows: Tensor  # [B] the state of each row
    mask: Tensor  # [B, N] True for visible clients


class PopulationQ(nn.Module):
    """Q of every client from the state of the whole population, by one hidden layer."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        num_clients: int,
        seed: int,
    ) -> None:
        """Build with weights drawn from `seed` alone."""
        super().__init__()
        with rng.isolated(seed, "population-q"):
            self.layers = nn.Sequential(
                nn.Linear(inputs, hidden),
                nn.ReLU(),
                nn.Linear(hidden, num_clients),
            )

    def forward(self, obs: PopulationObservation) -> Tensor:
        """Return Q `[B, N]`; values of invisible clients mean nothing."""
        q_of_states = self.layers(obs.states)  # [S, N]
        return q_of_states[obs.rows]


class PopulationMemory:
    """The newest sketch of every client, and a ring of rounds to learn from."""

    def __init__(self, num_clients: int, features: int, capacity: int) -> None:
        """Start before any client was seen.

        Args:
            num_clients: N.
            features: q, floats kept of a sketch.
            capacity: rounds that are kept.
        """
        self.capacity = capacity
        self.count = 0  # rounds that were ever stored; round number e lies in row e % capacity
        self.latest = torch.zeros(num_clients, dtype=torch.int32)  # [N] rows of `versions`
        self.versions = torch.zeros(1, features)  # [M, q], row 0 for clients never seen
        self.seen_in = torch.zeros(1, dtype=torch.int64)  # [M] round of each version
        of_clients = (capacity, num_clients)
        self.rows = {
            "latest": torch.zeros(of_clients, dtype=torch.int32),
            "visible": torch.zeros(of_clients, dtype=torch.bool),
            "chosen": torch.zeros(of_clients, dtype=torch.bool),
            "rewards": torch.zeros(of_clients),  # of the chosen
            "sketch": torch.zeros(capacity, features),  # of the global model
            "round_num": torch.zeros(capacity, dtype=torch.int64),
            "k": torch.zeros(capacity, dtype=torch.int64),
        }

    def states(self, latest: Tensor, sketches: Tensor, round_nums: Tensor) -> Tensor:
        """Put states together: the global sketch, all clients' sketches, "seen" flags, ages.

        Args:
            latest: which version of each client was known.  # [S, N]
            sketches: of the global models.  # [S, q]
            round_nums: when; the age of a sketch is log(1 + rounds), 0 for the unseen.  # [S]
        """
        is_seen = latest > 0  # [S, N]
        rounds_since = round_nums.unsqueeze(1) - self.seen_in[latest]  # [S, N]
        age = rounds_since.clamp_min(0).float().log1p()
        clients = self.versions[latest].flatten(1)  # [S, N * q]
        parts = [
            sketches,
            clients,
            is_seen.float(),
            age * is_seen,
        ]
        return torch.cat(parts, dim=1)

    def add(self, round_num: int, **values: Any) -> None:
        """Store a round over the oldest one, with what was known of clients before it."""
        row = self.count % self.capacity
        self.rows["latest"][row] = self.latest
        self.rows["round_num"][row] = round_num
        for name, value in values.items():
            self.rows[name][row] = value
        self.count += 1

    def see(self, ids: Tensor, sketches: Tensor, round_num: int) -> None:
        """Store new sketches `[K, q]` of these clients; once per ring, drop unused versions."""
        new_rows = torch.arange(len(ids)) + len(self.versions)
        round_nums = torch.full((len(ids),), round_num)
        self.versions = torch.cat([self.versions, sketches])
        self.seen_in = torch.cat([self.seen_in, round_nums])
        self.latest[ids] = new_rows.int()
        if self.count % self.capacity == 0:
            self._drop_unused_versions()

    def _drop_unused_versions(self) -> None:
        """Drop the versions that neither the present nor a stored round refers to."""
        unseen = self.latest.new_zeros(1)
        stored = self.rows["latest"].flatten()
        pointers = torch.cat([unseen, self.latest, stored])
        in_use = pointers.unique()  # sorted, so that 0 stays 0
        self.versions = self.versions[in_use]
        self.seen_in = self.seen_in[in_use]
        for table in (self.latest, self.rows["latest"]):
            table.copy_(torch.searchsorted(in_use, table))

    def starts(self) -> Tensor:
        """Return the numbers of stored rounds that chose a client and have a successor."""
        oldest = max(self.count - self.capacity, 0)
        end = max(self.count - 1, oldest)
        entries = torch.arange(oldest, end)
        chosen = self.rows["chosen"][entries % self.capacity]  # [B, N]
        return entries[chosen.any(dim=1)]

    def observe(self, entries: Tensor) -> PopulationObservation:
        """Rebuild what was seen in these rounds."""
        row = entries % self.capacity
        latest = self.rows["latest"][row]
        sketches = self.rows["sketch"][row]
        round_nums = self.rows["round_num"][row]
        return PopulationObservation(
            states=self.states(latest, sketches, round_nums),
            rows=torch.arange(len(row)),
            mask=self.rows["visible"][row],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue; only rows in use."""
        num_stored = min(self.count, self.capacity)
        stored_rows: dict[str, Tensor] = {}
        for name, rows in self.rows.items():
            stored_rows[name] = rows[:num_stored]
        return {
            "count": self.count,
            "latest": self.latest,
            "versions": self.versions,
            "seen_in": self.seen_in,
            "rows": stored_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name in ("count", "latest", "versions", "seen_in"):
            setattr(self, name, deepcopy(state[name]))
        for name, stored in state["rows"].items():
            self.rows[name].zero_()
            self.rows[name][: len(stored)] = stored


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
        width = min(features or MOST_FEATURES, num_clients, sketch_dim)  # q
        inputs = (num_clients + 1) * width + 2 * num_clients
        _check_size(num_clients, width, inputs, hidden)
        self.seed = seed
        self.gamma = gamma
        self.batch = batch
        self.sync = sync
        self.per_client = per_client
        self.updates = 0
        self.flops = 2 * hidden * (inputs + num_clients)  # of one state through the network
        self.projection: Tensor | None = None  # [D, q]
        if width < sketch_dim:
            source = rng.generator(seed, "population-q-projection")
            normal = torch.randn(sketch_dim, width, generator=source)
            self.projection = normal / math.sqrt(width)
        self.memory = PopulationMemory(num_clients, width, buffer)
        net = PopulationQ(inputs, hidden, num_clients, seed)
        self.learner = CandidateDQN(net, lr=lr, grad_clip=0.0, loss="mse")

    def narrow(self, sketches: Tensor) -> Tensor:
        """Project sketches `[..., D]` to `[..., q]`, again at random."""
        rows = finite(sketches.float())
        return rows if self.projection is None else rows @ self.projection

    @torch.no_grad()
    def scores(self, view: View) -> Tensor:
        """Return the Q of the visible clients `[V]`."""
        sketch = self.narrow(view.server["global_sketch"])
        states = self.memory.states(
            latest=self.memory.latest.unsqueeze(0),
            sketches=sketch.unsqueeze(0),
            round_nums=torch.tensor([view.round_num]),
        )
        obs = PopulationObservation(
            states=states,
            rows=torch.zeros(1, dtype=torch.int64),
            mask=self._members(view.ids).unsqueeze(0),
        )
        q = self.learner.online(obs)  # [1, N]
        return q[0, view.ids]

    def remember(
        self,
        view: View,
        k: int,
        selected: Tensor,
        rewards: Tensor,
        sketches: Tensor,
    ) -> None:
        """Store a round, then the sketches of the clients that took part.

        Args:
            view: what was seen.
            k: budget of the choice.
            selected: ids whose update was used.  # [K]
            rewards: of each of them.  # [K]
            sketches: of each of them.  # [K, D]
        """
        num_clients = len(self.memory.latest)
        rewards_of_all = torch.zeros(num_clients)
        rewards_of_all[selected] = rewards.float()
        self.memory.add(
            view.round_num,
            visible=self._members(view.ids),
            chosen=self._members(selected),
            rewards=rewards_of_all,
            sketch=self.narrow(view.server["global_sketch"]),
            k=k,
        )
        narrow_sketches = self.narrow(sketches)
        self.memory.see(selected, narrow_sketches, view.round_num)

    def learn(self, round_num: int) -> tuple[float | None, int]:
        """Take one step on one mini-batch; returns the TD loss and the FLOPs."""
        starts = self.memory.starts()
        if not len(starts):
            return None, 0
        source = rng.generator(self.seed, "population-q-replay", round_num)
        order = torch.randperm(len(starts), generator=source)
        entries = starts[order[: self.batch]]
        loss = self.learner.update(self.transitions(entries))
        self.updates += 1
        if self.updates % self.sync == 0:
            self.learner.sync_target()
        forward = len(entries) * self.flops
        return float(loss), UPDATE_PASSES * forward

    def transitions(self, entries: Tensor) -> ReplayBatch:
        """Build the one-step transitions of these rounds, one row for each, or for each client."""
        row = entries % self.memory.capacity
        next_row = (entries + 1) % self.memory.capacity
        obs = self.memory.observe(entries)
        next_obs = self.memory.observe(entries + 1)
        chosen = self.memory.rows["chosen"][row]  # [B, N]
        rewards = self.memory.rows["rewards"][row]  # [B, N]
        next_k = self.memory.rows["k"][next_row]  # [B]
        if self.per_client:  # a row for each chosen client; its next action is one client
            round_of, client = torch.where(chosen)  # [B'], [B']
            mask = obs.mask[round_of]
            next_mask = next_obs.mask[round_of]
            obs = obs._replace(rows=round_of, mask=mask)
            next_obs = next_obs._replace(rows=round_of, mask=next_mask)
            rewards = rewards[round_of]
            next_k = torch.ones_like(round_of)
            chosen = torch.zeros_like(rewards, dtype=torch.bool)
            rows = torch.arange(len(client))
            chosen[rows, client] = True
        return ReplayBatch(
            obs=obs,
            chosen=chosen,
            returns=set_value(rewards, chosen),
            discount=torch.full((len(chosen),), self.gamma),
            next_obs=next_obs,
            next_k=next_k,
        )

    def _members(self, ids: Tensor) -> Tensor:
        """Mark these clients among all `[N]`."""
        mask = torch.zeros_like(self.memory.latest, dtype=torch.bool)
        mask[ids] = True
        return mask

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue: tensors and plain values, copied."""
        state = {
            "learner": self.learner.state_dict(),
            "memory": self.memory.state_dict(),
            "updates": self.updates,
        }
        return deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.updates = state["updates"]
        self.learner.load_state_dict(deepcopy(state["learner"]))
        self.memory.load_state_dict(state["memory"])


def _check_size(num_clients: int, width: int, inputs: int, hidden: int) -> None:
    """Raise UserError where the network would not fit: its input and output grow with N."""
    num_weights = hidden * (inputs + num_clients)
    if num_weights <= MOST_WEIGHTS:
        return
    left_for_sketches = MOST_WEIGHTS // hidden - 3 * num_clients
    largest_width = left_for_sketches // (num_clients + 1)
    fix = "use fewer clients (data.clients)"
    if largest_width >= 1:
        fix = f"set options.features={largest_width}"
    raise UserError(
        f"A Q-network over {num_clients} clients with {width} features each has {num_weights:,} "
        f"weights, more than {MOST_WEIGHTS:,}: {fix}, or method=glimpse, whose network does not "
        "grow with the population.",
        key="options.features" if largest_width >= 1 else "data.clients",
    )
