"""The core neither imports gymnasium nor needs it; what does need it says so."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import fedglimpse, fedglimpse.cli, fedglimpse.runs.experiment
assert "gymnasium" not in sys.modules
assert "fedglimpse.env" not in sys.modules

import importlib.machinery
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gymnasium":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "gymnasium" else real(name, *rest)

import torch
from fedglimpse.env.settings import settings_of
from fedglimpse.env.stepper import LaneStepper
config = {"data.clients": 12, "selection.k": 2, "rounds": 2, "sketch.size": 4}
stepper = LaneStepper(settings_of(config), 2)
stepper.restart({0: 3, 1: 4})
stepper.observe()
steps = stepper.step([torch.tensor([0, 1]), None])
assert len(steps[0].record["selected"]) == 2 and steps[1].record["selected"] == []
from fedglimpse.env import SelectorPolicy
try:
    from fedglimpse.env import ClientSelection
except fedglimpse.UserError as error:
    print(error)
"""


def test_the_stepper_works_without_gymnasium() -> None:
    command = [sys.executable, "-c", CODE]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "pip install 'fedglimpse[gym]'" in finished.stdout
