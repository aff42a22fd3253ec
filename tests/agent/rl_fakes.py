"""Small observations, views and outcomes for the tests of the agent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.network import QNetwork
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.rng import generator
from fedglimpse.types import Outcome, View

D, C, N = 6, 3, 40  # floats of a sketch, classes, clients
SMALL: dict[str, Any] = {
    "d_token": 16,
    "identity_dim": 4,
    "history": 3,
    "n_step": 2,
    "buffer": 40,
    "batch_size": 4,
    "learn_start": 4,
    "updates_per_round": 2,
}


def config(**changes: Any) -> AgentConfig:
    return AgentConfig(**(SMALL | changes))


def network(seed: int = 0, **changes: Any) -> QNetwork:
    """A network of one lane."""
    return QNetwork(config(**changes), AgentSizes(D, C, N), [seed], torch.device("cpu"))


def one_lane(obs: Observation) -> Observation:
    """Add the dimension for lanes in front."""
    return Observation(*(tensor[None] for tensor in obs))


def observation(sets: int = 2, visible: int = 5, features: int = D, length: int = 4) -> Observation:
    """Rounds of one agent, without the dimension for lanes."""
    draw = generator(1, "fake-observation")
    return Observation(
        clients=torch.randn(sets, visible, features, generator=draw),
        ids=torch.stack([torch.randperm(30, generator=draw)[:visible] for _ in range(sets)]),
        mask=torch.ones(sets, visible, dtype=torch.bool),
        history=torch.randn(sets, length, D, generator=draw),
        history_mask=torch.ones(sets, length, dtype=torch.bool),
    )


def selector(seed: int = 0, **changes: Any) -> GlimpseSelector:
    sizes = {"sketch_dim": D, "num_classes": C, "num_clients": N}
    return GlimpseSelector(config(**changes), **sizes, seed=seed)


def view(round_num: int, visible: int = 5, clients: int = 12, dim: int = D) -> View:
    draw = generator(7, "fake-view", round_num)
    return View(
        round_num=round_num,
        ids=torch.randperm(clients, generator=draw)[:visible].sort().values,
        sizes=torch.randint(10, 90, (visible,), generator=draw),
        reports={
            "sketch": torch.randn(visible, dim, generator=draw),
            "delta_sketch": torch.randn(visible, dim, generator=draw),
            "update_norm": torch.rand(visible, generator=draw),
            "train_loss": torch.rand(visible, generator=draw),
            "loss": torch.rand(visible, generator=generator(9, "fake-loss", round_num)),
        },
        server={
            "global_sketch": torch.randn(dim, generator=draw),
            "proxy_histogram": torch.rand(C, generator=draw),
        },
        rng=draw,
    )


def outcome(seen: View, slots: Tensor) -> Outcome:
    per_class = torch.rand(C, generator=generator(8, "fake-outcome", seen.round_num))
    reward = float(per_class.mean())
    weights = torch.full((len(slots),), 1.0 / len(slots))
    return Outcome(
        seen.round_num, seen.ids[slots], reward, reward, per_class, per_class, weights, {}
    )


def play(agent: GlimpseSelector, rounds: range, k: int = 2, ragged: bool = False) -> list[Any]:
    """Run rounds; returns everything the agent said."""
    said: list[Any] = []
    for round_num in rounds:
        seen = view(round_num, visible=1 + round_num % 7 if ragged else 5)
        choice = agent.select(seen, k)
        metrics = agent.feedback(outcome(seen, choice.slots))
        said.append((choice.slots.tolist(), dict(choice.info), dict(metrics)))
    return said
