"""Federations of real processes, and what can go wrong with them.

Every test begins with a round in which all goes well: it says how long the timeouts must be on this
machine.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from faulty_clients import Supervisor, check_model, faulty_app
from flower_processes import APP, Cluster, records_of, wait_for
from run_folder_schema import check_run_folder

LONG = 600  # seconds; nothing takes as long unless it hangs


def settings_of(out: Path, clients: int, **more: Any) -> dict[str, Any]:
    return {
        "out": str(out),
        "fedglimpse__rounds": 4,
        "fedglimpse__data__clients": clients,
        "fedglimpse__data__partition": "iid",
        "fedglimpse__visibility__kind": "full",
        "terms__hello_timeout": float(LONG),
        "terms__train_timeout": float(LONG),
        "terms__upload_timeout": float(LONG),
        "terms__quorum": 0.2,
        "terms__patience": 100.0,
        **more,
    }


@pytest.mark.slow
@pytest.mark.processes
def test_one_is_killed_in_training_and_returns_one_never_answers_one_sends_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, marks = tmp_path / "run", tmp_path / "marks"
    app = faulty_app(tmp_path / "app", marks)
    faults = {2: "nan", 3: "mute", 4: "slow"}
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start_link()
        cluster.register(*(f"site-{i}" for i in range(5)))
        for i in range(5):
            cluster.start_node(f"site-{i}", partition_id=i, fault=faults.get(i, ""))
        # k is such that the poisoned one is chosen; a round waits for the killed one's return
        counts = {"fedglimpse__selection__k": 4, "fedglimpse__visibility__min_visible": 4}
        cluster.submit(app, **settings_of(out, 5, **counts))
        wait_for("training of the slow one", (marks / "training-1-4").exists, LONG)
        cluster.kill_node("site-4")
        back = Supervisor(cluster, "site-4", partition_id=4)
        wait_for("end of the run", (out / "summary.json").exists, LONG)
        back.stopped = True

    records = check_run_folder(out)  # every round once
    assert json.loads((out / "clients.json").read_text()) == [f"name:site-{i}" for i in range(5)]
    assert [r["visible"] for r in records[:2]] == [[0, 1, 2, 3, 4]] * 2
    assert records[1]["failed"]["3"] == "no answer"
    assert records[1]["failed"]["4"] in ("no answer", "node lost")
    for r in records[2:]:  # the killed one is itself again; the mute one still owes a reply
        assert r["visible"] == [0, 1, 2, 4]
        assert set(r["selected"]) == {0, 1, 4}
    for r in records[1:]:
        assert (r["rejected"], r["failed"]["2"]) == ([2], "not finite")
    assert all({0, 1} <= set(r["selected"]) and 2 not in r["selected"] for r in records[1:])
    monkeypatch.syspath_prepend(str(APP))
    check_model(out)
    print("seconds a round", [round(r["seconds"], 1) for r in records])


@pytest.mark.slow
@pytest.mark.processes
def test_one_is_killed_between_the_phases_and_then_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, marks = tmp_path / "run", tmp_path / "marks"
    app = faulty_app(tmp_path / "app", marks)
    (marks / "hold").touch()
    counts = {"fedglimpse__selection__k": 1, "fedglimpse__visibility__min_visible": 3}
    settings = settings_of(out, 3, **counts)
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start_link()
        cluster.register(*(f"site-{i}" for i in range(3)))
        for i in range(3):
            cluster.start_node(f"site-{i}", partition_id=i)
        cluster.submit(app, **settings)
        wait_for("choice of round 1", (marks / "chosen").exists, LONG)
        victim = (marks / "chosen").read_text().removeprefix("name:")
        lost = int(victim[-1])
        cluster.kill_node(victim)
        (marks / "hold").unlink()
        back = Supervisor(cluster, victim, partition_id=lost)

        # the server is killed while clients train for round 2, and started again
        wait_for("training in round 2", lambda: list(marks.glob("training-2-*")), LONG)
        os.kill(int((marks / "server").read_text()), signal.SIGKILL)
        before = records_of(out)
        cluster.submit(app, **settings)
        wait_for("end of the run", (out / "summary.json").exists, LONG)
        back.stopped = True

    records = check_run_folder(out)  # every round once
    assert len(before) == 2
    assert records[:2] == before
    assert json.loads((out / "clients.json").read_text()) == [f"name:site-{i}" for i in range(3)]
    assert records[1]["failed"][str(lost)] in ("no answer", "node lost")
    assert len(records[1]["selected"]) == 1  # another has taken its place
    assert lost not in records[1]["selected"]
    for r in records[2:]:  # it has returned as itself, to a new server
        assert r["visible"] == [0, 1, 2]
        assert r["failed"] == {}
        assert len(r["selected"]) == 1
    monkeypatch.syspath_prepend(str(APP))
    check_model(out)
    print("seconds a round", [round(r["seconds"], 1) for r in records])
