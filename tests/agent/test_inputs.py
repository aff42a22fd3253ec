"""History, running scale, features and identities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rl_fakes import D, view

from fedglimpse.agent.inputs import (
    History,
    RunningScale,
    features_of,
    standardised,
    zscore,
)


def test_history_holds_the_last_rounds_newest_last() -> None:
    history = History(2, length=2, dim=1)
    seen = []
    for t in range(5):
        history.push(1, torch.tensor([float(t)]), t)
        sketches = history.sketches[1, :, 0].tolist()
        exists = history.exists[1]
        seen.append([s if e else None for s, e in zip(sketches, exists, strict=True)])
    assert seen == [[None, None, 0], [None, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_looking_twice_at_a_round_counts_once() -> None:
    history = History(2, length=2, dim=1)
    assert history.push(1, torch.tensor([1.0]), 0)
    assert history.push(1, torch.tensor([2.0]), 1)
    assert not history.push(1, torch.tensor([5.0]), 1)
    assert history.sketches[1, :, 0].tolist() == [0.0, 1.0, 5.0]


def shown(scale: RunningScale, rows: torch.Tensor) -> torch.Tensor:
    """Standardise rows by what the second lane has seen."""
    return standardised(rows.expand(2, *rows.shape), *scale.numbers())[1]


def test_running_scale_is_mean_and_population_std() -> None:
    scale = RunningScale(2, 2)
    for row in ([1.0, 4.0], [2.0, 4.0], [6.0, 4.0]):
        scale.add(1, torch.tensor(row))
    got = shown(scale, torch.tensor([[3.0, 4.0], [3.0 + 14**0.5 / 3**0.5, 9.0]]))
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


def test_running_scale_survives_large_offsets_and_cuts_outliers() -> None:
    scale = RunningScale(2, 1)
    for step in range(100):
        scale.add(1, torch.tensor([1e4 + step % 2]))
    assert shown(scale, torch.tensor([[1e4 + 1.0]])).item() == pytest.approx(1.0, abs=1e-3)
    assert shown(scale, torch.tensor([[2e4]])).item() == 10.0


def test_running_scale_is_bit_for_bit_welford_in_float64() -> None:
    draw, scale = torch.Generator().manual_seed(2), RunningScale(2, 33)
    mean, squares = torch.zeros(2, 33, dtype=torch.float64)
    for count in range(1, 40):
        sketch = torch.randn(33, generator=draw) * 3 + 1
        sketch[5] = 4.0  # never varies
        scale.add(1, sketch)
        before = sketch.double() - mean
        mean = mean + before / count
        squares = squares + before * (sketch.double() - mean)
        std = (squares / count).sqrt()
        factor = torch.where(std > 1e-12, 1.0 / std.clamp_min(1e-12), 0.0).float()
        assert torch.equal(scale.numbers()[0][1], mean.float())
        assert torch.equal(scale.numbers()[1][1], factor)
    assert factor[5] == 0.0


def test_a_scale_goes_on_where_it_was_saved() -> None:
    one, other = (RunningScale(2, 3) for _ in range(2))
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    for row in rows[:5]:
        one.add(1, row)
    other.load_state_dict(1, one.state_dict(1))
    for row in rows[5:]:
        one.add(1, row)
        other.add(1, row)
    assert torch.equal(shown(one, rows), shown(other, rows))


def test_zscore_by_hand_and_constant_columns() -> None:
    rows = torch.tensor([[1.0, 0.1], [2.0, 0.1], [3.0, 0.1]])
    wanted = torch.tensor([[-1.2247449, 0.0], [0.0, 0.0], [1.2247449, 0.0]])
    torch.testing.assert_close(zscore(rows), wanted)
    assert zscore(torch.tensor([[0.3, 7.0]])).tolist() == [[0.0, 0.0]]


def test_features_of_every_input() -> None:
    seen = view(0)
    assert features_of(seen, "grad", False).equal(seen.reports["delta_sketch"])
    assert features_of(seen, "abs", False).equal(seen.reports["sketch"])
    scalars = features_of(seen, "scalar", False)
    assert scalars[:, 2].tolist() == seen.sizes.tolist()
    assert scalars.shape == (5, 3)


def test_a_client_that_diverged_does_not_spoil_the_others() -> None:
    seen = view(0)
    broken = seen.reports["delta_sketch"].clone()
    broken[2] = torch.tensor([torch.nan, torch.inf, *[1.0] * (D - 2)])
    rows = features_of(replace(seen, reports={"delta_sketch": broken}), "grad", True)
    assert rows.isfinite().all()


def test_a_history_goes_on_where_it_was_saved() -> None:
    one, other = (History(2, length=3, dim=1) for _ in range(2))
    for t in range(6):
        one.push(1, torch.tensor([float(t)]), t)
        other.load_state_dict(1, one.state_dict(1))
        assert not other.push(1, torch.tensor([float(t)]), t)  # the same round again
        assert torch.equal(one.sketches, other.sketches)
        assert torch.equal(one.exists, other.exists)
    assert not one.exists[0].any()
