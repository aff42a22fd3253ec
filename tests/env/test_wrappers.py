"""Flat observations and scalar rewards."""

from __future__ import annotations

import numpy as np
import pytest

import env.gym_parts  # noqa: F401
from env.small_env import RAGGED, SMALL
from fedglimpse.env import ClientSelection, FlatBox, ScalarReward


@pytest.mark.parametrize("reports", [None, (), ("loss", "proxy_histogram")])
def test_a_flat_box_has_the_columns_of_the_docs(reports: tuple[str, ...] | None) -> None:
    plain = ClientSelection(RAGGED, reports=reports)
    env = FlatBox(plain)
    slots = plain.shape.slots
    start = slots * plain.shape.features  # of the columns after the reports
    for seed in range(3):
        row, _ = env.reset(seed=seed)
        assert row in env.observation_space
        observation, _ = plain.reset(seed=seed)
        mask = row[start + 2 * slots : start + 3 * slots]
        assert (mask == observation["mask"]).all()
        assert row[start + slots : start + 2 * slots].sum() == pytest.approx(float(mask.any()))
        assert (row[start : start + slots] * 12).round() == pytest.approx(observation["ids"] * mask)
        reported = row[:start].reshape(slots, -1)
        assert (reported[mask == 0] == 0).all()
        if start and mask.sum() > 1:
            np.testing.assert_allclose(reported[mask == 1].mean(0), 0, atol=1e-4)


def test_a_scalar_reward_is_the_mean_or_the_worst_class() -> None:
    for rule, fold in (("mean", np.mean), ("min", np.min)):
        env = ScalarReward(ClientSelection(SMALL, reward="per_class"), rule)
        env.reset(seed=0)
        _, reward, *_, info = env.step(env.action_space.sample())
        assert reward == pytest.approx(fold(info["reward_per_class"]))
