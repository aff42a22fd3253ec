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
from fedglimpse.env import ID, ClientSelection, ClientSelectionVector, FlatBox, FlatBoxVector
from mistakes import mistake

EXACT = {"engine.trainer": "serial"}  # one client at a time: lanes cannot round differently


def both(config: dict[str, Any], mode: AutoresetMode, **arguments: Any) -> tuple[Any, Any]:
    """Return three environments in a loop of gymnasium's, and three lanes."""
    config = {**config, **EXACT}
    loop = SyncVectorEnv([lambda: ClientSelection(config, **arguments)] * 3, autoreset_mode=mode)
    return loop, ClientSelectionVector(3, config, autoreset_mode=mode, **arguments)


def without_lane(info: dict[str, Any]) -> dict[str, Any]:
    """Drop the number of the lane, which a single environment does not have."""
    info = dict(info)
    for name in ("record", "final_info"):
        if name in info:
            info[name] = without_lane(info[name])
    return {key: value for key, value in info.items() if key != "lane"}


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
    loop_observation, loop_infos = loop.reset(seed=11)
    lane_observation, lane_infos = lanes.reset(seed=11)
    assert same(loop_observation, lane_observation)
    assert same(listed(loop_infos), listed(lane_infos))
    loop.action_space.seed(0)
    for _ in range(9):
        actions = loop.action_space.sample()
        of_loop = loop.step(actions)
        of_lanes = lanes.step(actions)
        assert same(of_loop[:4], of_lanes[:4])
        assert of_loop[1].dtype == of_lanes[1].dtype
        for lane_info, loop_info in zip(listed(of_lanes[4]), listed(of_loop[4]), strict=True):
            assert lane_info["seed"] == loop_info["seed"]
            assert lane_info["round"] == loop_info["round"]
            assert lane_info.keys() == loop_info.keys()
            assert same(lane_info.get("final_obs", {}), loop_info.get("final_obs", {}))


def test_lanes_end_and_restart_independently() -> None:
    _, lanes = both({**SMALL, "rounds": 30}, AutoresetMode.NEXT_STEP, target=0.35)
    lanes.reset(seed=0)
    lanes.action_space.seed(0)
    ends: list[list[bool]] = []
    rounds: list[list[int]] = []
    for _ in range(20):
        _, rewards, terminated, truncated, infos = lanes.step(lanes.action_space.sample())
        if ends:
            for lane, ended in enumerate(ends[-1]):
                assert not ended or (infos["round"][lane], rewards[lane]) == (0, 0)
                assert infos["_record"][lane] == (not ended)
        ends.append((terminated | truncated).tolist())
        rounds.append(infos["round"].tolist())
    assert any(any(row) and not all(row) for row in ends)
    assert any(len(set(row)) > 1 for row in rounds)


def test_disabled_autoreset_waits_for_a_mask() -> None:
    _, lanes = both({**SMALL, "rounds": 4}, AutoresetMode.DISABLED, target=0.3)
    lanes.reset(seed=[4, 4, 5])
    done = np.zeros(3, bool)
    while not done.any():
        last_observation, _, terminated, truncated, _ = lanes.step(lanes.action_space.sample())
        done = terminated | truncated
    with mistake("reset_mask"):
        lanes.step(lanes.action_space.sample())
    observation, infos = lanes.reset(seed=8, options={"reset_mask": done})
    assert infos["_seed"].tolist() == done.tolist()
    for lane in range(3):
        is_same = same(of_lane(observation, lane), of_lane(last_observation, lane))
        assert is_same == (not done[lane])


def of_lane(observation: dict[str, Any], lane: int) -> dict[str, Any]:
    return {name: values[lane] for name, values in observation.items()}


def test_seeds_are_one_for_each_lane() -> None:
    _, lanes = both(SMALL, AutoresetMode.NEXT_STEP)
    assert lanes.reset(seed=5)[1]["seed"].tolist() == [5, 6, 7]
    assert lanes.reset(seed=[2, 2, 9])[1]["seed"].tolist() == [2, 2, 9]
    with mistake("seed"):
        lanes.reset(seed=[1, 2])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_lanes_can_be_copied(copied: Any) -> None:
    _, lanes = both(RAGGED, AutoresetMode.NEXT_STEP)
    lanes.reset(seed=3)
    lanes.action_space.seed(1)
    actions = [lanes.action_space.sample() for _ in range(7)]
    for action in actions[:3]:
        lanes.step(action)
    other = copied(lanes)
    for action in actions[3:]:
        assert same(lanes.step(action), other.step(action))


def test_rewards_per_class_and_flat_boxes_have_a_row_for_each_lane() -> None:
    lanes = FlatBoxVector(ClientSelectionVector(2, SMALL, reward="per_class"))
    single = FlatBox(ClientSelection({**SMALL, **EXACT}))
    observation, _ = lanes.reset(seed=0)
    assert observation.shape == lanes.observation_space.shape
    np.testing.assert_allclose(observation[1], single.reset(seed=1)[0], atol=1e-3)
    _, rewards, *_, infos = lanes.step(lanes.action_space.sample())
    assert rewards.shape == (2, 10)
    assert (rewards == infos["reward_per_class"]).all()


def test_make_vec_makes_lanes_of_one_world() -> None:
    import fedglimpse.env  # noqa: F401

    envs = gym.make_vec(ID, num_envs=2, config=SMALL)
    assert isinstance(envs, ClientSelectionVector)
    assert len(envs.stepper.world.lanes) == 2
