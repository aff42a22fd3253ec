"""What a choice of clients can gain: tables of what plans/headroom.py stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedglimpse.studies.report.numbers import interval, percent
from fedglimpse.studies.statistics.difference import paired
from reproduction.markdown import paragraphs, table

BASE = "random"
PROBES = ("spread", "noise", "best", "additive", "evenness", "agreement", "regret")
POINTS = ("spread", "noise", "best")  # shown in points, the others as they are


def headroom(folder: Path) -> str:
    """Return every stored setting: who chose and what came of it, then what was measured."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if not found:
        return "Not run yet."
    commands = "\n".join(f"    {one['what']}" for one in found.values())
    return paragraphs([commands, _choosers(found), _probes(found)])


def _choosers(found: Mapping[str, Any]) -> str:
    first = next(iter(found.values()))["results"]["accuracy"]
    head = ["who chooses", *found]
    rows = [
        [name, *(_gain(one["results"]["accuracy"], name) for one in found.values())]
        for name in first
    ]
    return table(head, rows)


def _gain(accuracy: Mapping[str, list[float]], name: str) -> str:
    """Return an accuracy, and what it is above that of a random choice with the same seeds."""
    own, base = (dict(enumerate(accuracy[n])) for n in (name, BASE))
    text = f"{percent(mean(own.values()))} ± {percent(stdev(own.values()))}"
    difference = paired(own, base)
    return text if name == BASE or difference is None else f"{text}<br>{interval(difference)}"


def _probes(found: Mapping[str, Any]) -> str:
    """Return what was measured in the second half of the runs."""
    rows = []
    for name in PROBES:
        rows.append([name, *(_probe(one["results"]["probes"], name) for one in found.values())])
    rows.insert(2, ["drift", *(percent(one["results"]["drift"], 2) for one in found.values())])
    labels = (f"{one['results']['labels_in_sketches']:.2f}" for one in found.values())
    return table(["measured", *found], [*rows, ["labels in sketches", *labels]])


def _probe(probes: Mapping[str, Mapping[str, float]], name: str) -> str:
    value = probes["glimpse"][name] if name in ("agreement", "regret") else probes[BASE][name]
    return percent(value, 2) if name in POINTS else f"{value:.2f}"
