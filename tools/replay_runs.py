"""Check that a change of the code left the results of runs unchanged.

    python tools/replay_runs.py record FILE [--only NAME]     run everything and store the records
    python tools/replay_runs.py compare FILE [--only NAME]    run everything again and compare

`record` is run with the code from before a change, `compare` with the code after it; the script
uses public names only, so that one version of it serves both (`PYTHONPATH=OTHER/src`).

What is run: every method on digits; the presets tuned, tuned-1, paper and released of `glimpse`,
learning early and exploring briefly, so that 60 rounds hold real lessons; visible sets whose size
changes from round to round; three seeds side by side; HAPT (where its file is present).

What has to be equal: the visible and the selected clients of every round, for `glimpse` until two
Q-values at the edge of the top K lie within `TIE` of each other, since such a choice hangs on the
last bits of a sum; from then on the two runs are different runs. Up to there accuracies agree
within `ACCURACY_TOLERANCE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedglimpse
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.methods.registry import MODULES, info

TIE = 1e-5  # Q-values closer than this may change places
ACCURACY_TOLERANCE = 2e-3  # one test row of digits is 2.8e-3

Records = list[dict[str, Any]]

BASE: dict[str, Any] = {
    "data.name": "digits",
    "rounds": 30,
    "seeds": [0],
    "evaluate.every": 1,
    "engine.device": "cpu",
}
EARLY_LESSONS: dict[str, Any] = {
    "method": "glimpse",
    "rounds": 60,
    "agent.learn_start": 4,
    "agent.epsilon_decay": 0.1,
}


def runs() -> dict[str, dict[str, Any]]:
    """Return what is run: name -> configuration."""
    configurations: dict[str, dict[str, Any]] = {}
    for method in MODULES:
        examples = info(method).example_options
        options = {f"options.{name}": value for name, value in examples.items()}
        configurations[f"digits {method}"] = {**BASE, "method": method, **options}
    for preset in ("tuned", "tuned-1", "paper", "released"):
        name = f"digits glimpse preset {preset}"
        configurations[name] = {**BASE, **EARLY_LESSONS, "preset": preset}
    for kind, keys in {
        "random": {"visibility.p": 0.2},
        "markov": {"visibility.p_on": 0.1, "visibility.p_off": 0.3},
    }.items():
        visibility = {"visibility.kind": kind, **keys}
        configurations[f"digits glimpse {kind}"] = {**BASE, **EARLY_LESSONS, **visibility}
        for method in ("fedavg-window", "power-of-choice", "mifa", "palit"):
            name = f"digits {method} {kind}"
            configurations[name] = {**BASE, "method": method, **visibility}
    for method, keys in {"glimpse": EARLY_LESSONS, "fedavg-window": {}, "fedppo": {}}.items():
        lanes = {"seeds": [0, 1, 2], "data.partition": "label_skew"}
        configurations[f"digits {method} three lanes"] = {**BASE, "method": method, **keys, **lanes}
    for method, keys in {"glimpse": EARLY_LESSONS, "fedavg-window": {}, "herd": {}}.items():
        hapt = {"data.name": "hapt", "data.partition": "subject", "data.clients": 0, "rounds": 15}
        configurations[f"hapt {method}"] = {**BASE, "method": method, **keys, **hapt}
    return configurations


class QValues:
    """Adds the exact Q-values of a round to what `glimpse` logs, which rounds them."""

    def __enter__(self) -> None:
        self._choose = choose = GlimpseSelector.choose

        def choose_and_log(
            selector: GlimpseSelector, view: Any, k: int, scored: Any, *more: Any
        ) -> fedglimpse.Choice:
            choice = choose(selector, view, k, scored, *more)  # `more`: of older code
            exact = {"q_exact": scored.scores.double().tolist(), "k": k}
            return replace(choice, info={**choice.info, **exact})

        GlimpseSelector.choose = choose_and_log  # type: ignore[assignment, method-assign]

    def __exit__(self, *exception: object) -> None:
        GlimpseSelector.choose = self._choose  # type: ignore[method-assign]


def run_all(only: str) -> dict[str, Records]:
    """Run every configuration whose name contains `only`; returns the records of each."""
    results: dict[str, Records] = {}
    for name, configuration in runs().items():
        if only not in name:
            continue
        try:
            result = fedglimpse.run(configuration)
        except fedglimpse.UserError as error:
            print(f"{name}: not run: {error}", file=sys.stderr)
            continue
        results[name] = [dict(record) for record in result.records]
        print(f"{name}: {len(results[name])} records", file=sys.stderr)
    return results


def margin_at_the_edge(record: Mapping[str, Any]) -> float:
    """Return how far the K-th largest Q-value lies above the next one; inf without Q-values."""
    q_values = sorted(record.get("q_exact", ()), reverse=True)
    k = record.get("k", 0)
    if not 0 < k < len(q_values):
        return float("inf")
    return float(q_values[k - 1] - q_values[k])


def compare_lane(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """Return "" where two lanes agree as they must, else what differs first."""
    if len(before) != len(after):
        return f"{len(before)} rounds before, {len(after)} after"
    for old, new in zip(before, after, strict=True):
        round_num = old["round"]
        if old["visible"] != new["visible"]:
            return f"round {round_num}: other clients are visible"
        if old["selected"] != new["selected"]:
            margin = margin_at_the_edge(old)
            if margin < TIE:
                return ""
            return f"round {round_num}: {old['selected']} before, {new['selected']} after" + (
                f", Q-values {margin:.1e} apart" if "q_exact" in old else ""
            )
        gap = abs((old["accuracy"] or 0) - (new["accuracy"] or 0))
        if gap > ACCURACY_TOLERANCE:
            return f"round {round_num}: accuracies differ by {gap:.4f}"
    return ""


def identical(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> bool:
    """True where choices and accuracies are the same to the last bit."""
    keys = ("visible", "selected", "accuracy", "loss", "reward")
    old = [[record[key] for key in keys] for record in before]
    new = [[record[key] for key in keys] for record in after]
    return old == new


def by_lane(records: Records) -> dict[int, Records]:
    """Group records by their lane."""
    lanes: dict[int, Records] = {}
    for record in records:
        lanes.setdefault(record["lane"], []).append(record)
    return lanes


def compare_all(before: Mapping[str, Records], after: Mapping[str, Records]) -> int:
    """Print one line for each run; returns how many differ."""
    failures = 0
    for name, records in after.items():
        old_lanes = by_lane(before[name])
        new_lanes = by_lane(records)
        problems = []
        for lane, old in old_lanes.items():
            problem = compare_lane(old, new_lanes.get(lane, []))
            if problem:
                problems.append(f"lane {lane}, {problem}")
        failures += bool(problems)
        same = identical(before[name], records)
        verdict = "; ".join(problems) or ("identical" if same else "equal within tolerance")
        print(f"{name:<42} {verdict}")
    return failures


def main() -> None:
    """Record runs or compare them with a recording."""
    parser = argparse.ArgumentParser(description="Record runs, or compare them with a recording.")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="run only what has this in its name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with QValues():
        results = run_all(arguments.only)
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(results), encoding="utf-8")
        return
    before = json.loads(arguments.file.read_text(encoding="utf-8"))
    # What a recording holds went through JSON once; the same for what is compared with it.
    failures = compare_all(before, json.loads(json.dumps(results)))
    print(f"{len(results)} runs compared, {failures} differ")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
