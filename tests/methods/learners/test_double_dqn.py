"""The learner on networks small enough to compute by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedglimpse.methods.learners.double_dqn import CandidateDQN, ReplayBatch


class Obs(NamedTuple):
    x: Tensor  # [B, V]: the network multiplies it by its one weight
    mask: Tensor  # [B, V]


class Scale(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, obs: Obs) -> Tensor:
        return self.weight * obs.x


def learner(weight: float = 1.0, loss: str = "mse", grad_clip: float = 0.0) -> CandidateDQN[Scale]:
    return CandidateDQN(Scale(weight), lr=0.1, grad_clip=grad_clip, loss=loss)


def transitions(next_x: Tensor, next_mask: Tensor, k: int = 2) -> ReplayBatch:
    sets = len(next_x)
    return ReplayBatch(
        obs=Obs(torch.tensor([[1.0, 2.0, 6.0]] * sets), torch.ones(sets, 3, dtype=torch.bool)),
        chosen=torch.tensor([[True, False, True]] * sets),
        returns=torch.full((sets,), 5.23),
        discount=torch.full((sets,), 0.729),
        next_obs=Obs(next_x, next_mask),
        next_k=torch.full((sets,), k),
    )


def test_target_by_hand_online_picks_target_values() -> None:
    agent = learner(weight=1.0)
    with torch.no_grad():
        agent.target.weight.fill_(-2.0)  # the target alone would pick the lowest
    mask = torch.tensor([[True, True, True, False]])
    y = agent.targets(transitions(torch.tensor([[1.0, 4.0, 2.0, 50.0]]), mask))
    # online picks 4 and 2; the target says -2 * (4 + 2) / 2 = -6; 5.23 + .729 * -6 = .856
    torch.testing.assert_close(y, torch.tensor([0.856]))


def test_one_step_by_hand() -> None:
    agent = learner(weight=1.0)
    everyone = torch.ones(1, 3, dtype=torch.bool)
    loss = agent.update(transitions(torch.tensor([[1.0, 4.0, 2.0]]), everyone))
    # Q = 3.5, y = 5.23 + .729 * 3 = 7.417, loss = 3.917^2; the first step of Adam has size lr
    assert loss.item() == pytest.approx(3.917**2, rel=1e-5)
    assert agent.online.weight.item() == pytest.approx(1.1, rel=1e-5)
    assert agent.target.weight.item() == 1.0
    agent.sync_target()
    assert agent.target.weight.item() == agent.online.weight.item()


def test_smooth_l1_and_clipping() -> None:
    batch = transitions(torch.tensor([[1.0, 4.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert learner(loss="smooth_l1").update(batch).item() == pytest.approx(3.417)
    clipped = learner(grad_clip=1.0)
    clipped.update(batch)
    assert clipped.online.weight.grad is not None
    assert clipped.online.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_target_starts_as_a_copy_that_does_not_share_memory() -> None:
    agent = learner(weight=0.3)
    with torch.no_grad():
        agent.online.weight.add_(1.0)
    assert agent.target.weight.item() == pytest.approx(0.3)
    assert not agent.target.weight.requires_grad


def test_state_round_trips() -> None:
    first = learner()
    batch = transitions(torch.tensor([[1.0, 4.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    first.update(batch)
    second = learner(weight=7.0)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.update(batch), second.update(batch))
    assert torch.equal(first.online.weight, second.online.weight)
    assert torch.equal(first.target.weight, second.target.weight)
