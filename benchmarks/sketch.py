"""How long a client needs for one sketch of its model on one core, and how much memory.

Run: python benchmarks/sketch.py [--size 552362] [--size-out 128] [--out results.json]

Each sketch is measured in its own process: `extra_mib` is how much the peak resident memory grew
from just before the sketch was built until it had run, `seconds` the median of five later calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from fedglimpse import rng
from fedglimpse.federation.sketches import build_sketch
from fedglimpse.runs.provenance import code

TARGETS = {  # seconds, MiB
    "gaussian": (1.0, 64.0),
    "count": (0.020, None),
}


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def measure(kind: str, size: int, size_out: int) -> dict[str, float]:
    torch.set_num_threads(1)
    row = torch.randn(size, generator=rng.generator(0, "benchmark"))
    build_sketch(kind, 64, 1)(row[:64])  # load the libraries before memory is read
    before = peak_mib()
    sketch = build_sketch(kind, size, size_out)
    start = time.perf_counter()
    sketch(row)
    first = time.perf_counter() - start
    extra = peak_mib() - before
    times = []
    for _ in range(5):
        start = time.perf_counter()
        sketch(row)
        times.append(time.perf_counter() - start)
    return {
        "seconds": round(statistics.median(times), 5),
        "slowest": round(max(times), 5),
        "first_call_seconds": round(first, 5),
        "extra_mib": round(extra, 1),
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=552_362)
    parser.add_argument("--size-out", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/sketch.json")
    parser.add_argument("--only", choices=sorted(TARGETS), help="measure here and print JSON")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.size, args.size_out)))
        return
    figures = {}
    for kind, (seconds, mib) in TARGETS.items():
        command = [sys.executable, __file__, "--only", kind]
        command += ["--size", str(args.size), "--size-out", str(args.size_out)]
        figures[kind] = json.loads(subprocess.check_output(command, text=True))
        figures[kind] |= {"target_seconds": seconds, "target_mib": mib}
        print(
            f"{kind:9} {figures[kind]['seconds'] * 1e3:8.1f} ms (target {seconds * 1e3:.0f})"
            f"  {figures[kind]['extra_mib']:6.1f} MiB more at the peak (target {mib or '-'})"
        )
    result = {
        "size_in": args.size,
        "size_out": args.size_out,
        "threads": 1,
        "figures": figures,
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **code(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
