"""Time one round of the agent on one CPU core: select, feedback with b mini-batches.

Run: python benchmarks/agent.py            writes benchmarks/results/agent.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.provenance import code
from fedglimpse.rl.config import PRESETS, AgentConfig
from fedglimpse.rng import generator
from fedglimpse.types import Outcome, View

RESULT = Path(__file__).parent / "results" / "agent.json"
CLIENTS, VISIBLE, K, SKETCH, CLASSES = 100, 10, 5, 128, 10
WARM_UP, ROUNDS = 60, 60
TARGET_MS = 40.0


def view(round_num: int) -> View:
    draw = generator(0, "bench-view", round_num)
    return View(
        round_num=round_num,
        ids=torch.randperm(CLIENTS, generator=draw)[:VISIBLE].sort().values,
        sizes=torch.randint(50, 500, (VISIBLE,), generator=draw),
        reports={
            "sketch": torch.randn(VISIBLE, SKETCH, generator=draw),
            "delta_sketch": torch.randn(VISIBLE, SKETCH, generator=draw),
            "update_norm": torch.rand(VISIBLE, generator=draw),
            "train_loss": torch.rand(VISIBLE, generator=draw),
            "loss": torch.rand(VISIBLE, generator=draw),
        },
        server={
            "global_sketch": torch.randn(SKETCH, generator=draw),
            "proxy_histogram": torch.rand(CLASSES, generator=draw),
        },
        rng=draw,
    )


def outcome(seen: View, slots: torch.Tensor) -> Outcome:
    per_class = torch.rand(CLASSES, generator=seen.rng)
    reward = float(per_class.mean())
    weights = torch.full((len(slots),), 1.0 / len(slots))
    return Outcome(
        seen.round_num, seen.ids[slots], reward, reward, per_class, per_class, weights, {}
    )


def milliseconds(call: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e3


def measure(preset: str) -> dict[str, float]:
    config = AgentConfig(**PRESETS[preset])
    agent = GlimpseSelector(config, sketch_dim=SKETCH, num_classes=CLASSES, seed=0)
    selects, feedbacks, cpu, flops = [], [], [], 0.0
    for round_num in range(WARM_UP + ROUNDS):
        seen = view(round_num)
        before = time.process_time()
        choice, select_ms = milliseconds(lambda seen=seen: agent.select(seen, K))
        result = outcome(seen, choice.slots)  # type: ignore[attr-defined]
        metrics, feedback_ms = milliseconds(lambda result=result: agent.feedback(result))
        if round_num >= WARM_UP:
            selects.append(select_ms)
            feedbacks.append(feedback_ms)
            cpu.append((time.process_time() - before) * 1e3)
            flops = metrics["server_flops"]  # type: ignore[index]
    totals = sorted(s + f for s, f in zip(selects, feedbacks, strict=True))
    return {
        "select_ms": round(statistics.median(selects), 3),
        "feedback_ms": round(statistics.median(feedbacks), 3),
        "round_ms": round(statistics.median(totals), 3),
        "round_ms_p10": round(totals[len(totals) // 10], 3),
        "round_ms_p90": round(totals[len(totals) * 9 // 10], 3),
        "round_cpu_ms": round(statistics.median(cpu), 3),  # own time, however busy the machine
        "mflop_per_round": round(flops / 1e6, 1),
    }


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    torch.set_num_threads(1)
    report: dict[str, object] = {
        "what": "agent select + feedback, 5 mini-batches, 10 visible, K=5, H=5, sketch 128",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "threads": 1,
        **code(),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "rounds_measured": ROUNDS,
        "target_round_ms": TARGET_MS,
    }
    report["median"] = {preset: measure(preset) for preset in PRESETS}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
