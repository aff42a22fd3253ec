"""Gymnasium's own checks, registration, and what users get wrong."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from env.gym_parts import check_env, gym
from env.small_env import RAGGED, SMALL
from fedglimpse import UserError
from fedglimpse.env import ID, ClientSelection, FlatBox, ScalarReward

FORMS: dict[str, dict[str, Any]] = {
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
@pytest.mark.parametrize("form", FORMS)
def test_gymnasium_is_content(form: str, action: str, config: dict[str, Any]) -> None:
    words = dict(FORMS[form])
    words["config"] = {**config, **words.get("config", {})}
    env = gym.make(ID, action=action, disable_env_checker=True, **words).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*value is -?infinity.*")  # sketches have none
        check_env(env)


def test_gymnasium_is_content_with_the_flat_box_and_the_worst_class() -> None:
    env = ScalarReward(FlatBox(ClientSelection(SMALL, reward="per_class")))
    check_env(env)
    seen, _ = env.reset(seed=0)
    assert seen.ndim == 1
    _, reward, *_, info = env.step(env.action_space.sample())
    assert reward == info["reward_per_class"].min()


def test_the_environment_is_found_in_a_fresh_interpreter() -> None:
    words = "config={'rounds': 2, 'data.clients': 12, 'selection.k': 2}"
    code = f"""
import gymnasium
env = gymnasium.make("fedglimpse.env:{ID}", {words})
env.reset(seed=1)
envs = gymnasium.make_vec("fedglimpse.env:{ID}", num_envs=2, {words})
envs.reset(seed=1)
print(type(env.unwrapped).__name__, type(envs).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ClientSelection", "ClientSelectionVector"]


def test_observations_show_the_visible_clients() -> None:
    env = ClientSelection(SMALL)
    seen, info = env.reset(seed=2)
    assert info == {"seed": 2, "round": 0}
    assert seen["mask"].tolist() == [1, 1, 1, 1]
    assert seen["history_mask"].tolist() == [0, 0, 1]
    sizes = env.stepper.world.lanes[0].population.sizes[seen["ids"]]
    assert seen["sizes"].tolist() == sizes.tolist()
    after, reward, terminated, truncated, info = env.step(np.array([0.1, 0.9, -1.0, 0.5]))
    assert info["record"]["visible"] == seen["ids"].tolist()
    assert info["record"]["selected"] == seen["ids"][[1, 3]].tolist()
    assert reward == info["record"]["reward"]
    assert not terminated
    assert not truncated
    assert after["history_mask"].tolist() == [0, 1, 1]
    assert (after["history"][1] == seen["history"][2]).all()


def test_a_round_without_visible_clients_passes() -> None:
    env = ClientSelection({**RAGGED, "visibility.min_visible": 12, "rounds": 3})
    seen, _ = env.reset(seed=0)
    assert not seen["mask"].any()
    _, reward, _, truncated, info = env.step(env.action_space.sample())
    assert reward == 0
    assert not info["played"]
    assert info["record"]["selected"] == []
    env.step(env.action_space.sample())
    assert not truncated
    assert env.step(env.action_space.sample())[3]


def test_a_subset_is_repaired_to_k() -> None:
    for bits, inside, size in (([1, 1, 1, 0], 2, 2), ([0, 0, 0, 1], 1, 2), ([0, 0, 0, 0], 0, 2)):
        env = ClientSelection(SMALL, action="subset")
        seen, _ = env.reset(seed=4)
        wanted = set(seen["ids"][np.array(bits, bool)].tolist())
        chosen = env.step(np.array(bits, np.int8))[4]["record"]["selected"]
        assert len(chosen) == size
        assert len(wanted & set(chosen)) == inside


def test_the_target_ends_an_episode() -> None:
    easy = ClientSelection(SMALL, target=0.01)
    easy.reset(seed=0)
    assert easy.step(easy.action_space.sample())[2:4] == (True, False)
    hard = ClientSelection(SMALL, target=1.0)
    hard.reset(seed=0)
    ends = [hard.step(hard.action_space.sample())[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]


def test_the_target_can_be_read_off_the_proxy_set() -> None:
    env = ClientSelection({**SMALL, "rounds": 50}, target=0.25, target_on="proxy")
    env.reset(seed=0)
    over = False
    while not over:
        _, _, over, _, info = env.step(env.action_space.sample())
        assert over == (info["score"] >= 0.25)


def test_a_seed_changes_what_it_should() -> None:
    def facts(env: ClientSelection, seed: int) -> dict[str, Any]:
        env.reset(seed=seed)
        lane, world = env.stepper.world.lanes[0], env.stepper.world
        return {
            "partition": [rows.tolist() for rows in lane.population.rows],
            "visibility": [lane.visibility.visible(lane.seed, t).tolist() for t in range(9)],
            "model": world.states[0].tolist(),
        }

    for vary in ((), ("partition",), ("visibility", "model"), ("partition", "visibility", "model")):
        env = ClientSelection(SMALL, vary=vary)
        one, other = facts(env, 1), facts(env, 2)
        assert {name for name in one if one[name] != other[name]} == set(vary)


def test_a_reset_without_a_seed_goes_on_from_the_last_one() -> None:
    def seeds() -> list[int]:
        env = ClientSelection({**SMALL, "seeds": [9]})
        given = [None, None, 5, None, None, 5]
        return [env.reset(seed=seed)[1]["seed"] for seed in given]

    found = seeds()
    assert found == seeds()
    assert (found[0], found[2], found[5]) == (9, 5, 5)
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"action": "score"}, "action='score'"),
        ({"reward": "f1"}, "reward='f1'"),
        ({"reports": ("proxy_logits",)}, "proxy_logits"),
        ({"reports": ("los",)}, "'loss'"),
        ({"target": 80.0}, "target=80.0"),
        ({"target_on": "train"}, "target_on='train'"),
        ({"vary": ("data",)}, "vary='data'"),
        ({"config": {"round": 3}}, "'round'"),
        ({"config": {"method": "sequential"}}, "sequential"),
    ],
)
def test_mistakes_are_named(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ClientSelection(**words).reset()


def test_a_bad_action_is_named() -> None:
    env = ClientSelection(SMALL)
    with pytest.raises(UserError, match="call reset"):
        env.step(np.zeros(4))
    env.reset(seed=0)
    with pytest.raises(UserError, match="NaN"):
        env.step(np.array([0, np.nan, 0, 0]))
    with pytest.raises(UserError, match="3 entries"):
        env.step(np.zeros(3))
