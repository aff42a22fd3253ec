"""Cases in which one method must be another, in whole runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedglimpse.runs.experiment import Result, run

CLIENTS = 12
VISIBLE = 4
K = 2


def play(method: str, **keys: Any) -> Result:
    small = {"data.clients": CLIENTS, "visibility.cluster_size": VISIBLE, "selection.k": K}
    uneven = {"data.equal_size": False, "data.alpha": 1.0, "data.min_size": 5}
    fixed = {"method": method, "rounds": 3, "engine.trainer": "serial", "local.epochs": 1}
    return run({**fixed, **small, **uneven, **{k.replace("__", "."): v for k, v in keys.items()}})


def model(method: str, **keys: Any) -> Tensor:
    return play(method, **keys).world.states


def test_fedprox_without_a_pull_is_fedavg() -> None:
    assert torch.equal(model("fedprox", local__proximal_mu=0.0), model("fedavg"))
    assert not torch.equal(model("fedprox", local__proximal_mu=1.0), model("fedavg"))


def test_edgeflow_is_fedavg_over_all_visible() -> None:
    everyone = model("fedavg", selection__k=VISIBLE)
    torch.testing.assert_close(model("edgeflow"), everyone)
    torch.testing.assert_close(model("ha-edgeflow", selection__k=VISIBLE), everyone)
    torch.testing.assert_close(model("ha-edgeflow", options__divisor=1), everyone)


def test_uniform_averages_agree_under_full_participation() -> None:
    full = {"visibility__kind": "full"}
    average = model("edgeflow", options__weights="uniform", **full)
    torch.testing.assert_close(model("mifa", options__everyone=True, **full), average)
    echo = model("fedawe", options__everyone=True, options__clip=0.0, **full)
    torch.testing.assert_close(echo, average)


def test_fedawac_without_history_or_difference_is_fedavg() -> None:
    flat = {"options__map": "softmax", "options__temperature": 1e9, "options__window": 1}
    torch.testing.assert_close(model("fedawac", **flat), model("fedavg"))


def test_one_stop_of_a_sequence_is_fedavg() -> None:
    assert torch.equal(model("sequential", selection__k=1), model("fedavg", selection__k=1))
    assert not torch.equal(model("sequential"), model("fedavg"))


def test_a_sequence_without_learning_goes_nowhere() -> None:
    result = play("sequential", local__lr=1e-30)
    cut = result.world.reporter.num_params
    start = play("sequential", local__lr=1e-30, rounds=1).world.states
    gone = (result.world.states - start)[:, :cut].abs().max()
    assert gone < 1e-25


def test_snake_without_blocks_and_distillation_is_sequential() -> None:
    plain = model("snake", options__blocks=False, options__distill=0.0)
    assert torch.equal(plain, model("sequential"))
    assert not torch.equal(model("snake", options__distill=0.0), plain)
    assert not torch.equal(model("snake", options__blocks=False), plain)


def test_snake_leaves_frozen_blocks_alone() -> None:
    before = play("snake", selection__k=1, rounds=1)
    after = play("snake", selection__k=1, rounds=2)
    layout = before.world.evaluator.layout
    moved = {
        entry.name.split(".")[0]
        for entry in layout.entries
        if not torch.equal(
            before.world.states[0, entry.start : entry.stop],
            after.world.states[0, entry.start : entry.stop],
        )
    }
    assert 0 < len(moved) < len({entry.name.split(".")[0] for entry in layout.entries})
