"""What the errors of visibility patterns say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedglimpse.errors import UserError
from fedglimpse.federation.visibility import VisibilityConfig, build_visibility

WRONG = """
import numpy as np
import torch


class Unrepeatable:
    def __init__(self, num_clients, settings):
        self.num_clients = num_clients
        self.source = np.random.default_rng(0)

    def visible(self, seed, round_num):
        return np.sort(self.source.permutation(self.num_clients)[:4])


class Shows:
    def __init__(self, ids):
        self.ids = ids

    def visible(self, seed, round_num):
        return self.ids


def no_clients(num_clients, settings): return Shows([])
def too_large(num_clients, settings): return Shows([0, 5, num_clients])
def negative(num_clients, settings): return Shows([-1, 5, 6])
def unsorted(num_clients, settings): return Shows([3, 5, 4])
def repeated(num_clients, settings): return Shows([3, 4, 4, 5])
def fractions(num_clients, settings): return Shows([0.0, 1.0])
def a_mask(num_clients, settings): return Shows(torch.ones(num_clients, dtype=torch.bool))
def a_matrix(num_clients, settings): return Shows([[1, 2], [3, 4]])
def nothing(num_clients, settings): return Shows(None)
def words(num_clients, settings): return Shows(["a", "b"])
def no_pattern(num_clients, settings): return [1, 2, 3]
def too_few_arguments(num_clients): return Shows([1, 2])
def fails(num_clients, settings): return 1 / 0
"""


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("no_clients", "showed no client in round 0 of seed 0"),
        ("too_large", "showed ids from 0 to 12 "),
        ("negative", "showed ids from -1 to 6 "),
        ("unsorted", "not sorted"),
        ("repeated", "appear twice"),
        ("fractions", "no list of whole numbers"),
        ("a_mask", "no list of whole numbers"),
        ("a_matrix", "no list of whole numbers"),
        ("nothing", "NoneType that is no list"),
        ("words", "no list of whole numbers"),
        ("no_pattern", "returned list, which has no method visible"),
        ("too_few_arguments", "takes (num_clients), but is called with"),
        ("fails", "ZeroDivisionError"),
        ("Unrepeatable", "showed other clients when asked again"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_a_wrong_plugin_is_one_sentence(
    factory: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_visibility", raising=False)
    Path("own_visibility.py").write_text(WRONG)
    kind = f"own_visibility:{factory}"
    with pytest.raises(UserError) as caught:
        build_visibility(VisibilityConfig(kind=kind), 12).visible(0, 0)
    assert f"visibility.kind={kind}" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("device,ready_start_s\n1,2\n", "line 1: no column 'ready_end_s'"),
        ("device,ready_start_s,ready_end_s\n1,2,3\n1,x,3\n", "line 3: ready_start_s='x'"),
        ("device,ready_start_s,ready_end_s\n1,2,nan\n", "line 2: ready_end_s='nan'"),
        ("device,ready_start_s,ready_end_s\n1,2\n", "line 2: ready_end_s=None"),
        ("device,ready_start_s,ready_end_s\n1,5,3\n", "line 2: ready_end_s=3 is before"),
        ("device,ready_start_s,ready_end_s\n", "trace.csv holds no sessions"),
        ("", "line 1: no column 'device'"),
        ("device,ready_start_s,ready_end_s\n,1,2\n", "line 2: there is no device"),
        ("ready_start_s,ready_end_s,device\n1,2\n", "line 2: there is no device"),
        ("device,ready_start_s,ready_end_s\n1,-1e308,1e308\n", "line 2: ready_start_s='-1e308'"),
    ],
)
def test_a_bad_trace_names_the_line(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        build_visibility(VisibilityConfig(kind="trace", trace=str(path)), 5)
    assert caught.value.key == "visibility.trace"
    assert place in str(caught.value)
