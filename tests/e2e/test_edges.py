"""A user's code at its edges ends in one sentence and exit code 2, never in a traceback or a 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import fedglimpse
from fedglimpse.config.loading import resolve
from fedglimpse.runs.experiment import run
from mistakes import mistake

SIZES = ["rounds=3", "data.clients=8", "visibility.cluster_size=4", "selection.k=2"]
CODE = """
import dataclasses
import sys

import torch
from torch import nn

import fedglimpse
from fedglimpse.data.sources import load

CHANGES = {
    "sparse_x": lambda d: {"x_train": d.x_train.to_sparse(), "x_test": d.x_test.to_sparse()},
    "sparse_y": lambda d: {"y_train": d.y_train.to_sparse()},
    "meta_x": lambda d: {"x_train": d.x_train.to("meta"), "x_test": d.x_test.to("meta")},
    "meta_y": lambda d: {"y_train": d.y_train.to("meta")},
    "exit_data": lambda d: sys.exit(0),
}


def changed(name):
    data = load("digits")
    return dataclasses.replace(data, **CHANGES[name](data))


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(64, 10, device="meta" if kind == "meta_model" else None)
        self.sparse = nn.Parameter(torch.ones(3).to_sparse()) if kind == "sparse_model" else None
        if kind in ("nan_model", "inf_model"):
            nn.init.constant_(self.layer.weight, float(kind[:3]))
        self.requires_grad_(kind != "frozen_model")

    def forward(self, x):
        if self.kind == "exit_model":
            sys.exit(0)
        if self.kind == "no_grad_model":
            with torch.no_grad():
                return self.layer(x.flatten(1))
        scores = self.layer(x.flatten(1))
        return scores.detach() if self.kind == "detached_model" else scores


class Selector(fedglimpse.Stateless):
    def __init__(self, kind):
        self.kind = kind

    def select(self, view, k):
        slots = torch.arange(k)
        weights = None
        if self.kind == "exit_in_select":
            sys.exit(0)
        if self.kind == "generator_exit":
            raise GeneratorExit
        if self.kind == "sparse_slots":
            slots = slots.to_sparse()
        if self.kind == "meta_slots":
            slots = slots.to("meta")
        if self.kind == "sparse_weights":
            weights = torch.ones(k).to_sparse()
        if self.kind == "meta_weights":
            weights = torch.ones(k, device="meta")
        if self.kind == "complex_weights":
            weights = torch.ones(k, dtype=torch.complex64)
        return fedglimpse.Choice(slots, weights)

    def feedback(self, outcome):
        if self.kind == "exit_in_feedback":
            sys.exit(0)
        if self.kind == "sparse_log":
            return {"a": torch.ones(3).to_sparse()}
        if self.kind == "meta_log":
            return {"a": torch.ones((), device="meta")}
        return {}

    def state_dict(self):
        if self.kind == "exit_in_state":
            sys.exit(0)
        return {"a": [torch.ones(3, device="meta" if self.kind == "meta_state" else None)]}

    def load_state_dict(self, state):
        pass


class Aggregator(fedglimpse.WeightedDelta):
    def __init__(self, kind):
        self.kind = kind

    def starts(self, state, ids):
        starts = super().starts(state, ids)
        if self.kind == "sparse_starts":
            return starts.to_sparse()
        return starts.to("meta") if self.kind == "meta_starts" else starts

    def step(self, state, update):
        ones = torch.ones(len(update.weights))
        if self.kind == "exit_in_step":
            sys.exit(0)
        if self.kind == "sparse_applied":
            self.applied = ones.to_sparse()
        if self.kind == "meta_applied":
            self.applied = ones.to("meta")
        if self.kind == "nan_applied":
            self.applied = ones * float("nan")
        new_state = super().step(state, update)
        if self.kind == "sparse_step":
            return new_state.to_sparse()
        return new_state.to("meta") if self.kind == "meta_step" else new_state


def method(setting, kind):
    if kind == "exit_in_build":
        sys.exit(0)
    return fedglimpse.Method(Selector(kind), Aggregator(kind))


