from __future__ import annotations

from typing import Any

import torch

from fedglimpse.methods.learners.action_q import ActionAgent


def agent(**changes: Any) -> ActionAgent:
    values: dict[str, Any] = {"seed": 0, "hidden": 16, "gamma": 0.0, "lr": 0.01}
    return ActionAgent(2, 3, **values | {"buffer": 200, "batch": 32, "sync": 10} | changes)


def play(one: ActionAgent, rounds: range, epsilon: float = 1.0) -> torch.Tensor:
    """Action 1 pays for feature 1, action 2 for feature 0."""
    ids = torch.arange(8)
    for t in rounds:
        which = (ids + t) % 2
        state = torch.stack([which.float(), torch.ones(8)], dim=1)
        action = one.act(state, ids, t, epsilon)
        reward = (action == torch.where(which == 1, 1, 2)).float()
        one.add(state=state, action=action, reward=reward, after=state)
        one.learn(t)
    return action


def test_learns_an_action_that_depends_on_the_client() -> None:
    one = agent()
    play(one, range(150))
    state = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert one.act(state, torch.arange(2), 999, 0.0).tolist() == [1, 2]


def test_order_of_clients_does_not_matter() -> None:
    one = agent()
    ids = torch.tensor([5, 2, 8, 1])
    state = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    order = [2, 0, 3, 1]
    for epsilon in (0.0, 0.5, 1.0):
        action = one.act(state, ids, 3, epsilon)
        assert torch.equal(one.act(state[order], ids[order], 3, epsilon), action[order])


def test_learns_only_from_a_full_batch_and_keeps_the_newest() -> None:
    one = agent(batch=20, buffer=20)
    play(one, range(2))
    assert one.updates == 0
    play(one, range(2, 4))
    assert one.updates == 2
    assert one.count == 32
    assert len(one.state_dict()["rows"]["action"]) == 20


def test_exact_continuation() -> None:
    uninterrupted = agent(buffer=50)
    first_half = agent(buffer=50)
    resumed = agent(buffer=50)
    play(uninterrupted, range(30), 0.3)
    play(first_half, range(13), 0.3)
    resumed.load_state_dict(first_half.state_dict())
    play(resumed, range(13, 30), 0.3)
    for resumed_weight, weight in zip(
        resumed.learner.online.parameters(), uninterrupted.learner.online.parameters(), strict=True
    ):
        assert torch.equal(resumed_weight, weight)


def test_the_next_value_is_that_of_the_best_action() -> None:
    one = agent(gamma=0.9)
    seen = []
    update = one.learner.update
    one.learner.update = lambda batch: (seen.append(batch), update(batch))[1]  # type: ignore[assignment, func-returns-value]
    play(one, range(5))
    batch = seen[0]
    with torch.no_grad():
        best = one.learner.online(batch.next_obs).argmax(1, keepdim=True)
        judged = one.learner.target(batch.next_obs).gather(1, best)[:, 0]
    assert torch.allclose(one.learner.targets(batch), batch.returns + 0.9 * judged)
    assert (batch.chosen.sum(1) == 1).all()
