"""An app whose clients fail on demand, and whose server tells the test how far it is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
from flower_processes import Cluster, copy_app

from fedglimpse.federation.state import Layout
from fedglimpse.flower.deployment import Problem, fresh_model
from fedglimpse.runs.folder import stored_config
from fedglimpse.simulation.evaluation import Evaluator

CLIENT = '''
import time
from pathlib import Path

import numpy as np
from flwr.app import Array
from task import make_model, my_data

from fedglimpse.flower import client
from fedglimpse.flower.client import client_app, local_training

plain, upload = local_training(my_data), client._Client.upload


def train(model, settings):
    """Train; from round 1 on, with the fault that the node's configuration names."""
    fault, number = settings.get("fault", ""), settings["round"]
    if number > 0:
        mark = Path(settings["marks"]) / f"training-{number}-{settings['partition-id']}"
        mark.touch()
        if fault in ("mute", "slow"):
            time.sleep(3600)
    return plain(model, settings)


def poisoned(self, message, context):
    """Upload; a node with the fault "nan" sends other weights than it has sketched."""
    reply = upload(self, message, context)
    if context.node_config.get("fault") == "nan":
        arrays = reply.array_records["arrays"]
        arrays["state"] = Array(np.full_like(arrays["state"].numpy(), np.nan))
    return reply


client._Client.upload = poisoned
app = client_app(make_model, train, my_data)
'''

SERVER = '''
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.serverapp import ServerApp
from task import make_model, server_data

from fedglimpse.flower import round as rounds
from fedglimpse.flower.strategy import GlimpseStrategy, Problem, from_run_config

app = ServerApp()
marks = Path({marks!r})


def timed(self, observe=rounds.DeviceRound._observe):
    """Measure the first phase of round 0; later phases get four times as long."""
    if self.round_num == 0:
        began = time.monotonic()
        result = observe(self)
        (marks / "phase").write_text(str(time.monotonic() - began))
        return result
    limit = max(30.0, 4 * float((marks / "phase").read_text()))
    deployment = self.deployment
    deployment.terms = replace(deployment.terms, train_timeout=limit, upload_timeout=limit)
    return observe(self)


def held(self, view, choice, updates, collect=rounds.DeviceRound._collect):
    """In round 1 tell who is chosen, and wait until the test has done its deed."""
    if self.round_num == 1 and (marks / "hold").exists():
        clients = self.deployment.clients
        names = [clients.names[c] for c in view.ids[choice.slots].tolist()]
        (marks / "chosen.part").write_text(" ".join(names))
        (marks / "chosen.part").rename(marks / "chosen")
        end = time.monotonic() + 60
        while (marks / "hold").exists() and time.monotonic() < end:
            time.sleep(0.1)
    return collect(self, view, choice, updates)


rounds.DeviceRound._observe, rounds.DeviceRound._collect = timed, held


@app.main()
def main(grid, context):
    (marks / "server").write_text(str(os.getpid()))
    config, terms, out = from_run_config(context.run_config)
    strategy = GlimpseStrategy(config, Problem(make_model, **server_data(config)), terms, out)
    user_settings = {{f"data.{{name}}": value for name, value in asdict(config.data).items()}}
    user_settings |= {{"seed": config.seeds[0], "marks": str(marks)}}
    strategy.start(grid=grid, train_config=ConfigRecord(user_settings))
'''


def faulty_app(to: Path, marks: Path) -> Path:
    """Write the app; files in `marks` record what happens."""
    marks.mkdir()
    return copy_app(to, CLIENT, SERVER.format(marks=str(marks)))


class Supervisor(threading.Thread):
    """Starts a node again until the SuperLink takes it back, as systemd would."""

    def __init__(self, cluster: Cluster, name: str, **config: object) -> None:
        super().__init__(daemon=True)
        self.cluster, self.node, self.config = cluster, name, config
        self.stopped = False
        self.start()

    def run(self) -> None:
        while not (self.stopped or self.cluster.closed):
            process = self.cluster.start_node(self.node, **self.config)
            while process.poll() is None and not self.stopped:
                time.sleep(0.2)
            time.sleep(2)


def check_model(out: Path) -> None:
    """Assert that the final model is finite and better than the one that the run began with."""
    import task  # of the example app

    config = stored_config(out)
    problem = Problem(task.make_model, **task.server_data(config))
    model = fresh_model(config, problem)
    start = Layout.of(model).read(model)
    end = torch.load(out / "checkpoint.pt", weights_only=True)["federation"]["state"]
    assert end.isfinite().all()
    assert problem.test is not None
    evaluator = Evaluator(model, problem.num_classes)
    before, after = (evaluator.score(state, *problem.test) for state in (start, end))
    assert after.accuracy > before.accuracy + 0.2
    assert after.loss < before.loss
