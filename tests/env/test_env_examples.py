"""The worked examples run, the long one stays within its time, and its table is the stored one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import env.gym_parts  # noqa: F401
from env.small_env import SMALL
from fedglimpse.env import ClientSelection

ROOT = Path(__file__).parents[2]


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_your_own_agent_trains() -> None:
    means = loaded("train_an_agent").main(episodes=2)
    assert len(means) == 2
    assert all(0 < mean < 1 for mean in means)


def test_lanes_for_sb3_end_as_sb3_expects() -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    from fedglimpse.env import FlatBox, LanesForSB3

    config: dict[str, Any] = {**SMALL, "rounds": 2, "engine.trainer": "serial"}
    lanes = LanesForSB3(2, config=config)
    single = FlatBox(ClientSelection(config))
    lanes.seed(6)
    observation = lanes.reset()
    assert (observation[1] == single.reset(seed=7)[0]).all()
    actions = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    _, rewards, done, _ = lanes.step(actions)
    assert rewards[1] == np.float32(single.step(actions[1])[1])
    assert not done.any()
    observation, rewards, done, infos = lanes.step(actions)
    last_observation, reward, *_ = single.step(actions[1])
    assert done.all()
    assert rewards[1] == np.float32(reward)
    assert (infos[1]["terminal_observation"] == last_observation).all()
    assert infos[1]["TimeLimit.truncated"]
    assert infos[1]["record"]["round"] == 1
    assert (observation[1] == single.reset()[0]).all()


def test_ppo_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    example = loaded("sb3_ppo")
    monkeypatch.setattr(example, "LANES", 2)
    monkeypatch.setattr(example, "ROUNDS", 3)
    monkeypatch.setitem(example.CONFIG, "rounds", 3)
    monkeypatch.setitem(example.CONFIG, "evaluate.every", 3)
    results = example.main(steps=48, episodes=2)
    assert [point["steps"] for point in results["curve"]] == [24, 48]
    assert 0 < results["ppo"]["reward"] < 1


@pytest.mark.slow
def test_ppo_takes_less_than_three_minutes_of_one_core() -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    results = loaded("sb3_ppo").main()
    assert results["cpu_seconds"] < 180
    assert results["curve"][-1]["reward"] > 0.3


def test_the_table_of_the_tutorial_is_the_stored_one() -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    stored = json.loads((ROOT / "benchmarks" / "results" / "sb3_ppo.json").read_text())
    table = f"<!-- ppo:begin -->\n{loaded('sb3_ppo').table(stored)}\n<!-- ppo:end -->"
    page = ROOT / "docs" / "tutorials" / "train-your-own-agent.md"
    assert table in page.read_text()
