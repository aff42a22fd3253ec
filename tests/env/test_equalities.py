"""The library's own methods, driven through the environment, give the records of a run."""

from __future__ import annotations

from typing import Any

import pytest

import env.gym_parts  # noqa: F401
from env.small_env import RAGGED, SMALL
from fedglimpse.env import ClientSelection, SelectorPolicy
from fedglimpse.methods.base import Setting
from fedglimpse.methods.build import build_method
from fedglimpse.runs.experiment import run
from fedglimpse.types import Selector


def selector_of(name: str, env: ClientSelection, seed: int) -> Selector:
    """Build a method's selector as a run builds it."""
    lane = env.stepper.world.lanes[0]
    setting = Setting(
        config=env.stepper.settings.config,
        seed=seed,
        sizes=lane.population.sizes,
        num_classes=env.shape.classes,
        num_params=env.stepper.world.reporter.num_params,
    )
    return build_method(name, setting).selector


def episode(env: ClientSelection, name: str, seed: int) -> list[dict[str, Any]]:
    """Run one episode; the records hold what the selector adds to them, as in a run."""
    observation, info = env.reset(seed=seed)
    policy = SelectorPolicy(selector_of(name, env, seed), env.stepper.settings, env.shape)
    records = []
    done = False
    while not done:
        action = policy.act(observation, info)
        of_choice = {} if policy.choice is None else policy.choice.info
        observation, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated
        metrics = dict(policy.learn(info))
        flops = info["record"]["server_flops"] + int(metrics.pop("server_flops", 0))
        records.append({**info["record"], **of_choice, **metrics, "server_flops": flops})
    return records


def records_of(config: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    records = run({**config, "seeds": [seed]}).records
    return [without(record, {"seconds"}) for record in records]


def without(record: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("config", [SMALL, RAGGED], ids=["clusters", "ragged"])
def test_a_random_policy_is_fedavg_window(config: dict[str, Any], seed: int) -> None:
    config = {**config, "evaluate.every": 2}
    env = ClientSelection(config, reports=())
    assert episode(env, "fedavg-window", seed) == records_of(config, seed)


def test_a_random_policy_that_sees_sketches_only_costs_more() -> None:
    costs = {"train_loss", "uplink_bytes", "downlink_bytes", "client_flops", "server_flops"}
    of_episode = episode(ClientSelection(SMALL), "fedavg-window", 3)
    for with_sketches, of_run in zip(of_episode, records_of(SMALL, 3), strict=True):
        assert without(with_sketches, costs) == without(of_run, costs)
        assert with_sketches["client_flops"] > of_run["client_flops"]


@pytest.mark.parametrize("preset", ["tuned", "tuned-1", "paper", "released"])
def test_glimpse_in_the_environment_is_glimpse(preset: str) -> None:
    config = {
        **SMALL,
        "method": "glimpse",
        "preset": preset,
        "rounds": 14,
        "agent.learn_start": 2,
        "agent.batch_size": 2,
        "agent.n_step": 2,
        "agent.d_token": 8,
        "agent.epsilon_decay": 0.1,
    }
    records = episode(ClientSelection(config), "glimpse", 5)
    assert records == records_of(config, 5)
    assert any("td_loss" in record for record in records)


def test_glimpse_passes_rounds_in_which_nobody_can_be_chosen() -> None:
    config = {**RAGGED, "method": "glimpse", "rounds": 12, "agent.d_token": 8}
    records = episode(ClientSelection(config), "glimpse", 1)
    assert records == records_of(config, 1)
    assert any(not record["selected"] for record in records)
    assert len({len(record["visible"]) for record in records}) > 2
