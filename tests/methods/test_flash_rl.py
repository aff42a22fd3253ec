from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import pytest
import torch

import fakes
from fedglimpse.methods.flash_rl import Distances, FlashSelector, reputation, usefulness
from fedglimpse.types import Method, Outcome


def test_worked_example() -> None:
    distance = torch.tensor([0.1], dtype=torch.float64)
    up = usefulness(distance, rose=True)
    down = usefulness(distance, rose=False)
    assert up.item() == pytest.approx(0.9048, abs=5e-5)
    assert down.item() == pytest.approx(0.0952, abs=5e-5)
    assert usefulness(-distance, rose=True) == up
    new = reputation(torch.tensor([0.01]).double(), up, 0.25, 0.6)
    assert new.item() == pytest.approx(0.3969, abs=5e-5)


def test_distances_are_relative_and_leave_buffers_out() -> None:
    aggregator = Distances()
    deltas = torch.tensor([[3.0, 0.0, 50.0], [1.0, 0.0, 70.0]])
    update = fakes.update(deltas, starts=torch.zeros(2, 3), num_params=2, weights=[0.5, 0.5])
    new = aggregator.step(torch.zeros(3), update)
    assert new.tolist() == [2.0, 0.0, 60.0]
    assert aggregator.relative.tolist() == [0.5, 0.5]


def played(method: Method, t: int, distances: list[float], score: float) -> Outcome:
    view = fakes.view(method.selector, [2, 5, 8], t)
    choice = method.selector.select(view, 2)
    aggregator = cast(Distances, method.aggregator)
    aggregator.round_num = t
    aggregator.relative = torch.tensor(distances).double()
    outcome = replace(fakes.outcome(method.selector, view, choice), score=score)
    method.selector.feedback(outcome)
    return outcome


def test_reputations_follow_rises_and_falls() -> None:
    method = fakes.build("flash-rl")
    selector = cast(FlashSelector, method.selector)
    first = played(method, 0, [0.1, 0.2], 0.5)  # rose from nothing
    expected = 0.4 / fakes.N + 0.6 * torch.tensor([-0.1, -0.2]).double().exp()
    assert torch.allclose(selector.reputation[first.selected], expected)
    before = selector.reputation.clone()
    second = played(method, 1, [0.1, 0.2], 0.4)  # fell
    useful = 1 - torch.tensor([-0.1, -0.2]).double().exp()
    expected = 0.4 * before[second.selected] + 0.6 * useful
    assert torch.allclose(selector.reputation[second.selected], expected)
    stored = selector.agent.memory.rows["rewards"][1]
    assert torch.allclose(stored[second.selected], expected.float())  # a reward for each client
    untouched = [i for i in range(fakes.N) if i not in (*first.selected, *second.selected)]
    assert (selector.reputation[untouched] == 1 / fakes.N).all()


def test_each_slot_explores_on_its_own() -> None:
    selector = cast(FlashSelector, fakes.build("flash-rl").selector)
    scores = torch.arange(6.0).double()
    generator = torch.Generator().manual_seed(0)
    assert selector.choose(scores, 3, 0.0, generator)[0].tolist() == [5, 4, 3]
    seen: Counter[str] = Counter()
    best = 0
    for _ in range(2000):
        slots, behaviour = selector.choose(scores, 2, 0.5, generator)
        assert len(set(slots.tolist())) == 2
        seen[behaviour] += 1
        best += int(slots[0] == 5)
    assert best / 2000 == pytest.approx(0.5 + 0.5 / 6, abs=0.05)
    assert seen["partial"] / 2000 == pytest.approx(0.5, abs=0.05)
    assert seen["explore"] / 2000 == pytest.approx(0.25, abs=0.05)


def test_next_action_comes_from_the_next_state() -> None:
    """The online network picks at s', the target network judges: not argmax of Q(s)."""
    selector = cast(FlashSelector, fakes.build("flash-rl").selector)
    method = fakes.build("flash-rl")
    selector = cast(FlashSelector, method.selector)
    for t in range(3):
        played(method, t, [0.1, 0.2], 0.5)
    batch = selector.agent.transitions(torch.tensor([0]))
    learner = selector.agent.learner
    with torch.no_grad():
        q = learner.online(batch.next_obs).masked_fill(~batch.next_obs.mask, -torch.inf)
        judged = learner.target(batch.next_obs).gather(1, q.argmax(1, keepdim=True))[:, 0]
    assert torch.allclose(learner.targets(batch), batch.returns + 0.9 * judged)


def test_defaults_of_the_code() -> None:
    selector = cast(FlashSelector, fakes.build("flash-rl").selector)
    options = selector.options
    agent = selector.agent
    assert (options.lr, options.gamma, options.buffer, options.batch) == (0.01, 0.9, 1000, 50)
    assert (options.hidden, options.sync, selector.memory) == (512, 10, 0.6)
    assert [options.epsilon_at(t) for t in (0, 250, 500, 900)] == pytest.approx(
        [0.9, 0.55, 0.2, 0.2]
    )
    assert agent.per_client
