"""One federation of real processes, and everything that can go wrong, one after the other."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from flower_faults import faulty_app
from flower_processes import Cluster, records_of, slowness, wait_for
from flower_schema import check_run_folder

GOOD, NAN, MUTE, SLOW = ("site-0", "site-1", "site-5"), "site-2", "site-3", "site-4"
ROUNDS = 6


class Supervisor(threading.Thread):
    """Starts a node again until the SuperLink takes it back, as systemd would."""

    def __init__(self, cluster: Cluster, name: str, **config: object) -> None:
        super().__init__(daemon=True)
        self.cluster, self.node, self.config = cluster, name, config
        self.attempts, self.stopped = 0, False
        self.start()

    def run(self) -> None:
        while not (self.stopped or self.cluster.closed):
            self.attempts += 1
            process = self.cluster.start_node(self.node, **self.config)
            while process.poll() is None and not self.stopped:
                time.sleep(0.2)
            time.sleep(2)


@pytest.mark.slow
def test_a_federation_goes_on_whatever_happens(tmp_path: Path) -> None:
    out, marks, slow = tmp_path / "run", tmp_path / "marks", slowness()
    app = faulty_app(tmp_path / "app", marks)
    settings = {
        "out": str(out),
        "fedglimpse__rounds": ROUNDS,
        "fedglimpse__data__clients": 6,
        "fedglimpse__selection__k": 2,
        "fedglimpse__visibility__kind": "full",
        "terms__hello_timeout": 60.0 * slow,
        "terms__train_timeout": 50.0 * slow,
        "terms__upload_timeout": 25.0 * slow,
        "terms__quorum": 0.2,
    }
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start_link()
        for name in (*GOOD, NAN, MUTE, SLOW):
            cluster.register(name)
        for name in GOOD:
            cluster.start_node(name, partition_id=int(name[-1]))
        cluster.start_node(NAN, partition_id=2, fault="nan")
        cluster.start_node(MUTE, partition_id=3, fault="mute")
        cluster.start_node(SLOW, partition_id=4, fault="slow")
        cluster.submit(app, **settings)

        # killed during training, in round 1; it comes back under the same key
        wait_for("training of the slow client", (marks / "training-4").exists, 300 * slow)
        cluster.kill_node(SLOW)
        back = Supervisor(cluster, SLOW, partition_id=4)

        # killed between the phases of round 2, after it was chosen
        wait_for("choice of round 2", (marks / "chosen").exists, 180 * slow)
        victim = (marks / "chosen").read_text().split()[0].removeprefix("name:")
        assert victim in (*GOOD, SLOW)
        cluster.kill_node(victim)
        (marks / "go").touch()

        # the server is killed in the middle of round 3, and started again
        wait_for("end of round 2", lambda: len(records_of(out)) >= 3, 120 * slow)
        time.sleep(3)
        os.kill(int((marks / "server").read_text()), signal.SIGKILL)
        before = records_of(out)
        cluster.submit(app, **settings)
        wait_for("end of the run", (out / "summary.json").exists, 300 * slow)
        back.stopped = True

    records = check_run_folder(out)  # every round once
    assert records[: len(before)] == before
    names = json.loads((out / "clients.json").read_text())
    assert names == [f"name:site-{i}" for i in range(6)]
    lost = int(victim[-1])
    used = [c for r in records for c in r["selected"]]
    assert 3 in records[0]["visible"]  # the mute one was asked once ...
    assert records[0]["failed"]["3"] == "no answer"
    assert all(3 not in r["visible"] for r in records[1:3])  # ... and not while it owes a reply
    assert all(r["rejected"] == [2] for r in records if 2 in r["visible"])  # NaN, every time
    assert sum(2 in r["visible"] for r in records) >= 3
    assert {2, 3}.isdisjoint(used)
    assert records[1]["failed"]["4"] in ("no answer", "node lost")
    assert str(lost) in records[2]["failed"]
    assert lost not in records[2]["selected"]
    assert len(records[2]["selected"]) >= 1
    assert any(4 in r["visible"] and "4" not in r["failed"] for r in records[2:])  # it is back
    state = torch.load(out / "checkpoint.pt", weights_only=True)["federation"]["state"]
    assert state.isfinite().all()
    assert records[-1]["accuracy"] > records[0]["accuracy"] > 0.1
    print("seconds a round", [round(r["seconds"], 1) for r in records], "attempts", back.attempts)
