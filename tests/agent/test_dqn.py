"""The learner on networks small enough to compute by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedglimpse.agent.learner import Batch, DoubleDQN, class_scores, set_value, top_members


class Obs(NamedTuple):
    x: Tensor  # [B, V] or [B, V, C]: the network multiplies it by its one weight
    mask: Tensor  # [B, V]


class Scale(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, obs: Obs) -> Tensor:
        return self.weight * obs.x


def learner(weight: float = 1.0, **changes: object) -> DoubleDQN[Scale]:
    settings = {
        "lr": 0.1,
        "weight_decay": 0.0,
        "tau": 0.5,
        "grad_clip": 0.0,
        "loss": "mse",
        "optimizer": "sgd",
    }
    return DoubleDQN(Scale(weight), **(settings | changes))  # type: ignore[arg-type]


def batch(next_x: Tensor, next_mask: Tensor, k: int = 2) -> Batch:
    sets = len(next_x)
    return Batch(
        obs=Obs(torch.tensor([[1.0, 2.0, 6.0]] * sets), torch.ones(sets, 3, dtype=torch.bool)),
        chosen=torch.tensor([[True, False, True]] * sets),
        returns=torch.full((sets,), 5.23),
        discount=torch.full((sets,), 0.729),
        next_obs=Obs(next_x, next_mask),
        next_k=torch.full((sets,), k),
    )


def test_q_of_a_set_is_the_mean_of_its_clients() -> None:
    q = torch.tensor([[1.0, 2.0, 6.0], [4.0, -1.0, 100.0]])
    chosen = torch.tensor([[True, False, True], [True, True, False]])
    assert set_value(q, chosen).tolist() == [3.5, 1.5]
    per_class = torch.stack([q, 10 * q], dim=-1)
    assert set_value(per_class, chosen).tolist() == [[3.5, 35.0], [1.5, 15.0]]


def test_top_k_never_takes_padding_and_copes_with_fewer_than_k() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 99.0], [1.0, 3.0, 2.0, 4.0], [5.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True] * 4, [True, False, False, False]])
    got = top_members(scores, mask, torch.tensor([2, 3, 5]))
    assert got.tolist() == [
        [False, True, True, False],
        [False, True, True, True],
        [True, False, False, False],
    ]


def test_target_by_hand_online_picks_target_judges() -> None:
    agent = learner(weight=1.0)
    with torch.no_grad():
        agent.target.weight.fill_(-2.0)  # the target alone would pick the lowest
    mask = torch.tensor([[True, True, True, False]])
    y = agent.targets(batch(torch.tensor([[1.0, 4.0, 2.0, 50.0]]), mask))
    # online picks 4 and 2; the target says -2 * (4 + 2) / 2 = -6; 5.23 + .729 * -6 = .856
    torch.testing.assert_close(y, torch.tensor([0.856]))


def test_one_step_by_hand() -> None:
    agent = learner(weight=1.0)
    loss = agent.update(batch(torch.tensor([[1.0, 4.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool)))
    # Q = 3.5, y = 5.23 + .729 * 3 = 7.417, loss = 3.917^2; dQ/dw = 3.5
    assert loss.item() == pytest.approx(3.917**2, rel=1e-5)
    stepped = 1.0 + 0.1 * 2 * 3.917 * 3.5
    assert agent.online.weight.item() == pytest.approx(stepped, rel=1e-5)
    assert agent.target.weight.item() == pytest.approx((1.0 + stepped) / 2, rel=1e-5)


def test_smooth_l1_clipping_and_decay_groups() -> None:
    nxt, mask = torch.tensor([[1.0, 4.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert learner(loss="smooth_l1").update(batch(nxt, mask)).item() == pytest.approx(3.417)
    clipped = learner(grad_clip=1.0)
    clipped.update(batch(nxt, mask))
    assert clipped.online.weight.item() == pytest.approx(1.1, rel=1e-4)
    net = Scale(1.0)
    spared = DoubleDQN(
        net, lr=0.1, weight_decay=9.0, tau=0.5, grad_clip=0.0, loss="mse", optimizer="sgd",
        undecayed=[net.weight],
    )  # fmt: skip
    assert [g["weight_decay"] for g in spared.optimizer.param_groups] == [9.0, 0.0]


def test_target_starts_as_a_copy_that_does_not_share_memory() -> None:
    agent = learner(weight=0.3)
    assert agent.target.weight.item() == pytest.approx(0.3)
    with torch.no_grad():
        agent.online.weight.add_(1.0)
    assert agent.target.weight.item() == pytest.approx(0.3)
    assert not agent.target.weight.requires_grad


def test_per_class_targets_are_elementwise_and_ranked_by_the_rule() -> None:
    q = torch.tensor([[[9.0, 0.0], [4.0, 4.0], [1.0, 1.0]]])  # [B, V, C]
    assert class_scores(q, "mean").tolist() == [[4.5, 4.0, 1.0]]
    assert class_scores(q, "min").tolist() == [[0.0, 4.0, 1.0]]
    rewards = torch.tensor([[1.0, 2.0]])
    wanted = {"mean": [1.0 + 0.729 * 9.0, 2.0], "min": [1.0 + 0.729 * 4.0, 2.0 + 0.729 * 4.0]}
    for rule, y in wanted.items():
        base = batch(q, torch.ones(1, 3, dtype=torch.bool), k=1)
        got = learner(score=rule).targets(base._replace(returns=rewards))
        torch.testing.assert_close(got, torch.tensor([y]))


def test_state_round_trips() -> None:
    first = learner(optimizer="adam")
    data = batch(torch.tensor([[1.0, 4.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    first.update(data)
    second = learner(weight=7.0, optimizer="adam")
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.update(data), second.update(data))
    assert torch.equal(first.online.weight, second.online.weight)
    assert torch.equal(first.target.weight, second.target.weight)
