from __future__ import annotations

import math

import pytest
import torch

from fedglimpse.methods.learners.ppo import PPO, clipped_loss, discounted, log_density


def test_discounted_returns() -> None:
    assert discounted([1.0, 2.0], 10.0, 0.5) == [1 + 0.5 * (2 + 5), 2 + 5]


def test_log_density_is_the_normal_one_up_to_a_constant() -> None:
    x = torch.tensor([0.3])
    mu = torch.tensor([-0.2])
    log_sigma = torch.tensor([0.4])
    exact = torch.distributions.Normal(mu, log_sigma.exp()).log_prob(x)
    assert log_density(x, mu, log_sigma) - 0.5 * math.log(2 * math.pi) == pytest.approx(exact)


def test_clipping_stops_the_reward_for_going_further() -> None:
    ratio = torch.tensor([1.5]).log()
    assert clipped_loss(ratio, torch.tensor([1.0]), 0.2) == pytest.approx(-1.2)
    assert clipped_loss(ratio, torch.tensor([-1.0]), 0.2) == pytest.approx(1.5)
    assert clipped_loss(-ratio, torch.tensor([-1.0]), 0.2) == pytest.approx(0.8)


def test_order_of_clients_does_not_matter() -> None:
    agent = PPO(3, seed=0)
    features = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([7, 3, 9, 1, 4])
    order = torch.tensor([2, 0, 4, 3, 1])
    action = agent.act(features, ids, 6)
    assert torch.allclose(agent.act(features[order], ids[order], 6), action[order], atol=1e-6)


def test_padding_does_not_matter() -> None:
    net = PPO(3, seed=0).net
    features = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([features, torch.full((1, 2, 3), 9.0)], dim=1)
    mask = torch.tensor([[True, True, False, False]])
    alone = net(features, mask[:, :2])
    beside = net(padded, mask)
    assert torch.allclose(alone[0], beside[0][:, :2], atol=1e-6)
    assert torch.allclose(alone[2], beside[2], atol=1e-6)


def test_an_action_without_a_reward_is_forgotten() -> None:
    agent = PPO(2, seed=0)
    agent.reward(1.0)  # nothing waits for it
    agent.act(torch.ones(2, 2), torch.tensor([0, 1]), 0)
    agent.act(torch.ones(3, 2), torch.tensor([0, 1, 2]), 1)
    agent.reward(2.0)
    agent.reward(3.0)  # known already
    assert [step.reward for step in agent.steps] == [2.0]


def test_learns_after_a_full_batch_of_ragged_rounds() -> None:
    agent = PPO(2, seed=0, horizon=3)
    weights = agent.net.actor[0].weight.detach().clone()
    for t in range(4):
        size = 1 + t % 3
        agent.act(torch.randn(size, 2, generator=torch.Generator().manual_seed(t)),
                  torch.arange(size), t)  # fmt: skip
        assert torch.equal(agent.net.actor[0].weight, weights) == (t < 3)
        agent.reward(float(t))
    assert agent.loss is not None
    assert len(agent.steps) == 1


def test_learns_to_favour_what_pays() -> None:
    """The reward is the number given to the client with feature 1, minus the other's."""
    agent = PPO(1, seed=0, lr=3e-3, gamma=0.0)
    features = torch.tensor([[0.0], [1.0]])
    ids = torch.tensor([0, 1])
    for t in range(400):
        action = agent.act(features, ids, t)
        agent.reward(float(action.softmax(0)[1]))
    mu = agent.net(features[None], torch.ones(1, 2, dtype=torch.bool))[0][0]
    assert mu[1] - mu[0] > 1.0


def test_flops_of_acting_agree_with_pytorch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    agent = PPO(4, seed=0)
    with FlopCounterMode(display=False) as counter:
        agent.act(torch.ones(5, 4), torch.arange(5), 0)
    assert agent.spent() == counter.get_total_flops()
    assert agent.spent() == 0


def test_exact_continuation() -> None:
    def play(agent: PPO, rounds: range) -> torch.Tensor:
        for t in rounds:
            draw = torch.Generator().manual_seed(t)
            action = agent.act(torch.randn(3, 2, generator=draw), torch.arange(3), t)
            agent.reward(float(action.sum()))
        return action

    uninterrupted, first_half, resumed = (PPO(2, seed=1, horizon=4) for _ in range(3))
    expected = play(uninterrupted, range(15))
    play(first_half, range(7))
    resumed.load_state_dict(first_half.state_dict())
    assert torch.equal(play(resumed, range(7, 15)), expected)


def test_before_the_first_step_every_ratio_is_one() -> None:
    """Then only the critic's error is left of the loss, whatever the sizes of the rounds."""
    agent = PPO(2, seed=0, horizon=3, epochs=1)
    draw = torch.Generator().manual_seed(0)
    sets = [torch.randn(size, 2, generator=draw) for size in (1, 4, 2, 3)]
    for t, clients in enumerate(sets[:3]):
        agent.act(clients, torch.arange(len(clients)), t)
        agent.reward(float(t))
    values = [
        float(agent.net(clients[None], torch.ones(1, len(clients), dtype=torch.bool))[2].detach())
        for clients in sets
    ]
    returns = discounted([0.0, 1.0, 2.0], values[3], 0.9)
    agent.learn(sets[3])
    error = sum((g - v) ** 2 for g, v in zip(returns, values[:3], strict=True)) / 3
    assert agent.loss == pytest.approx(0.5 * error, rel=1e-5)
