from __future__ import annotations

import pytest

from fedglimpse.studies.statistics.difference import Spread
from fedglimpse.studies.statistics.participation import Participation, classes_covered, jain


def test_jain_by_hand() -> None:
    assert jain([3, 3, 3]) == 1
    assert jain([5, 0, 0, 0]) == 0.25
    assert jain([1, 2, 3]) == pytest.approx(36 / (3 * 14))
    assert jain([0, 0]) == 1


def test_visits() -> None:
    part = Participation(seen=(4, 4, 2, 0), chosen=(4, 1, 0, 0), classes_covered=None)
    assert part.visits == (0, 0.5, 4)
    assert part.never == 1  # the last one was never seen, which is nobody's choice
    assert part.jain == pytest.approx(25 / (4 * 17))
    assert part.jain_of_seen == pytest.approx(100 / (4 * 36))


def test_classes_that_the_chosen_hold() -> None:
    held = [[5, 0, 0, 0], [0, 5, 5, 0], [0, 0, 1, 0]]
    assert classes_covered([[0], [0, 1], [], [1, 2]], held) == pytest.approx((1 + 3 + 2) / 3 / 4)
    assert classes_covered([[]], held) is None


def test_spread_over_seeds_and_over_rounds_are_kept_apart() -> None:
    found = Spread.of([0.5, 0.7], [0.01, 0.03])
    assert found.mean == pytest.approx(0.6)
    assert found.std == pytest.approx(0.1414213562)
    assert found.over_rounds == pytest.approx(0.02)
    alone = Spread.of([0.5], [None])
    assert (alone.std, alone.over_rounds, alone.seeds) == (None, None, 1)