class Pattern:
    def __init__(self, num_clients, kind):
        self.num_clients = num_clients
        self.kind = kind

    def visible(self, seed, round_num):
        if self.kind == "exit_pattern":
            sys.exit(0)
        ids = torch.arange(self.num_clients)
        return ids.to_sparse() if self.kind == "sparse_pattern" else ids.to("meta")


def split(labels, num_clients, kind):
    if kind == "exit_split":
        sys.exit(0)
    clients = torch.arange(len(labels)).tensor_split(num_clients)
    return [rows.to_sparse() if kind == "sparse_split" else rows.to("meta") for rows in clients]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name in CHANGES:
        return lambda: changed(name)
    if name.endswith("_model"):
        return lambda: Net(name)
    if name.endswith("_pattern"):
        return lambda num_clients, settings: Pattern(num_clients, name)
    if name.endswith("_split"):
        return lambda labels, num_clients, generator, settings: split(labels, num_clients, name)
    return lambda setting: method(setting, name)
"""
CASES = {
    "data.name": ("sparse_x", "sparse_y", "meta_x", "meta_y", "exit_data"),
    "model.name": (
        "nan_model", "inf_model", "frozen_model", "no_grad_model", "detached_model", "meta_model",
        "sparse_model", "exit_model",
    ),
    "method": (
        "sparse_slots", "meta_slots", "sparse_weights", "meta_weights", "complex_weights",
        "sparse_log", "meta_log", "meta_state", "sparse_starts", "meta_starts", "sparse_step",
        "meta_step", "sparse_applied", "meta_applied", "nan_applied", "exit_in_build",
        "exit_in_select", "exit_in_feedback", "exit_in_state", "exit_in_step", "generator_exit",
    ),
    "visibility.kind": ("sparse_pattern", "meta_pattern", "exit_pattern"),
    "data.partition": ("sparse_split", "meta_split", "exit_split"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    (folder / "edge_code.py").write_text(CODE)
    return folder


@pytest.mark.parametrize(("key", "name"), [(key, name) for key in CASES for name in CASES[key]])
def test_it_ends_in_one_sentence(key: str, name: str, folder: Path, tmp_path: Path) -> None:
    words = [f"{key}=edge_code:{name}", *SIZES, "--out", str(tmp_path / "o"), "--quiet"]
    done = fedglimpse("run", *words, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "o" / "summary.json").exists()


def test_a_cell_that_ends_the_process_fails_and_the_others_go_on(
    folder: Path, tmp_path: Path
) -> None:
    file = folder / "sweep.toml"
    file.write_text(
        'title = "t"\nmethods = ["fedavg", "edge_code:exit_in_select"]\n'
        "[base]\nseeds = [0]\nrounds = 2\n[[settings]]\nname = 'a'\n"
    )
    done = fedglimpse(
        "sweep", str(file), "--out", str(tmp_path / "o"), "--workers", "1", "-q", cwd=folder
    )
    assert done.returncode == 1
    assert "1 cells done, 0 left, 1 failed" in done.stdout


@pytest.mark.parametrize("method", ["fedppo", "feddrl"])
def test_an_agent_that_diverges_is_one_sentence(method: str) -> None:
    settings: dict[str, Any] = {
        "method": method, "rounds": 12, "data.clients": 8, "visibility.cluster_size": 4,
        "selection.k": 2, "options.horizon": 2, "options.lr": 1e30,
    }  # fmt: skip
    with mistake("options.lr"):
        run(settings)


TOO_LARGE: dict[str, Callable[[], object]] = {
    "local.lr": lambda: resolve({"local.lr": 1e39}),
    "local.weight_decay": lambda: resolve({"local.weight_decay": 1e300}),
    "options.clip": lambda: run({"method": "fedppo", "options.clip": 1e39, "rounds": 1}),
}


@pytest.mark.parametrize("key", TOO_LARGE)
def test_a_number_beyond_float32_is_refused(key: str) -> None:
    with mistake(key):
        TOO_LARGE[key]()
