"""Time one round of the agent: choosing, and learning from the result with its mini-batches.

A simulation runs several federations (lanes) side by side and lets their agents choose and learn
together. So this measures the code that a simulation runs, with one lane and with several. What
the agents see is synthetic: no client trains here.

    python benchmarks/agent.py                    writes benchmarks/results/agent.json
    python benchmarks/agent.py --json             prints the same and writes nothing
    python benchmarks/agent.py --lanes 1 4 --presets tuned --threads 2 --json
    python benchmarks/agent.py --presets tuned --against ../other-checkout

`--against` compares this checkout with another one: each measures itself with its own copy of this
script, in turns (this, other, other, this, ...), so that a machine that becomes busier slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fedglimpse
from fedglimpse import Choice, Outcome, Setting, View

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "agent.json"
PRESETS = ("tuned", "tuned-1", "paper", "released")
LANES = (1, 4)
CLIENTS, VISIBLE, K, SKETCH, CLASSES = 100, 10, 5, 128, 10
NUM_PARAMS = 1000  # of the clients' model, which the agent never sees
WARM_UP, ROUNDS = 60, 60
TARGET_MS = 40.0
REPEATS = 6  # measurements of each checkout in a comparison

Select = Callable[[Sequence[View | None]], Sequence[Choice | None]]
Feedback = Callable[[Sequence[Outcome | None]], Sequence[Mapping[str, float]]]


# ---- The only two functions that name modules inside the package: adapt them when those move.


def agents_of(settings: Sequence[Setting]) -> tuple[Select, Feedback]:
    """Build one agent for each lane; return what a simulation calls to choose and to learn."""
    from fedglimpse.methods.build import build_method
    from fedglimpse.runs.rounds import Selectors

    methods = [build_method("glimpse", setting) for setting in settings]
    selectors = Selectors(methods, [K] * len(methods))
    return selectors.select, selectors.feedback


def measured_code() -> dict[str, str]:
    """Return which code is measured: keys source and commit."""
    from fedglimpse.runs.provenance import code

    return code()


# ---- What the agents see.


def setting_of(preset: str, lane: int) -> Setting:
    """Return what a lane's agent is built for."""
    words = ["method=glimpse", f"preset={preset}", f"sketch.size={SKETCH}"]
    return Setting(
        config=fedglimpse.load(words=words),
        seed=lane,
        sizes=torch.full((CLIENTS,), 100),
        num_classes=CLASSES,
        num_params=NUM_PARAMS,
    )


def view_of(lane: int, round_num: int) -> View:
    """Return a synthetic view with every report that some preset reads."""
    draw = torch.Generator().manual_seed(1_000_000 * lane + round_num)
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


def outcome_of(view: View, choice: Choice | None) -> Outcome:
    """Return a synthetic outcome of a choice."""
    assert choice is not None  # every lane sees clients in every round
    per_class = torch.rand(CLASSES, generator=view.rng)
    score = float(per_class.mean())
    return Outcome(
        round_num=view.round_num,
        selected=view.ids[choice.slots],
        reward=score,
        score=score,
        per_class=per_class,
        reward_per_class=per_class,
        weights=torch.full((len(choice.slots),), 1.0 / len(choice.slots)),
        reports={},
    )


# ---- Measuring this checkout.


