import json
import subprocess
import sys

from fedglimpse.runs.experiment import run

GIB = 2**20  # in KiB, as getrusage counts on Linux

RUN = """
import json, resource
from fedglimpse.runs.experiment import run
result = run({
    "data.name": "synthetic", "data.clients": 1_000_000, "data.samples": 20,
    "visibility.kind": "mobile", "visibility.cluster_size": 100, "selection.k": 20,
    "method": "glimpse", "rounds": 3, "engine.device": "cpu",
})
print(json.dumps({
    "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "visible": [len(r["visible"]) for r in result.records],
    "selected": [len(r["selected"]) for r in result.records],
    "largest": max(max(r["visible"]) for r in result.records),
}))
"""


def test_a_million_clients_fit_into_memory():
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kib"] < 4 * GIB
    assert found["visible"] == [100] * 3
    assert found["selected"] == [20] * 3
    assert found["largest"] > 500_000


def test_drawn_data_trains_and_repeats():
    settings = {
        "data.name": "synthetic", "data.clients": 100_000, "data.samples": 40, "data.alpha": 10.0,
        "visibility.kind": "random", "visibility.p": 0.0002, "selection.k": 10, "rounds": 12,
        "local.epochs": 5,
    }  # fmt: skip
    first, again = run(settings), run(settings)
    accuracy = [record["accuracy"] for record in first.records]
    assert accuracy == [record["accuracy"] for record in again.records]
    assert accuracy[-1] > 0.5  # ten classes
