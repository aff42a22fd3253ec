"""A user's own partition, `data.partition=pkg.mod:function`, as a user would write and run it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import fedglimpse
from fedglimpse import run
from fedglimpse.config.loading import resolve
from fedglimpse.errors import UserError
from fedglimpse.runs.build import build_world
from fedglimpse.runs.experiment import Stopped
from mistakes import mistake

ROOT = Path(__file__).parents[2]
CODE = """
import numpy as np
import torch


def halves(labels, num_clients, generator, data):
    '''Low classes for the first half of the clients, high ones for the second.'''
    order = torch.randperm(len(labels), generator=generator)
    by_label = order[labels[order].argsort(stable=True)]
    return torch.tensor_split(by_label, num_clients)


def arrays(labels, num_clients, generator, data):
    draw = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    return np.array_split(draw.permutation(len(labels))[:600], num_clients)


def lists(labels, num_clients, generator, data):
    return [list(range(i, 10 * num_clients, num_clients)) for i in range(num_clients)]


def with_change(change):
    def function(labels, num_clients, generator, data):
        clients = lists(labels, num_clients, generator, data)
        change(clients, len(labels))
        return clients
    return function


too_high = with_change(lambda clients, rows: clients[3].append(rows))
negative = with_change(lambda clients, rows: clients[3].append(-1))
shared = with_change(lambda clients, rows: clients[3].append(clients[4][0]))
twice = with_change(lambda clients, rows: clients[3].append(clients[3][0]))
no_rows = with_change(lambda clients, rows: clients[3].clear())
fewer = with_change(lambda clients, rows: clients.pop())
fractions = with_change(lambda clients, rows: clients.__setitem__(3, [1.0, 2.0]))
mask = with_change(lambda clients, rows: clients.__setitem__(3, [True] * rows))
words = with_change(lambda clients, rows: clients.__setitem__(3, "abc"))
nested = with_change(lambda clients, rows: clients.__setitem__(3, [[1, 2], [3, 4]]))
nothing = lambda labels, num_clients, generator, data: None
nobody = lambda labels, num_clients, generator, data: []
raises = lambda labels, num_clients, generator, data: {}["clients"]
three = lambda labels, num_clients, generator: None


def unseeded(labels, num_clients, generator, data):
    return torch.tensor_split(torch.randperm(len(labels)), num_clients)
"""
SMALL: dict[str, Any] = {
    "data.name": "digits", "data.clients": 12, "rounds": 3, "visibility.cluster_size": 4,
    "selection.k": 2,
}  # fmt: skip
WORDS = [f"{key}={value}" for key, value in SMALL.items()]
WRONG = (
    "too_high", "negative", "shared", "twice", "no_rows", "fewer", "fractions", "mask", "words",
    "nested", "nothing", "nobody", "raises", "three", "unseeded", "no_such",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_partition", raising=False)
    (tmp_path / "own_partition.py").write_text(CODE)
    importlib.invalidate_caches()
    return tmp_path


def clients_of(partition: str, seed: int = 0) -> list[list[int]]:
    config = resolve({**SMALL, "data.partition": partition, "seeds": [seed]})
    population = build_world(config).lanes[0].population
    return [rows.tolist() for rows in population.rows]


def test_it_runs_on_the_command_line_and_is_reported(folder: Path) -> None:
    done = fedglimpse("run", *WORDS, "data.partition=own_partition:halves", "-q", "--out", "a")
    assert done.returncode == 0, done.stderr
    environment = json.loads((folder / "a" / "environment.json").read_text())
    assert len(environment["own_code"]["own_partition"]) == 64
    done = fedglimpse("report", "a")
    assert done.returncode == 0, done.stderr
    assert "own_partition:halves" in (folder / "a" / "report" / "report.html").read_text()


@pytest.mark.parametrize("name", ["halves", "arrays", "lists"])
def test_rows_are_those_that_the_function_returned(folder: Path, name: str) -> None:
    clients = clients_of(f"own_partition:{name}")
    rows = [row for rows_of_client in clients for row in rows_of_client]
    assert len(clients) == 12
    assert len(set(rows)) == len(rows) > 0
    assert clients_of(f"own_partition:{name}") == clients
    if name != "lists":
        assert clients_of(f"own_partition:{name}", seed=1) != clients
    assert run({**SMALL, "data.partition": f"own_partition:{name}"}).records


def test_the_rows_of_the_server_are_no_clients(folder: Path) -> None:
    config = resolve({**SMALL, "data.partition": "own_partition:halves"})
    population = build_world(config).lanes[0].population
    held = {row for rows in population.rows for row in rows.tolist()}
    assert not held & set(population.proxy.tolist())
    low, high = population.label_histogram(torch.arange(12))[[0, 11]]
    assert low[:5].sum() == low.sum()
    assert high[5:].sum() == high.sum()


def test_the_example_of_the_page_works(folder: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    code = page.partition("### Your own partition")[2].partition("```python\n")[2]
    (folder / "my_split.py").write_text(code.partition("```")[0])
    clients = clients_of("my_split:neighbours")
    assert [len(rows) for rows in clients] == [108] * 10 + [107] * 2


@pytest.mark.parametrize("name", WRONG)
def test_every_mistake_is_one_sentence_about_the_setting(folder: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        run({**SMALL, "data.partition": f"own_partition:{name}"}, "out")
    assert caught.value.key == "data.partition"
    assert f"data.partition=own_partition:{name}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not (folder / "out").exists()


def test_the_command_refuses_a_mistake_with_exit_code_2(folder: Path) -> None:
    done = fedglimpse("run", *WORDS, "data.partition=own_partition:shared", "--out", "bad")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (folder / "bad").exists()


def test_clients_cannot_draw_from_it(folder: Path) -> None:
    with mistake("data.partition"):
        run({**SMALL, "data.partition": "own_partition:halves", "data.samples": 5})


def test_a_run_is_not_resumed_with_other_code(folder: Path) -> None:
    config = {**SMALL, "data.partition": "own_partition:halves", "checkpoint.every": 1}
    with pytest.raises(Stopped):
        run(config, "a", should_stop=lambda: True)
    (folder / "own_partition.py").write_text(CODE.replace("stable=True", "stable=False"))
    done = fedglimpse("run", "--out", "a", "--resume", "-q")
    assert done.returncode == 2
    assert "own_partition.py" in done.stderr
    (folder / "own_partition.py").write_text(CODE)
    assert fedglimpse("run", "--out", "a", "--resume", "-q").returncode == 0
    assert len((folder / "a" / "rounds.jsonl").read_text().splitlines()) == 3
