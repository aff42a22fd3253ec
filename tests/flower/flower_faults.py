"""An app whose clients fail on demand, and whose server can be held between its phases."""

from __future__ import annotations

from pathlib import Path

from flower_processes import copy_app

CLIENT = '''
import time
from pathlib import Path

import torch
from task import make_model, my_data

from fedglimpse.flower.client import client_app, local_training

plain = local_training(my_data)


def train(model, settings):
    """Train, with the fault that the node's configuration names."""
    fault, folder = settings.get("fault", ""), Path(settings["marks"])
    if fault == "mute":
        time.sleep(3600)
    if fault == "slow" and settings["round"] == 1:
        (folder / f"training-{settings['partition-id']}").touch()
        time.sleep(3600)
    metrics = plain(model, settings)
    if fault == "nan":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    return metrics


app = client_app(make_model, train, my_data)
'''

SERVER = '''
import os
import time
from dataclasses import asdict
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.serverapp import ServerApp
from task import make_model, server_data

from fedglimpse.flower import round as rounds
from fedglimpse.flower.strategy import GlimpseStrategy, Problem, from_run_config

app = ServerApp()
marks = Path({marks!r})


def held(self, view, choice, ready, collect=rounds.Round._collect):
    """Tell who is chosen, and in round 2 wait until the test has done its deed."""
    chosen = view.ids[choice.slots].tolist()
    if self.num == 2 and not (marks / "go").exists():
        names = [self.fed.roster.names[c] for c in chosen]
        (marks / "chosen.part").write_text(" ".join(names))
        (marks / "chosen.part").rename(marks / "chosen")
        end = time.monotonic() + 60
        while not (marks / "go").exists() and time.monotonic() < end:
            time.sleep(0.1)
    return collect(self, view, choice, ready)


rounds.Round._collect = held


@app.main()
def main(grid, context):
    (marks / "server").write_text(str(os.getpid()))
    config, terms, out = from_run_config(context.run_config)
    strategy = GlimpseStrategy(config, Problem(make_model, **server_data(config)), terms, out)
    told = {{f"data.{{name}}": value for name, value in asdict(config.data).items()}}
    told |= {{"seed": config.seeds[0], "marks": str(marks)}}
    strategy.start(grid=grid, train_config=ConfigRecord(told))
'''


def faulty_app(to: Path, marks: Path) -> Path:
    """Write the app; what happens is told by files in `marks`."""
    marks.mkdir()
    return copy_app(to, CLIENT, SERVER.format(marks=str(marks)))
