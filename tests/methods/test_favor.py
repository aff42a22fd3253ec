from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fakes
from fedglimpse.methods.favor import reward
from fedglimpse.types import Method, Outcome

SMALL = {"options.hidden": 64, "options.batch": 32, "options.sync": 5}


@pytest.mark.parametrize(("score", "expected"), [(0.5, -0.7667), (0.85, 0.0), (0.9, 0.2311)])
def test_reward_of_the_worked_example(score: float, expected: float) -> None:
    assert reward(score, 64.0, 0.85) == pytest.approx(expected, abs=5e-5)


def test_the_learner_gets_that_reward() -> None:
    method = fakes.build("favor", options__target=0.85)
    view = fakes.view(method.selector, [1, 4, 6])
    choice = method.selector.select(view, 2)
    outcome = replace(fakes.outcome(method.selector, view, choice), score=0.9)
    assert method.selector.feedback(outcome)["agent_reward"] == pytest.approx(0.2311, abs=5e-5)
    stored = method.selector.agent.memory.rows["rewards"][0]  # type: ignore[attr-defined]
    assert stored[outcome.selected].tolist() == pytest.approx([0.2311] * 2, abs=5e-5)
    assert stored.count_nonzero() == 2


@pytest.mark.parametrize("name", ["favor", "flash-rl", "fedagent"])
def test_masked_argmax_never_returns_an_invisible_client(name: str) -> None:
    """The best Q belongs to clients that are not there, or none is where nobody is better."""
    method = fakes.build(name, options__epsilon=0.0, options__epsilon_least=0.0)
    network = method.selector.agent.learner.online.layers  # type: ignore[attr-defined]
    with torch.no_grad():
        network[-1].bias.copy_(torch.arange(fakes.N) * 100.0)
    for t, ids in enumerate(([0, 3, 5, 9], [1, 2], [11, 4, 0], list(range(fakes.N)))):
        view = fakes.view(method.selector, ids, t)
        choice = method.selector.select(view, 3)
        chosen = view.ids[choice.slots].tolist()
        assert chosen == sorted(ids, reverse=True)[:3]
        method.selector.feedback(fakes.outcome(method.selector, view, choice))


@pytest.mark.parametrize("name", ["favor", "flash-rl", "fedagent"])
def test_targets_look_at_visible_clients_only(name: str) -> None:
    """However good the others are, they do not enter the value of the next state."""
    method = fakes.build(name)
    agent = method.selector.agent  # type: ignore[attr-defined]
    for t in range(4):
        view = fakes.view(method.selector, [1, 4, 6, 7], t)
        choice = method.selector.select(view, 2)
        method.selector.feedback(fakes.outcome(method.selector, view, choice))
    batch = agent.transitions(agent.memory.starts())
    before = agent.learner.targets(batch)
    with torch.no_grad():
        for network in (agent.learner.online, agent.learner.target):
            network.layers[-1].bias[[0, 2, 3, 5, 8, 9, 10, 11]] += 1000.0
    assert torch.equal(agent.learner.targets(batch), before)


def play(method: Method, rounds: range, good: set[int]) -> None:
    """A federation whose score is the share of good clients among the chosen."""
    for t in rounds:
        ids = [(5 * t + i * i) % fakes.N for i in range(fakes.N)]
        view = fakes.view(method.selector, sorted(set(ids)), t)
        choice = method.selector.select(view, 2)
        outcome = fakes.outcome(method.selector, view, choice)
        share = sum(i in good for i in outcome.selected.tolist()) / len(outcome.selected)
        method.selector.feedback(replace(outcome, score=0.4 + 0.5 * share))


def test_learns_which_clients_are_worth_choosing() -> None:
    method = fakes.build("favor", options__gamma=0.0, **SMALL)
    good = {0, 3, 4, 7, 9}
    play(method, range(300), good)
    view = fakes.view(method.selector, range(fakes.N), 300)
    q = method.selector.agent.scores(view)  # type: ignore[attr-defined]
    is_good = torch.tensor([i in good for i in range(fakes.N)])
    assert q[is_good].mean() > q[~is_good].mean() + 0.3
    assert set(q.argsort(descending=True)[:4].tolist()) <= good


def test_exploration_falls_in_a_line() -> None:
    method = fakes.build("favor", options__epsilon_rounds=4)
    shares = []
    for t in range(6):
        view = fakes.view(method.selector, [1, 4, 6], t)
        choice = method.selector.select(view, 2)
        shares.append(choice.info["epsilon"])
        method.selector.feedback(fakes.outcome(method.selector, view, choice))
    assert shares == pytest.approx([0.9, 0.725, 0.55, 0.375, 0.2, 0.2])


def test_feedback_needs_a_choice() -> None:
    method = fakes.build("favor")
    view = fakes.view(method.selector, [1, 4, 6])
    choice = method.selector.select(view, 2)
    outcome: Outcome = fakes.outcome(method.selector, view, choice)
    with pytest.raises(ValueError, match="round 1"):
        method.selector.feedback(replace(outcome, round_num=1))


def test_q_reads_what_the_spec_says() -> None:
    """(N + 1) q floats with q = min(100, N), a flag and an age for each client, 512, N."""
    sizes = torch.full((30,), 10)
    method = fakes.build("favor", sizes, sketch__size=64)
    first, _, last = method.selector.agent.learner.online.layers  # type: ignore[attr-defined]
    assert (first.in_features, first.out_features) == (31 * 30 + 2 * 30, 512)
    assert last.out_features == 30
