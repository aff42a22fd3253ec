"""One network taught by the memories of many: the same transitions, and something learnt."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
import torch
from rl_fakes import C, D, config, outcome, selector, view
from torch import Tensor

from fedglimpse.agent.agent import Agent
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.learner import Batch
from fedglimpse.agent.memory import Round
from fedglimpse.agent.school import School, advantage, changes


def played(lane: int, rounds: int = 14, **settings: Any) -> Agent:
    """An agent that drew its choices, in sets whose size differs."""
    one = selector(lane, epsilon_min=1.0, updates_per_round=0, **settings)
    for t in range(rounds):
        seen = view(100 * lane + t, visible=2 + 6 * lane + (t + lane) % 5, clients=30)
        seen = type(seen)(**{**vars(seen), "round_num": t})
        one.feedback(outcome(seen, one.select(seen, 2).slots))
    return one.agent


def same(one: Any, other: Any, width: int) -> None:
    """Compare two values, the slots of the smaller set padded."""
    if isinstance(one, Tensor):
        if one.dim() > 1 and one.shape[1] != other.shape[1]:
            assert not one[:, width:].any()
            one = one[:, :width]
        assert torch.allclose(one.double(), other.double())
    else:
        for a, b in zip(one, other, strict=True):
            same(a, b, width)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"identity": "none", "input": "probed", "reward": "change"},
        {"q_output": "per_class"},
        {"normalise_history": False},
        {"buffer": 10},
    ],
    ids=str,
)
def test_a_batch_is_what_each_agent_would_gather(settings: dict[str, Any]) -> None:
    agents = [played(lane, **settings) for lane in range(3)]
    school = School(agents)
    for r, agent in enumerate(agents):
        places = school.places[school.places[:, 0] == r]
        assert places[:, 1].tolist() == agent.replay.starts().tolist()
        theirs = agent._standardised(agent.replay.gather(places[:, 1]))
        ours = school.batch(places)
        for name in Batch._fields:
            if name != "histogram":
                part = getattr(theirs, name)
                width = part.mask.shape[1] if isinstance(part, Observation) else part.shape[-1]
                same(getattr(ours, name), part, width)


def test_drawn_from_all_and_the_same_again() -> None:
    school = School([played(lane) for lane in range(3)])
    pupils = [selector(9).agent, selector(9).agent]
    losses = [school.teach(pupil, 20, seed=4) for pupil in pupils]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20
    for a, b in zip(*(pupil.net.parameters() for pupil in pupils), strict=True):
        assert torch.equal(a, b)
    assert losses[0] != school.teach(selector(9).agent, 20, seed=5)


SETTINGS: dict[str, Any] = {
    "identity": "none", "input": "probed", "reward": "change", "gamma": 0.5, "n_step": 1,
    "batch_size": 32, "buffer": 200,
}  # fmt: skip


def synthetic(seed: int, worth: float, rounds: int = 120) -> Agent:
    """An agent in whose federation the last number but one says what a client is worth."""
    draw = torch.Generator().manual_seed(seed)
    settings = config(**SETTINGS)
    agent = Agent(settings, sketch_dim=D, num_classes=C, seed=seed, device="cpu")
    for t in range(rounds):
        clients = torch.randn(6, 4, generator=draw)
        chosen = torch.zeros(6, dtype=torch.bool)
        chosen[torch.randperm(6, generator=draw)[:2]] = True
        noise = float(torch.randn((), generator=draw))
        better = float(clients[chosen, 2].mean() - clients[:, 2].mean())
        reward = 0.1 * (worth * better + 0.5 * noise)
        sketch = torch.randn(D, generator=draw)
        agent.scale.add(sketch)
        agent.replay.add(
            Round(clients, torch.arange(6), chosen, sketch, torch.tensor([reward]),
                  torch.full((C,), torch.nan), t, 2)
        )  # fmt: skip
    return agent


@pytest.mark.parametrize(("worth", "least", "most"), [(1.0, 0.5, 0.85), (0.0, -0.15, 0.15)])
def test_what_others_know_is_learnt_and_nothing_else(
    worth: float, least: float, most: float
) -> None:
    pupil = Agent(config(**SETTINGS), sketch_dim=D, num_classes=C, seed=0, device="cpu")
    School([synthetic(seed, worth) for seed in range(8)]).teach(pupil, 500, seed=0)
    found = School([synthetic(seed, worth) for seed in range(50, 58)]).agreement(pupil)
    assert len(found) == 8
    assert least < mean(found) < most  # nobody can reach more than about 0.75


def test_advantage_is_in_standard_deviations_of_the_visible() -> None:
    q = torch.tensor([[1.0, 3.0, 5.0, 99.0], [2.0, 2.0, 2.0, 2.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    chosen = torch.tensor([[False, False, True, False], [True, False, False, False]])
    real = q[0, :3]
    wanted = float((real[2] - real.mean()) / real.std(correction=0))
    assert advantage(q, mask, chosen).tolist() == pytest.approx([wanted, 0.0])


@pytest.mark.parametrize("reward", ["level", "change"])
def test_changes_of_the_reward(reward: str) -> None:
    agent, level = played(0, reward=reward), played(0)
    entries = torch.arange(1, 14)
    rows = level.replay.rows["reward"][:, 0]
    scale = 1.0 if reward == "level" else 1 / (1 - level.config.gamma)
    assert torch.allclose(changes(agent, entries), scale * (rows[1:14] - rows[:13]), atol=1e-5)


def test_too_few_rounds_tell_nothing() -> None:
    assert School([played(0, rounds=6)]).agreement(played(1)) == []
