"""Count what one steady round executes: python tools/trace_round.py [METHOD ...].

How much code must somebody read to follow one round? This script runs a small federation and
records every function of the package that one late round executes.

Configuration: the data set digits, preset tuned, one lane (seed 0), on the CPU, nothing written to
disk and no progress display. For glimpse `agent.learn_start=4`, so that its network learns in
every round well before the traced one.

Round: the 12th (`TRACED_ROUND`), from the end of the 11th to its own end, in a run of 13. So it is
neither a first round, which builds and caches things, nor the last, which ends the run.

Threads: all of them, also those that were started in earlier rounds.

What is counted, of code in src/fedglimpse only:

- functions: distinct pairs of a file and a qualified name. Functions defined inside functions and
  methods count. Comprehensions, generator expressions, lambdas and the methods that `dataclass`
  and `NamedTuple` generate do not. So the number does not depend on the version of Python, which
  since 3.12 runs most comprehensions without a frame of their own (measured with 3.11).
- files: distinct files of those functions.
- cross-file calls: calls whose direct caller is code of the package in another file, as often as
  they happen. A call that comes back through PyTorch (such as `Module.__call__` calling `forward`)
  has no direct caller in the package and is not counted. Generator expressions and lambdas that
  another file runs are counted: following them leads a reader to another file all the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import fedglimpse

TRACED_ROUND = 12  # counted from 1
DEFAULT_METHODS = ("glimpse", "fedavg")
PACKAGE = Path(fedglimpse.__file__).parent
FOLDER = f"{PACKAGE}/"

CONFIGURATION: dict[str, Any] = {
    "data.name": "digits",
    "preset": "tuned",
    "seeds": [0],
    "rounds": TRACED_ROUND + 1,
    "engine.device": "cpu",
}
CONFIGURATION_OF_METHOD: dict[str, dict[str, Any]] = {"glimpse": {"agent.learn_start": 4}}

Function = tuple[str, str]  # file relative to the package, qualified name


@dataclass
class Trace:
    """What one round executed."""

    functions: set[Function] = field(default_factory=set)
    cross_file_calls: int = 0

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {file for file, _ in self.functions}

    def counts(self) -> dict[str, int]:
        """Return the three numbers of the table."""
        return {
            "functions": len(self.functions),
            "files": len(self.files),
            "cross_file_calls": self.cross_file_calls,
        }


class RoundRecorder:
    """Listens to a run and records the calls of `TRACED_ROUND`.

    The profile function is installed before the run starts and ignores all other rounds: a thread
    takes its profile function over when it starts, so one that was installed later would miss the
    threads that live through several rounds.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self._rounds_ended = 0
        self._recording = False

    def begin(self, name: str, done: int, total: int) -> None:
        """Ignore the start of the run."""

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Record from the end of the round before the traced one to the end of the traced one."""
        self._rounds_ended += 1
        self._recording = self._rounds_ended == TRACED_ROUND - 1

    def end(self) -> None:
        """Ignore the end of the run."""

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call of the package's own code; Python calls this for every event."""
        if not self._recording or event != "call":
            return
        path = frame.f_code.co_filename
        if not path.startswith(FOLDER):
            return
        caller = frame.f_back
        caller_path = "" if caller is None else caller.f_code.co_filename
        if caller_path.startswith(FOLDER) and caller_path != path:
            self.trace.cross_file_calls += 1
        if not frame.f_code.co_name.startswith("<"):  # <lambda>, <listcomp>, <genexpr>, ...
            file = Path(path).relative_to(PACKAGE).as_posix()
            self.trace.functions.add((file, frame.f_code.co_qualname))


def trace_round(method: str, **keys: Any) -> Trace:
    """Run a federation and return what its traced round executed.

    Args:
        method: name of the method.
        keys: configuration keys that differ from `CONFIGURATION`; those with a dot are given as
            `**{"data.partition": "label_skew"}`.
    """
    configuration = {
        **CONFIGURATION,
        **CONFIGURATION_OF_METHOD.get(method, {}),
        **keys,
        "method": method,
    }
    recorder = RoundRecorder()
    profile_before = sys.getprofile()
    thread_profile_before = threading.getprofile()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
    try:
        fedglimpse.run(configuration, listener=recorder)
    finally:
        sys.setprofile(profile_before)
        threading.setprofile(thread_profile_before)
    if not recorder.trace.functions:
        raise RuntimeError(f"method {method} has not reached round {TRACED_ROUND}")
    return recorder.trace


def traced_functions(method: str, **keys: Any) -> set[Function]:
    """Return the functions that a steady round executes: (file in the package, qualified name).

    Args:
        method: name of the method.
        keys: as in `trace_round`.
    """
    return trace_round(method, **keys).functions


def table(traces: dict[str, Trace]) -> str:
    """Return the counts of all methods, one line each."""
    lines = [f"{'method':<20}{'functions':>12}{'files':>8}{'cross-file calls':>20}"]
    for method, trace in traces.items():
        counts = trace.counts()
        lines.append(
            f"{method:<20}{counts['functions']:>12}{counts['files']:>8}"
            f"{counts['cross_file_calls']:>20}"
        )
    return "\n".join(lines)


def names_by_file(functions: set[Function]) -> dict[str, list[str]]:
    """Return the qualified names in each file, both sorted."""
    names: dict[str, list[str]] = {}
    for file, name in sorted(functions):
        names.setdefault(file, []).append(name)
    return names


def main() -> None:
    """Trace the methods that were asked for and print the counts or the functions."""
    parser = argparse.ArgumentParser(description="Count what one steady round executes.")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: glimpse fedavg")
    parser.add_argument("--list", metavar="METHOD", help="list the functions of each file instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()

    if arguments.list:
        names = names_by_file(traced_functions(arguments.list))
        if arguments.json:
            print(json.dumps(names, indent=2))
            return
        for file, functions in names.items():
            print(f"{file}: {', '.join(functions)}")
        return

    traces = {method: trace_round(method) for method in arguments.methods or DEFAULT_METHODS}
    if not arguments.json:
        print(table(traces))
        return
    report = {
        "python": platform.python_version(),
        "round": TRACED_ROUND,
        "methods": {method: trace.counts() for method, trace in traces.items()},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
