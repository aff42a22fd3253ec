"""Rewards by what changed: the same order of choices, without the level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rl_fakes import outcome, play, selector, view
from torch import Tensor


class Shaping:
    """What an agent that learns from changes makes of the rewards of its rounds."""

    def __init__(self, gamma: float, classes: int = 1) -> None:
        q_output = "scalar" if classes == 1 else "per_class"
        self.agent = selector(reward="change", gamma=gamma, q_output=q_output)
        self.outcome = outcome(view(0), torch.tensor([0]))

    def __call__(self, reward: Tensor) -> Tensor:
        """Return the shaped reward of the round after the last one."""
        result = replace(self.outcome, reward=float(reward[0]), reward_per_class=reward)
        return self.agent._reward(result)


def rewards(rounds: int = 12, classes: int = 1) -> Tensor:
    return torch.rand(rounds, classes, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("classes", [1, 3])
def test_n_shaped_steps_are_n_steps_and_two_potentials(gamma: float, n: int, classes: int) -> None:
    plain = rewards(classes=classes)
    shaping = Shaping(gamma, classes)
    shaped = torch.stack([shaping(reward) for reward in plain])
    before = torch.cat([torch.zeros(1, classes), plain])  # r^{t-1}
    potential = before / (1 - gamma)
    powers = gamma ** torch.arange(n).float()[:, None]
    for t in range(len(plain) - n + 1):
        got = (powers * shaped[t : t + n]).sum(0)
        wanted = (powers * plain[t : t + n]).sum(0) + gamma**n * potential[t + n] - potential[t]
        assert torch.allclose(got, wanted, atol=1e-5)


def test_shaping_orders_actions_as_before() -> None:
    """Value iteration in a small world: Q of every action moves by the state's potential alone."""
    draw, gamma, states, actions = torch.Generator().manual_seed(0), 0.8, 5, 3
    levels = torch.rand(states, generator=draw).double()  # r of a round is the level it leads to
    leads = torch.randint(states, (states, actions), generator=draw)

    def values(reward: Tensor) -> Tensor:
        q = torch.zeros(states, actions).double()
        for _ in range(300):
            q = reward + gamma * q.amax(1)[leads]
        return q

    shaped = []
    for state in range(states):
        for action in range(actions):
            shaping = Shaping(gamma)
            shaping.agent.last_reward = levels[state : state + 1]
            shaped.append(shaping(levels[leads[state, action]][None]))
    plain, other = values(levels[leads]), values(torch.cat(shaped).view(states, actions))
    assert torch.allclose(plain - other, (levels / (1 - gamma))[:, None].expand(-1, actions))
    assert torch.equal(plain.argmax(1), other.argmax(1))


def test_the_agent_remembers_changes() -> None:
    plain, shaped = selector(), selector(reward="change")
    for agent in (plain, shaped):
        play(agent, range(6))
    level = plain.agents.memory.rows["reward"][0, :6, 0]
    change = shaped.agents.memory.rows["reward"][0, :6, 0]
    before = torch.cat([torch.zeros(1), level[:-1]])
    assert torch.allclose(change, (level - before) / (1 - 0.9), atol=1e-5)


def test_a_reloaded_agent_knows_the_last_reward() -> None:
    first, second = selector(reward="change"), selector(seed=1, reward="change")
    play(first, range(4))
    second.load_state_dict(first.state_dict())
    for agent in (first, second):
        play(agent, range(4, 6))
    rows = [agent.agents.memory.rows["reward"][0, :6] for agent in (first, second)]
    assert torch.equal(*rows)
