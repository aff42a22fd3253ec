"""Gymnasium's own checks, registration, and users' mistakes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from env.gym_parts import check_env, gym
from env.small_env import RAGGED, SMALL
from fedglimpse.env import ID, ClientSelection, FlatBox, ScalarReward
from mistakes import mistake

ARGUMENTS: dict[str, dict[str, Any]] = {
    "update sketches": {},
    "weight sketches": {"config": {"agent.input": "abs"}},
    "numbers": {"config": {"agent.input": "scalar"}},
    "nothing": {"reports": ()},
    "other reports": {
        "reports": ("loss", "update_norm", "label_histogram", "proxy_histogram"),
        "config": {"options.allow_oracle": True},
    },
    "released": {"config": {"preset": "released"}},
}


@pytest.mark.parametrize("config", [SMALL, RAGGED], ids=["clusters", "ragged"])
@pytest.mark.parametrize("action", ["scores", "subset"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_gymnasiums_checks_pass(name: str, action: str, config: dict[str, Any]) -> None:
    arguments = dict(ARGUMENTS[name])
    arguments["config"] = {**config, **arguments.get("config", {})}
    env = gym.make(ID, action=action, disable_env_checker=True, **arguments).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*value is -?infinity.*")  # sketches have none
        check_env(env)


def test_gymnasiums_checks_pass_with_the_flat_box_and_the_worst_class() -> None:
    env = ScalarReward(FlatBox(ClientSelection(SMALL, reward="per_class")))
    check_env(env)
    observation, _ = env.reset(seed=0)
    assert observation.ndim == 1
    _, reward, *_, info = env.step(env.action_space.sample())
    assert reward == info["reward_per_class"].min()


def test_the_environment_is_found_in_a_fresh_interpreter() -> None:
    arguments = "config={'rounds': 2, 'data.clients': 12, 'selection.k': 2}"
    code = f"""
import gymnasium
env = gymnasium.make("fedglimpse.env:{ID}", {arguments})
env.reset(seed=1)
envs = gymnasium.make_vec("fedglimpse.env:{ID}", num_envs=2, {arguments})
envs.reset(seed=1)
print(type(env.unwrapped).__name__, type(envs).__name__)
"""
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.split() == ["ClientSelection", "ClientSelectionVector"]


def test_observations_show_the_visible_clients() -> None:
    env = ClientSelection(SMALL)
    observation, info = env.reset(seed=2)
    assert info == {"seed": 2, "round": 0}
    assert observation["mask"].tolist() == [1, 1, 1, 1]
    assert observation["history_mask"].tolist() == [0, 0, 1]
    sizes = env.stepper.world.lanes[0].population.sizes[observation["ids"]]
    assert observation["sizes"].tolist() == sizes.tolist()
    next_observation, reward, terminated, truncated, info = env.step(
        np.array([0.1, 0.9, -1.0, 0.5])
    )
    assert info["record"]["visible"] == observation["ids"].tolist()
    assert info["record"]["selected"] == observation["ids"][[1, 3]].tolist()
    assert reward == info["record"]["reward"]
    assert not terminated
    assert not truncated
    assert next_observation["history_mask"].tolist() == [0, 1, 1]
    assert (next_observation["history"][1] == observation["history"][2]).all()


def test_a_round_without_visible_clients_passes() -> None:
    env = ClientSelection({**RAGGED, "visibility.min_visible": 12, "rounds": 3})
    observation, _ = env.reset(seed=0)
    assert not observation["mask"].any()
    _, reward, _, truncated, info = env.step(env.action_space.sample())
    assert reward == 0
    assert not info["played"]
    assert info["record"]["selected"] == []
    env.step(env.action_space.sample())
    assert not truncated
    assert env.step(env.action_space.sample())[3]


def test_a_subset_is_repaired_to_k() -> None:
    for bits, chosen_bits in (([1, 1, 1, 0], 2), ([0, 0, 0, 1], 1), ([0, 0, 0, 0], 0)):
        env = ClientSelection(SMALL, action="subset")
        observation, _ = env.reset(seed=4)
        subset = set(observation["ids"][np.array(bits, bool)].tolist())
        chosen = env.step(np.array(bits, np.int8))[4]["record"]["selected"]
        assert len(chosen) == 2
        assert len(subset & set(chosen)) == chosen_bits


def test_the_target_ends_an_episode() -> None:
    easy = ClientSelection(SMALL, target=0.01)
    easy.reset(seed=0)
    assert easy.step(easy.action_space.sample())[2:4] == (True, False)
    hard = ClientSelection(SMALL, target=1.0)
    hard.reset(seed=0)
    ends = [hard.step(hard.action_space.sample())[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]


def test_the_target_can_be_measured_on_the_proxy_set() -> None:
    env = ClientSelection({**SMALL, "rounds": 50}, target=0.25, target_on="proxy")
    env.reset(seed=0)
    terminated = False
    while not terminated:
        _, _, terminated, _, info = env.step(env.action_space.sample())
        assert terminated == (info["score"] >= 0.25)


def test_a_seed_changes_what_vary_names() -> None:
    def episode_parts(env: ClientSelection, seed: int) -> dict[str, Any]:
        env.reset(seed=seed)
        world = env.stepper.world
        lane = world.lanes[0]
        return {
            "partition": [rows.tolist() for rows in lane.population.rows],
            "visibility": [lane.visibility.visible(lane.seed, t).tolist() for t in range(9)],
            "model": world.states[0].tolist(),
        }

    for vary in ((), ("partition",), ("visibility", "model"), ("partition", "visibility", "model")):
        env = ClientSelection(SMALL, vary=vary)
        first = episode_parts(env, 1)
        second = episode_parts(env, 2)
        assert {name for name in first if first[name] != second[name]} == set(vary)


def test_a_reset_without_a_seed_follows_from_the_last_seed() -> None:
    def seeds() -> list[int]:
        env = ClientSelection({**SMALL, "seeds": [9]})
        explicit = [None, None, 5, None, None, 5]
        return [env.reset(seed=seed)[1]["seed"] for seed in explicit]

    episode_seeds = seeds()
    assert episode_seeds == seeds()
    assert (episode_seeds[0], episode_seeds[2], episode_seeds[5]) == (9, 5, 5)
    assert len(set(episode_seeds)) == 5


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"action": "score"}, "action"),
        ({"reward": "f1"}, "reward"),
        ({"reports": ("proxy_logits",)}, "reports"),
        ({"reports": ("los",)}, ""),
        ({"target": 80.0}, "target"),
        ({"target_on": "train"}, "target_on"),
        ({"vary": ("data",)}, "vary"),
        ({"config": {"round": 3}}, "round"),
        ({"config": {"method": "sequential"}}, ""),
    ],
)
def test_mistakes_name_the_argument(arguments: dict[str, Any], key: str) -> None:
    with mistake(key):
        ClientSelection(**arguments).reset()


def test_a_bad_action_is_a_users_mistake() -> None:
    env = ClientSelection(SMALL)
    with mistake():
        env.step(np.zeros(4))
    env.reset(seed=0)
    with mistake():
        env.step(np.array([0, np.nan, 0, 0]))
    with mistake():
        env.step(np.zeros(3))
