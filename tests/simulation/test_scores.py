from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score

from fedglimpse import rng
from fedglimpse.simulation.evaluation import PendingScores, Reward, Scores


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_sklearn(seed: int) -> None:
    draw = rng.generator(seed, "scores")
    logits = torch.randn(40, 6, generator=draw)
    y = torch.randint(0, 4, (40,), generator=draw)  # classes 4 and 5 are absent
    guess = logits.argmax(1)
    found = PendingScores([0], logits[None], y[None]).wait()[0]
    labels = list(range(6))
    each = f1_score(y, guess, average=None, labels=labels, zero_division=0)
    assert found.per_class_f1.tolist() == pytest.approx(each.tolist(), abs=1e-6)
    assert found.macro_f1 == pytest.approx(each.mean())
    assert found.accuracy == pytest.approx(accuracy_score(y, guess))
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, y)))
    assert found.predicted.tolist() == pytest.approx((guess.bincount(minlength=6) / 40).tolist())


@pytest.mark.parametrize("classes", [2, 6, 10, 62])
def test_many_models_score_bit_for_bit_as_one(classes: int) -> None:
    draw = rng.generator(classes, "scores")
    logits = torch.randn(7, 50, classes, generator=draw)
    y = torch.randint(0, classes, (7, 50), generator=draw)
    for s, ours in PendingScores(range(7), logits, y).wait().items():
        alone = PendingScores([s], logits[s : s + 1], y[s : s + 1]).wait()[s]
        for name, value in vars(alone).items():
            same = torch.equal if isinstance(value, torch.Tensor) else float.__eq__
            assert same(getattr(ours, name), value), name


def scores(f1: float, accuracy: float, per_class: list[float]) -> Scores:
    return Scores(accuracy, f1, torch.tensor(per_class), 0.0, torch.zeros(len(per_class)))


def test_the_reward_by_hand() -> None:
    """lambda = 0.75: r0 = .75 * .4 = .3, r1 = .75 * .8 + .25 * .3 = .675."""
    reward = Reward("f1", 0.75)
    first = reward.update(scores(0.4, 0.9, [0.2, 0.6]))
    assert first.total == pytest.approx(0.3)
    assert first.per_class.tolist() == pytest.approx([0.15, 0.45])
    second = reward.update(scores(0.8, 0.1, [1.0, 0.6]))
    assert second.total == pytest.approx(0.675)
    assert second.per_class.tolist() == pytest.approx([0.75 + 0.25 * 0.15, 0.45 + 0.25 * 0.45])
    assert second.score == 0.8


def test_the_reward_of_accuracy_and_its_state() -> None:
    reward, other = Reward("accuracy", 1.0), Reward("accuracy", 0.5)
    assert reward.update(scores(0.4, 0.9, [0.2])).total == pytest.approx(0.9)
    other.load_state_dict(reward.state_dict())
    assert other.update(scores(0.4, 0.5, [0.6])).total == pytest.approx(0.7)
    assert other.per_class is not None
    assert other.per_class.tolist() == pytest.approx([0.4])
