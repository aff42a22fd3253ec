"""The example app in deployment: real processes, TLS, authenticated SuperNodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from flower_processes import APP, Cluster, other_version, slowness, wait_for
from node_keys import write_key
from run_folder_schema import check_run_folder

from fedglimpse.runs.experiment import run
from fedglimpse.version import VERSION

NODES = ("site-0", "site-1", "site-2", "site-3")


def test_a_simulated_run_passes_the_schema(tmp_path: Path) -> None:
    settings = {"method": "glimpse", "rounds": 2, "data.clients": 4, "selection.k": 2}
    run({**settings, "visibility.kind": "full"}, tmp_path / "r")
    check_run_folder(tmp_path / "r")


def check_other_version_is_left_out(cluster: Cluster, server: str) -> None:
    """One sentence on either side, and no work."""
    client = cluster.output("old")
    ours, theirs = f"fedglimpse {VERSION}", "fedglimpse 0.0.7"
    assert server.count(f"Client 'name:old' runs {theirs}, but here it is {VERSION}") == 1
    assert client.count(f"The server runs {ours}, but here it is 0.0.7: install the same") == 1
    assert "query.hello" in client
    assert "train.sketch" not in client
    assert "Traceback" not in client


@pytest.mark.slow
@pytest.mark.processes
def test_five_rounds_of_glimpse_with_tls_and_keys(tmp_path: Path) -> None:
    out, slow = tmp_path / "run", slowness()
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start_link()
        cluster.register(*NODES, "old")
        for i, name in enumerate(NODES):
            cluster.start_node(name, partition_id=i)
        source = other_version(tmp_path / "old", "0.0.7")
        cluster.start_node("old", source, partition_id=0)
        write_key(cluster.folder / "stranger")
        stranger = cluster.start_node("stranger", partition_id=3)
        settings = {
            "fedglimpse__rounds": 5,
            "fedglimpse__data__clients": 4,
            "fedglimpse__selection__k": 2,
            "fedglimpse__visibility__kind": "full",
            "terms__hello_timeout": 60.0 * slow,
        }
        run_id = cluster.submit(APP, out=str(out), **settings)
        wait_for("end of the run", lambda: (out / "summary.json").exists(), 240 * slow)
        assert stranger.wait(timeout=30 * slow) != 0  # the key is not registered

        def whole_log() -> str | None:
            text = cluster.server_log(run_id)
            return text if "round 5/5" in text else None

        check_other_version_is_left_out(cluster, wait_for("log", whole_log, 60 * slow))
    records = check_run_folder(out)
    assert json.loads((out / "clients.json").read_text()) == [f"name:{n}" for n in NODES]
    assert all(len(r["selected"]) == 2 for r in records)
    chosen = sum(r["received_bytes_chosen"] for r in records)
    others = sum(r["received_bytes_others"] for r in records)
    assert 0 < others < 0.02 * chosen
    assert records[-1]["accuracy"] > records[0]["accuracy"]
    print("seconds a round", [round(r["seconds"], 1) for r in records], "bytes", chosen, others)
