"""What the errors of client models say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedglimpse.errors import UserError
from fedglimpse.federation.models import build_model


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n"
        "def tiny():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "def wrong():\n    return 3\n"
        "number = 3\n"
        "def asks(width):\n    return nn.Linear(width, 10)\n"
        "def breaks():\n    return nn.Linear(64, 10) / 0\n"
        "def bare():\n    return nn.Flatten()\n"
        "class Pair(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.dense = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        y = self.dense(x.flatten(1))\n"
        "        return y, y\n"
        "class Lost(Pair):\n"
        "    def forward(self, x):\n"
        "        return self.missing(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return "own_nets"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("own_nets:missing", "has no function 'missing'"),
        (":f", "cannot be imported"),
        ("own_nets:number", "has no function 'number'"),
        ("own_nets:wrong", "returned int"),
        ("own_nets:asks", "takes (width), but is called with no arguments"),
        ("own_nets:breaks", "model.name=own_nets:breaks failed: TypeError"),
        ("own_nets:breaks", "(own_nets.py:10)"),
        ("own_nets:bare", "'own_nets:bare' has no parameters to train"),
        ("own_nets:Pair", "gives a tuple, not a tensor of scores"),
        ("own_nets:Lost", "has no attribute 'missing'"),
        ("cifar", "Did you mean 'cifar10'"),
    ],
)
def test_bad_names_are_user_errors(own_module: str, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        build_model(name, "batch", (1, 8, 8), 10)
    assert message in str(caught.value)


def test_misfits_are_user_errors(own_module: str) -> None:
    with pytest.raises(UserError, match="does not take examples of shape"):
        build_model("cifar10", "batch", (1, 28, 28), 10)
    with pytest.raises(UserError, match="end it with a layer of width 5"):
        build_model(f"{own_module}:tiny", "batch", (1, 8, 8), 5)
