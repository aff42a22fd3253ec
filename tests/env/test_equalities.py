"""The library's own methods, driven through the environment, give the records of a run."""

from __future__ import annotations

from typing import Any

import pytest

import env.gym_parts  # noqa: F401
from env.small_env import RAGGED, SMALL
from fedglimpse.env import ClientSelection, SelectorPolicy
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
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
    return registry.build(name, setting).selector


def episode(env: ClientSelection, name: str, seed: int) -> list[dict[str, Any]]:
    """Play one episode; the records hold what the selector has to say, as in a run."""
    seen, info = env.reset(seed=seed)
    policy = SelectorPolicy(selector_of(name, env, seed), env.stepper.settings, env.shape)
    records, over = [], False
    while not over:
        action = policy.act(seen, info)
        said = {} if policy.choice is None else dict(policy.choice.info)
        seen, _, terminated, truncated, info = env.step(action)
        over = terminated or truncated
        metrics = dict(policy.learn(info))
        flops = info["record"]["server_flops"] + int(metrics.pop("server_flops", 0))
        records.append({**info["record"], **said, **metrics, "server_flops": flops})
    return records


def records_of(config: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    records = run({**config, "seeds": [seed]}).records
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("config", [SMALL, RAGGED], ids=["clusters", "ragged"])
def test_a_random_policy_is_fedavg_window(config: dict[str, Any], seed: int) -> None:
    config = {**config, "evaluate.every": 2}
    env = ClientSelection(config, reports=())
    assert episode(env, "fedavg-window", seed) == records_of(config, seed)


def test_a_random_policy_that_sees_sketches_only_costs_more() -> None:
    free = {"train_loss", "uplink_bytes", "downlink_bytes", "client_flops", "server_flops"}
    ours = episode(ClientSelection(SMALL), "fedavg-window", 3)
    for one, other in zip(ours, records_of(SMALL, 3), strict=True):
        assert {k: v for k, v in one.items() if k not in free} == {
            k: v for k, v in other.items() if k not in free
        }
        assert one["client_flops"] > other["client_flops"]


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
    ours = episode(ClientSelection(config), "glimpse", 5)
    assert ours == records_of(config, 5)
    assert any("td_loss" in record for record in ours)


def test_glimpse_passes_rounds_in_which_nobody_can_be_chosen() -> None:
    config = {**RAGGED, "method": "glimpse", "rounds": 12, "agent.d_token": 8}
    ours = episode(ClientSelection(config), "glimpse", 1)
    assert ours == records_of(config, 1)
    assert any(not record["selected"] for record in ours)
    assert len({len(record["visible"]) for record in ours}) > 2
