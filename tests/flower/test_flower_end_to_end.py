"""The example app in deployment: real processes, TLS, authenticated SuperNodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from flower_processes import APP, Cluster, slowness, wait_for, write_key
from flower_schema import check_run_folder

from fedglimpse.experiment import run

NODES = ("site-0", "site-1", "site-2", "site-3")


def test_a_simulated_run_passes_the_schema(tmp_path: Path) -> None:
    settings = {"method": "glimpse", "rounds": 2, "data.clients": 4, "selection.k": 2}
    run({**settings, "visibility.kind": "full"}, tmp_path / "r")
    check_run_folder(tmp_path / "r")


@pytest.mark.slow
def test_five_rounds_of_glimpse_with_tls_and_keys(tmp_path: Path) -> None:
    out, slow = tmp_path / "run", slowness()
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start_link()
        for i, name in enumerate(NODES):
            cluster.register(name)
            cluster.start_node(name, partition_id=i)
        write_key(cluster.folder / "stranger")
        stranger = cluster.start_node("stranger", partition_id=3)
        settings = {
            "fedglimpse__rounds": 5,
            "fedglimpse__data__clients": 4,
            "fedglimpse__selection__k": 2,
            "fedglimpse__visibility__kind": "full",
            "terms__hello_timeout": 60.0 * slow,
        }
        cluster.submit(APP, out=str(out), **settings)
        wait_for("end of the run", lambda: (out / "summary.json").exists(), 240 * slow)
        assert stranger.wait(timeout=30 * slow) != 0  # the key is not registered
    records = check_run_folder(out)
    assert json.loads((out / "clients.json").read_text()) == [f"name:{n}" for n in NODES]
    assert all(len(r["selected"]) == 2 for r in records)
    chosen = sum(r["received_bytes_chosen"] for r in records)
    others = sum(r["received_bytes_others"] for r in records)
    assert 0 < others < 0.02 * chosen
    assert records[-1]["accuracy"] > records[0]["accuracy"]
    print("seconds a round", [round(r["seconds"], 1) for r in records], "bytes", chosen, others)
