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
OF_THE_AGENT = ("agreement", "regret")  # measured on glimpse, the others on BASE
POINTS = ("spread", "noise", "best")  # shown in points, the others as they are

Settings = Mapping[str, Mapping[str, Any]]  # name -> results of one stored setting


def headroom(folder: Path) -> str:
    """Return every stored setting: accuracy of each way to choose, then what was measured."""
    commands: list[str] = []
    settings: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text())
        commands.append(f"    {stored['what']}")
        settings[path.stem] = stored["results"]
    if not settings:
        return "Not run yet."
    return paragraphs(["\n".join(commands), _accuracies(settings), _probes(settings)])


def _accuracies(settings: Settings) -> str:
    choosers = next(iter(settings.values()))["accuracy"]
    rows: list[list[str]] = []
    for name in choosers:
        rows.append([name, *(_gain(results["accuracy"], name) for results in settings.values())])
    return table(["who chooses", *settings], rows)


def _gain(accuracy: Mapping[str, list[float]], name: str) -> str:
    """Return an accuracy, and how far it is above random selection with the same seeds."""
    values = accuracy[name]
    text = f"{percent(mean(values))} ± {percent(stdev(values))}"
    difference = paired(dict(enumerate(values)), dict(enumerate(accuracy[BASE])))
    if name == BASE or difference is None:
        return text
    return f"{text}<br>{interval(difference)}"


def _probes(settings: Settings) -> str:
    """Return what was measured in the second half of the runs."""
    rows: list[list[str]] = []
    for name in PROBES:
        rows.append([name, *(_probe(results["probes"], name) for results in settings.values())])
    drift = ["drift"]
    labels = ["labels in sketches"]
    for results in settings.values():
        drift.append(percent(results["drift"], 2))
        labels.append(f"{results['labels_in_sketches']:.2f}")
    rows.insert(2, drift)
    return table(["measured", *settings], [*rows, labels])


def _probe(probes: Mapping[str, Mapping[str, float]], name: str) -> str:
    value = probes["glimpse" if name in OF_THE_AGENT else BASE][name]
    return percent(value, 2) if name in POINTS else f"{value:.2f}"
