"""The worked examples run, and the long one stays within its time."""

from __future__ import annotations

import importlib.util
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


def test_lanes_for_sb3_end_as_sb3_wants_it() -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    from fedglimpse.env import FlatBox, LanesForSB3

    config: dict[str, Any] = {**SMALL, "rounds": 2, "engine.trainer": "serial"}
    lanes, alone = LanesForSB3(2, config=config), FlatBox(ClientSelection(config))
    lanes.seed(6)
    seen = lanes.reset()
    assert (seen[1] == alone.reset(seed=7)[0]).all()
    moves = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    _, rewards, over, _ = lanes.step(moves)
    assert rewards[1] == np.float32(alone.step(moves[1])[1])
    assert not over.any()
    seen, rewards, over, infos = lanes.step(moves)
    last, reward, *_ = alone.step(moves[1])
    assert over.all()
    assert rewards[1] == np.float32(reward)
    assert (infos[1]["terminal_observation"] == last).all()
    assert infos[1]["TimeLimit.truncated"]
    assert infos[1]["record"]["round"] == 1
    assert (seen[1] == alone.reset()[0]).all()


def test_ppo_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    example = loaded("sb3_ppo")
    monkeypatch.setattr(example, "LANES", 2)
    monkeypatch.setattr(example, "ROUNDS", 3)
    monkeypatch.setitem(example.CONFIG, "rounds", 3)
    monkeypatch.setitem(example.CONFIG, "evaluate.every", 3)
    found = example.main(steps=48, episodes=2)
    assert [point["steps"] for point in found["curve"]] == [24, 48]
    assert 0 < found["ppo"]["reward"] < 1


@pytest.mark.slow
def test_ppo_takes_less_than_three_minutes_of_one_core() -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    found = loaded("sb3_ppo").main()
    assert found["cpu_seconds"] < 180
    assert found["curve"][-1]["reward"] > 0.3