def measure(preset: str, lanes: int = 1) -> dict[str, float]:
    """Return the median times of one round of all lanes, in milliseconds.

    The first `WARM_UP` rounds are not measured: the agents learn only once their memory holds
    enough rounds.
    """
    select, feedback = agents_of([setting_of(preset, lane) for lane in range(lanes)])
    select_ms: list[float] = []
    feedback_ms: list[float] = []
    cpu_ms: list[float] = []
    flops = 0.0
    for round_num in range(WARM_UP + ROUNDS):
        views = [view_of(lane, round_num) for lane in range(lanes)]

        cpu_start = time.process_time()
        start = time.perf_counter()
        choices = select(views)
        select_seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start

        outcomes = [outcome_of(*pair) for pair in zip(views, choices, strict=True)]

        cpu_start = time.process_time()
        start = time.perf_counter()
        metrics = feedback(outcomes)
        feedback_seconds = time.perf_counter() - start
        cpu_seconds += time.process_time() - cpu_start

        if round_num >= WARM_UP:
            select_ms.append(1e3 * select_seconds)
            feedback_ms.append(1e3 * feedback_seconds)
            cpu_ms.append(1e3 * cpu_seconds)
            flops = sum(metric["server_flops"] for metric in metrics)

    round_ms = sorted(s + f for s, f in zip(select_ms, feedback_ms, strict=True))
    median_ms = statistics.median(round_ms)
    return {
        "select_ms": round(statistics.median(select_ms), 3),
        "feedback_ms": round(statistics.median(feedback_ms), 3),
        "round_ms": round(median_ms, 3),
        "round_ms_per_lane": round(median_ms / lanes, 3),
        "round_ms_p10": round(round_ms[len(round_ms) // 10], 3),
        "round_ms_p90": round(round_ms[len(round_ms) * 9 // 10], 3),
        "round_cpu_ms": round(statistics.median(cpu_ms), 3),  # however busy the machine is
        "mflop_per_round": round(flops / 1e6, 1),
    }


def cpu_model() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def report_of(presets: Sequence[str], lane_counts: Sequence[int], threads: int) -> dict[str, Any]:
    """Measure every preset with every number of lanes.

    One lane is reported under "median", several under "median_by_lanes": the table of the
    documentation reads the first.
    """
    torch.set_num_threads(threads)
    report: dict[str, Any] = {
        "what": "agent select + feedback, 5 mini-batches, 10 visible, K=5, H=5, sketch 128",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "threads": threads,
        **measured_code(),
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "rounds_measured": ROUNDS,
        "target_round_ms": TARGET_MS,
    }
    for lanes in lane_counts:
        measured = {preset: measure(preset, lanes) for preset in presets}
        if lanes == 1:
            report["median"] = measured
        else:
            report.setdefault("median_by_lanes", {})[str(lanes)] = measured
    return report


def times_of(report: dict[str, Any]) -> dict[tuple[str, int], dict[str, float]]:
    """Return the measured times of a report by preset and number of lanes."""
    by_lanes = {"1": report.get("median", {}), **report.get("median_by_lanes", {})}
    return {
        (preset, int(lanes)): times
        for lanes, presets in by_lanes.items()
        for preset, times in presets.items()
    }


def table(report: dict[str, Any]) -> str:
    """Return the times of a report, one line for each preset and number of lanes."""
    lines = [f"{'preset':<10}{'lanes':>6}{'ms a round':>12}{'per lane':>10}{'CPU ms':>10}"]
    for (preset, lanes), times in times_of(report).items():
        lines.append(
            f"{preset:<10}{lanes:>6}{times['round_ms']:>12.1f}"
            f"{times['round_ms_per_lane']:>10.1f}{times['round_cpu_ms']:>10.1f}"
        )
    return "\n".join(lines)


# ---- Comparing with another checkout.


def measured_by(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Let a checkout measure itself in a process of its own; return its report."""
    script = checkout / "benchmarks" / "agent.py"
    finished = subprocess.run(
        [sys.executable, str(script), *arguments, "--json"],
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        sys.exit(f"{script} failed (see above): it must understand {' '.join(arguments)} --json")
    return json.loads(finished.stdout)


def compare(other: Path, arguments: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure this checkout and another one in turns; return the ratios of their times.

    A ratio divides two measurements that followed each other: above 1, this checkout is slower.
    Which of the two goes first alternates, so that going first gives no advantage.
    """
    this_times = []
    other_times = []
    codes: dict[str, Any] = {}
    for repeat in range(repeats):
        print(f"measurement {repeat + 1} of {repeats}", file=sys.stderr)
        if repeat % 2 == 0:
            this_report = measured_by(ROOT, arguments)
            other_report = measured_by(other, arguments)
        else:
            other_report = measured_by(other, arguments)
            this_report = measured_by(ROOT, arguments)
        this_times.append(times_of(this_report))
        other_times.append(times_of(other_report))
        codes = {"this": this_report["source"], "other": other_report["source"]}

    results = []
    for preset, lanes in this_times[0]:
        result: dict[str, Any] = {"preset": preset, "lanes": lanes}
        for clock in ("round_ms", "round_cpu_ms"):
            ours = [times[preset, lanes][clock] for times in this_times]
            theirs = [times[preset, lanes][clock] for times in other_times]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            result[clock] = {
                "this": round(statistics.median(ours), 3),
                "other": round(statistics.median(theirs), 3),
                "ratio": round(statistics.median(ratios), 3),
                "lowest_ratio": round(min(ratios), 3),
                "highest_ratio": round(max(ratios), 3),
            }
        results.append(result)
    return {"source": codes, "repeats": repeats, "results": results}


def comparison_table(comparison: dict[str, Any]) -> str:
    """Return a comparison, one line for each preset, number of lanes and clock."""
    lines = [
        f"{'preset':<10}{'lanes':>6}  {'clock':<6}{'this ms':>9}{'other ms':>9}"
        f"{'median ratio':>14}  lowest to highest ratio"
    ]
    for result in comparison["results"]:
        for clock, name in (("round_ms", "wall"), ("round_cpu_ms", "CPU")):
            times = result[clock]
            lines.append(
                f"{result['preset']:<10}{result['lanes']:>6}  {name:<6}{times['this']:>9.1f}"
                f"{times['other']:>9.1f}{times['ratio']:>14.3f}  "
                f"{times['lowest_ratio']:.3f} to {times['highest_ratio']:.3f}"
            )
    return "\n".join(lines)


# ---- The command.


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time one round of the agent.")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--lanes", nargs="+", type=int, default=list(LANES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measured after the warm-up")
    parser.add_argument("--json", action="store_true", help="print JSON, write no file")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="with --against; best even")
    return parser.parse_args()


def main() -> None:
    """Measure this checkout, or compare it with another one."""
    global ROUNDS
    arguments = parse_arguments()
    ROUNDS = arguments.rounds

    if arguments.against is not None:
        passed_on = ["--presets", *arguments.presets, "--lanes", *map(str, arguments.lanes)]
        passed_on += ["--threads", str(arguments.threads), "--rounds", str(arguments.rounds)]
        comparison = compare(arguments.against.resolve(), passed_on, arguments.repeats)
        print(json.dumps(comparison, indent=2) if arguments.json else comparison_table(comparison))
        return

    report = report_of(arguments.presets, arguments.lanes, arguments.threads)
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(table(report))
    if set(PRESETS) <= set(arguments.presets) and 1 in arguments.lanes:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(report, indent=2) + "\n")
        print(f"written to {RESULT}")
    else:
        print("not written: the file holds all presets, with one lane among the numbers of lanes")


if __name__ == "__main__":
    main()
