"""One network trained on the memories of many runs: the same transitions, and something learnt."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))
from rl_fakes import C, D, N, config, outcome, selector, view

from fedglimpse.agent.agent import Agents
from fedglimpse.agent.config import AgentSizes
from fedglimpse.agent.memory import Round
from fedglimpse.runs.pretrain import PooledMemories, advantage, reward_changes


def played(*lanes: int, rounds: int = 14, **settings: Any) -> Agents:
    """Agents that selected at random, in sets whose size differs; ids up to 30."""
    selectors = []
    for lane in lanes:
        one = selector(lane, epsilon_min=1.0, updates_per_round=0, **settings)
        for t in range(rounds):
            seen = view(100 * lane + t, visible=2 + 6 * lane + (t + lane) % 5, clients=30)
            seen = type(seen)(**{**vars(seen), "round_num": t})
            one.feedback(outcome(seen, one.select(seen, 2).slots))
        selectors.append(one)
    return Agents.joined([(one.agents, one.lane) for one in selectors])


def fresh(seed: int = 9, **settings: Any) -> Agents:
    return Agents(config(**settings), AgentSizes(D, C, N), [seed], torch.device("cpu"))


@pytest.mark.parametrize("normalise", [True, False])
def test_histories_are_on_the_scale_of_their_own_run(normalise: bool) -> None:
    agents = played(0, 1, 2, normalise_history=normalise)
    memories = PooledMemories(agents)
    starts = memories.starts
    assert starts[starts[:, 0] == 1, 1].tolist() == agents.memory.starts(1).tolist()
    batch = agents.memory.gather(memories.sampled(starts), memories.width)
    for lane in range(3):
        mine = starts[:, 0] == lane
        sketch = agents.memory.rows["sketch"][lane, starts[mine, 1]]
        if normalise:
            scale, factor = (numbers[lane] for numbers in agents.scale.numbers())
            sketch = ((sketch - scale) * factor).clamp(-10, 10)
        torch.testing.assert_close(batch.obs.history[0, mine, -1], sketch)


def test_drawn_from_all_and_the_same_again() -> None:
    memories = PooledMemories(played(0, 1, 2))
    pupils = [fresh(), fresh()]
    losses = [memories.train(pupil, 20, seed=4) for pupil in pupils]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20
    assert torch.equal(*(pupil.learner.online.rows for pupil in pupils))
    assert losses[0] != memories.train(fresh(), 20, seed=5)


SETTINGS: dict[str, Any] = {
    "identity": "none", "input": "probed", "reward": "change", "gamma": 0.5, "n_step": 1,
    "batch_size": 32, "buffer": 200,
}  # fmt: skip


def synthetic(seeds: range, worth: float, rounds: int = 120) -> Agents:
    """Agents in whose federations the last feature but one says what a client is worth."""
    agents = Agents(config(**SETTINGS), AgentSizes(D, C, N), list(seeds), torch.device("cpu"))
    for lane, seed in enumerate(seeds):
        draw = torch.Generator().manual_seed(seed)
        for t in range(rounds):
            clients = torch.randn(6, 4, generator=draw)
            chosen = torch.zeros(6, dtype=torch.bool)
            chosen[torch.randperm(6, generator=draw)[:2]] = True
            noise = float(torch.randn((), generator=draw))
            better = float(clients[chosen, 2].mean() - clients[:, 2].mean())
            reward = torch.tensor([0.1 * (worth * better + 0.5 * noise)])
            sketch = torch.randn(D, generator=draw)
            unknown = torch.full((C,), torch.nan)
            agents.scale.add(lane, sketch)
            item = Round(t, clients, torch.arange(6), chosen, sketch, reward, unknown, 2)
            agents.memory.add({lane: item})
    return agents


@pytest.mark.parametrize(("worth", "least", "most"), [(1.0, 0.5, 0.85), (0.0, -0.15, 0.15)])
def test_what_other_runs_show_is_learnt_and_nothing_else(
    worth: float, least: float, most: float
) -> None:
    pupil = fresh(0, **SETTINGS)
    PooledMemories(synthetic(range(8), worth)).train(pupil, 500, seed=0)
    agreement = PooledMemories(synthetic(range(50, 58), worth)).agreement(pupil)
    assert len(agreement) == 8
    assert least < mean(agreement) < most  # nobody can reach more than about 0.75


def test_advantage_is_in_standard_deviations_of_the_visible() -> None:
    q = torch.tensor([[1.0, 3.0, 5.0, 99.0], [2.0, 2.0, 2.0, 2.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    chosen = torch.tensor([[False, False, True, False], [True, False, False, False]])
    real = q[0, :3]
    wanted = float((real[2] - real.mean()) / real.std(correction=0))
    assert advantage(q, mask, chosen).tolist() == pytest.approx([wanted, 0.0])


@pytest.mark.parametrize("reward", ["level", "change"])
def test_changes_of_the_reward(reward: str) -> None:
    agents, level = played(0, reward=reward), played(0)
    rounds = torch.arange(1, 14)
    rows = level.memory.rows["reward"][0, :, 0]
    scale = 1.0 if reward == "level" else 1 / (1 - level.config.gamma)
    changes = reward_changes(agents, 0, rounds)
    assert torch.allclose(changes, scale * (rows[1:14] - rows[:13]), atol=1e-5)


def test_too_few_rounds_show_nothing() -> None:
    assert PooledMemories(played(0, rounds=6)).agreement(fresh()) == []
