"""Lanes of one world behave as separate environments do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from env.gym_parts import AutoresetMode, DictInfoToList, SyncVectorEnv, gym
from env.small_env import RAGGED, SMALL
from env.test_properties import same
from fedglimpse import UserError
from fedglimpse.env import ID, ClientSelection, ClientSelectionVector, FlatBox, FlatBoxVector

EXACT = {"engine.trainer": "serial"}  # one client at a time: lanes cannot round differently


def both(config: dict[str, Any], mode: AutoresetMode, **words: Any) -> tuple[Any, Any]:
    config = {**config, **EXACT}
    one = SyncVectorEnv([lambda: ClientSelection(config, **words)] * 3, autoreset_mode=mode)
    return one, ClientSelectionVector(3, config, autoreset_mode=mode, **words)


def without_lane(info: dict[str, Any]) -> dict[str, Any]:
    """Drop what a lane knows and a single environment cannot: its number."""
    info = dict(info)
    for name in ("record", "final_info"):
        if name in info:
            info[name] = without_lane(info[name])
    return {k: v for k, v in info.items() if k != "lane"}


def listed(infos: dict[str, Any], count: int = 3) -> list[dict[str, Any]]:
    """One info for each lane; records of the loop are nested arrays, ours are dictionaries."""

    class Holder:
        num_envs = count
        _convert_info_to_list = DictInfoToList._convert_info_to_list

    return [without_lane(info) for info in Holder()._convert_info_to_list(infos)]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("target", [None, 0.3])
def test_lanes_are_environments(mode: AutoresetMode, target: float | None) -> None:
    loop, lanes = both({**RAGGED, "rounds": 3}, mode, target=target)
    assert loop.observation_space == lanes.observation_space
    assert loop.action_space == lanes.action_space
    assert lanes.metadata["autoreset_mode"] is mode
    first, second = loop.reset(seed=11), lanes.reset(seed=11)
    assert same(first[0], second[0])
    assert same(listed(first[1]), listed(second[1]))
    loop.action_space.seed(0)
    for _ in range(9):
        actions = loop.action_space.sample()
        one, other = loop.step(actions), lanes.step(actions)
        assert same(one[:4], other[:4])
        assert one[1].dtype == other[1].dtype
        for mine, theirs in zip(listed(other[4]), listed(one[4]), strict=True):
            assert mine["seed"] == theirs["seed"]
            assert mine["round"] == theirs["round"]
            assert mine.keys() == theirs.keys()
            assert same(mine.get("final_obs", {}), theirs.get("final_obs", {}))


def test_lanes_that_end_apart_begin_apart() -> None:
    _, lanes = both({**SMALL, "rounds": 30}, AutoresetMode.NEXT_STEP, target=0.35)
    lanes.reset(seed=0)
    lanes.action_space.seed(0)
    ends: list[list[bool]] = []
    rounds: list[list[int]] = []
    for _ in range(20):
        _, rewards, terminated, truncated, infos = lanes.step(lanes.action_space.sample())
        if ends:
            for r, over in enumerate(ends[-1]):
                assert not over or (infos["round"][r], rewards[r]) == (0, 0)
                assert infos["_record"][r] == (not over)
        ends.append((terminated | truncated).tolist())
        rounds.append(infos["round"].tolist())
    assert any(any(row) and not all(row) for row in ends)
    assert any(len(set(row)) > 1 for row in rounds)


def test_disabled_autoreset_waits_for_a_mask() -> None:
    _, lanes = both({**SMALL, "rounds": 4}, AutoresetMode.DISABLED, target=0.3)
    lanes.reset(seed=[4, 4, 5])
    over = np.zeros(3, bool)
    while not over.any():
        seen, _, terminated, truncated, _ = lanes.step(lanes.action_space.sample())
        over = terminated | truncated
    with pytest.raises(UserError, match="reset_mask"):
        lanes.step(lanes.action_space.sample())
    again, infos = lanes.reset(seed=8, options={"reset_mask": over})
    assert infos["_seed"].tolist() == over.tolist()
    for r in range(3):
        assert same({k: v[r] for k, v in seen.items()}, {k: v[r] for k, v in again.items()}) == (
            not over[r]
        )


def test_seeds_are_one_for_each_lane() -> None:
    _, lanes = both(SMALL, AutoresetMode.NEXT_STEP)
    assert lanes.reset(seed=5)[1]["seed"].tolist() == [5, 6, 7]
    assert lanes.reset(seed=[2, 2, 9])[1]["seed"].tolist() == [2, 2, 9]
    with pytest.raises(UserError, match="2 entries for 3 lanes"):
        lanes.reset(seed=[1, 2])


@pytest.mark.parametrize("way", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_lanes_can_be_copied(way: Any) -> None:
    _, lanes = both(RAGGED, AutoresetMode.NEXT_STEP)
    lanes.reset(seed=3)
    lanes.action_space.seed(1)
    moves = [lanes.action_space.sample() for _ in range(7)]
    for move in moves[:3]:
        lanes.step(move)
    other = way(lanes)
    for move in moves[3:]:
        assert same(lanes.step(move), other.step(move))


def test_rewards_per_class_and_flat_boxes_have_a_row_for_each_lane() -> None:
    lanes = FlatBoxVector(ClientSelectionVector(2, SMALL, reward="per_class"))
    single = FlatBox(ClientSelection({**SMALL, **EXACT}))
    seen, _ = lanes.reset(seed=0)
    assert seen.shape == lanes.observation_space.shape
    np.testing.assert_allclose(seen[1], single.reset(seed=1)[0], atol=1e-3)
    _, rewards, *_, infos = lanes.step(lanes.action_space.sample())
    assert rewards.shape == (2, 10)
    assert (rewards == infos["reward_per_class"]).all()


def test_make_vec_makes_lanes_of_one_world() -> None:
    import fedglimpse.env  # noqa: F401

    envs = gym.make_vec(ID, num_envs=2, config=SMALL)
    assert isinstance(envs, ClientSelectionVector)
    assert len(envs.stepper.world.lanes) == 2
