from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from rl_fakes import config, play, selector

from fedglimpse.agent.proof import KEPT, Proof
from fedglimpse.errors import UserError

CHOSEN = torch.tensor([True, True, False, False])


def said(x: float) -> torch.Tensor:
    """Return Q whose chosen clients lie `x` standard deviations above the mean, |x| <= 1."""
    free = math.sqrt(1 - x * x)
    return 5 + 0.1 * torch.tensor([x + free, x - free, -x + free, -x - free], dtype=torch.float64)


def proven(xs: list[float], ys: list[float]) -> Proof:
    """Return what drawn rounds prove in which Q said `xs` and the reward changed by `ys`."""
    proof, reward = Proof(), 0.5
    proof.add(said(0.0), CHOSEN, reward, drawn=False)
    for x, y in zip(xs, ys, strict=True):
        reward += y
        proof.add(said(x), CHOSEN, reward, drawn=True)
    return proof


def pairs(count: int, share: float, seed: int) -> tuple[list[float], list[float]]:
    """Return what is said, and what comes: `share` of it by what was said, the rest by luck."""
    luck = Random(seed)
    xs = [luck.uniform(-0.9, 0.9) for _ in range(count)]
    return xs, [share * x + (1 - share) * luck.uniform(-0.9, 0.9) for x in xs]


def test_against_a_plain_weighted_correlation() -> None:
    xs, ys = pairs(40, 0.25, seed=0)
    w = KEPT ** np.arange(len(xs))[::-1]
    c = np.cov(np.stack([xs, ys]), aweights=w, ddof=0)
    correlation = c[0, 1] / math.sqrt(c[0, 0] * c[1, 1])
    z = math.atanh(correlation) * math.sqrt(w.sum() ** 2 / (w**2).sum() - 3)
    assert 0 < (z - 1) / 2 < 1
    assert proven(xs, ys).trust == pytest.approx((z - 1) / 2, rel=1e-6)


def test_noise_is_seldom_trusted_and_knowledge_is() -> None:
    noise = [proven(*pairs(100, 0.0, seed)).trust for seed in range(200)]
    assert sum(noise) / len(noise) < 0.08  # of a standard normal z: 0.042
    assert sum(trust > 0.9 for trust in noise) <= 4
    assert all(proven(*pairs(100, 0.5, seed)).trust > 0.9 for seed in range(20))


def test_what_is_wrong_or_little_is_not_trusted() -> None:
    xs, ys = pairs(60, 0.7, seed=0)
    assert proven(xs, ys).trust == 1.0
    assert proven(xs, [-y for y in ys]).trust == 0.0
    assert proven(xs[:3], ys[:3]).trust == 0.0
    assert proven(xs, [0.0] * 60).trust == 0.0


def test_old_evidence_fades() -> None:
    xs, ys = pairs(60, 0.9, seed=1)
    later, luck = pairs(400, 0.0, seed=2)
    assert proven(xs, ys).trust == 1.0
    assert proven(xs + later, ys + luck).trust < 0.5


@pytest.mark.parametrize(
    ("q", "chosen", "reward", "drawn"),
    [
        (said(0.5), CHOSEN, 0.6, False),
        (torch.ones(4), CHOSEN, 0.6, True),
        (said(0.5), torch.ones(4, dtype=torch.bool), 0.6, True),
        (said(0.5), torch.zeros(4, dtype=torch.bool), 0.6, True),
        (said(0.5), CHOSEN, math.nan, True),
        (said(0.5) * math.nan, CHOSEN, 0.6, True),
    ],
    ids=["greedy", "flat", "everyone", "nobody", "no reward", "no Q"],
)
def test_rounds_that_say_nothing(
    q: torch.Tensor, chosen: torch.Tensor, reward: float, drawn: bool
) -> None:
    proof = proven(*pairs(30, 0.5, seed=0))
    before = proof.state_dict()["sums"]
    proof.add(q, chosen, reward, drawn)
    assert proof.state_dict()["sums"] == before


def test_an_agent_without_proof_goes_on_exploring() -> None:
    """The rewards are luck; the schedule alone would explore in one round of ten."""
    found = {}
    for prove in (False, True):
        said = play(selector(prove=prove, epsilon_decay=0.05), range(120))
        found[prove] = sum(info["behaviour"] == "explore" for _, info, _ in said[20:]) / 100
        assert all(("trust" in metrics) == prove for _, _, metrics in said)
    assert found[False] < 0.25
    assert found[True] > 0.75


def test_the_schedule_decides_once_proof_is_there() -> None:
    agent = selector(prove=True)
    agent.step = 1000
    assert agent.epsilon == 1.0
    agent.proof = proven(*pairs(60, 0.7, seed=0))
    assert agent.epsilon == agent.config.epsilon_min
    again = selector(prove=True)
    again.load_state_dict(agent.state_dict())
    assert again.epsilon == agent.config.epsilon_min
    again.proof, again.frozen = Proof(), True
    assert again.epsilon == 0.0


def test_a_run_from_before_there_was_proof_goes_on() -> None:
    agent, again = selector(), selector()
    play(agent, range(6))
    state = agent.state_dict()
    del state["proof"]
    again.load_state_dict(state)
    assert play(again, range(6, 9)) == play(agent, range(6, 9))


def test_proof_needs_sets_that_are_drawn_as_a_whole() -> None:
    with pytest.raises(UserError, match="exploration=all, not partial"):
        config(prove=True, exploration="partial")
