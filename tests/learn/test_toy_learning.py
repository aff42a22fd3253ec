"""The agent learns: toy worlds whose answer is known, played with the real selector.

Settings are the defaults unless a test says otherwise; what is changed makes the run short, since
the default schedule explores for 180 rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from toy_worlds import OldCue, ShuffledLabels, play

from fedglimpse.agent.config import AgentConfig
from fedglimpse.methods.glimpse import GlimpseSelector


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def greedy_share(world: ShuffledLabels | OldCue, settings: AgentConfig, rounds: int) -> float:
    """Train for `rounds`, then return the share of wrong picks in 60 greedy rounds."""
    agent = GlimpseSelector(
        settings,
        sketch_dim=world.sketch_dim,
        num_classes=2,
        num_clients=world.clients,
        seed=world.seed,
    )
    play(world, agent, range(rounds), k=3)
    agent.frozen = True
    shares = play(world, agent, range(rounds, rounds + 60), k=3)
    return sum(shares) / len(shares)


def test_clients_with_shuffled_labels_are_avoided() -> None:
    """Defaults but for a faster epsilon schedule (0.02 for 0.005); 160 rounds, 10 visible, k=3."""
    settings = AgentConfig(epsilon_decay=0.02)
    shares = [greedy_share(ShuffledLabels(seed), settings, rounds=160) for seed in range(5)]
    assert sum(share < 0.1 for share in shares) >= 4, shares


def test_random_choice_takes_useless_clients_half_of_the_time() -> None:
    """The control of the test above: an agent that always explores and never learns."""
    settings = AgentConfig(d_token=8, epsilon_decay=0.0, updates_per_round=0)
    for seed in range(2):
        world = ShuffledLabels(seed)
        agent = GlimpseSelector(settings, sketch_dim=16, num_classes=2, num_clients=40, seed=seed)
        shares = play(world, agent, range(150), k=3)
        assert 0.42 < sum(shares) / len(shares) < 0.58


@pytest.mark.parametrize("seed", [0, 1])
def test_a_cue_two_rounds_old_needs_a_history_of_two(seed: int) -> None:
    """A bandit: one-step targets without bootstrapping, lr 3e-3, epsilon_decay 0.01, 130 rounds.

    Chance is one half, and all that a history of one can reach.
    """
    shares = {}
    for history in (1, 2):
        settings = AgentConfig(history=history, n_step=1, gamma=0.0, lr=3e-3, epsilon_decay=0.01)
        shares[history] = greedy_share(OldCue(seed), settings, rounds=130)
    assert shares[2] < 0.25
    assert shares[1] > 0.35
