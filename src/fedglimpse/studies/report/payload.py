"""What the page's scripts draw from: curves, rasters, Q-values, partitions, theory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedglimpse.config.schema import flatten
from fedglimpse.studies.report.analysis import Results, Row
from fedglimpse.studies.report.numbers import MEASURES
from fedglimpse.studies.results import Cell

SCALE = 10_000  # accuracies travel as whole numbers


def payload(results: Results) -> dict[str, Any]:
    """Return everything the scripts need, as plain JSON values."""
    study = results.study
    bitmaps: list[str] = []  # lanes of one seed see the same clients: each raster travels once
    return {
        "settings": study.settings,
        "variants": study.variants,
        "control": results.control,
        "targets": {name: target.value for name, target in results.targets.items()},
        "measures": {name: list(words) for name, words in MEASURES.items()},
        "scale": SCALE,
        "curves": {s: [_curves(row) for row in results.of(s)] for s in study.settings},
        "runs": [_run(cell, bitmaps) for cell in study.cells if cell.trace is not None],
        "bitmaps": bitmaps,
        "partitions": {
            p.setting: {"seed": p.seed, "counts": [list(row) for row in p.counts]}
            for p in study.partitions
        },
    }


def _curves(row: Row) -> dict[str, Any]:
    """Return mean and range over the finished seeds, or the one curve there is."""
    done = [c.facts.curve for c in row.cells if c.state == "finished" and c.facts is not None]
    curves = done or [c.facts.curve for c in row.cells if c.facts is not None][:1]
    shared = set.intersection(*(set(c.rounds) for c in curves)) if curves else set()
    at = [[i for i, r in enumerate(c.rounds) if r in shared] for c in curves]
    columns = list(zip(curves, at, strict=True))
    return {
        "variant": row.variant,
        "seeds": len(curves),
        "finished": bool(done),
        "rounds": sorted(shared),
        "smooth": _band([[c.smooth[i] for i in kept] for c, kept in columns]),
        "raw": _band([[c.accuracy[i] for i in kept] for c, kept in columns]),
        "costs": {
            name: _means([[c.costs[name][i] for i in kept] for c, kept in columns])
            for name in MEASURES
            if name != "rounds"
        },
    }


def _band(seeds: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return mean, lowest and highest seed at every kept round, as whole numbers."""
    points = list(zip(*seeds, strict=True))
    rows = ([fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points])
    return [[round(value * SCALE) for value in row] for row in rows]


def _means(seeds: Sequence[Sequence[int]]) -> list[float]:
    return [float(f"{fmean(point):.5g}") for point in zip(*seeds, strict=True)]


def _run(cell: Cell, bitmaps: list[str]) -> dict[str, Any]:
    trace = cell.trace
    assert trace is not None
    return {
        "setting": cell.setting,
        "variant": cell.variant,
        "seed": cell.seed,
        "clients": trace.clients,
        "rounds": trace.rounds,
        "visible": _index(bitmaps, trace.visible),
        "selected": _index(bitmaps, trace.selected),
        "moments": [vars(moment) for moment in trace.moments],
        "theory": _theory(cell),
    }


def _index(bitmaps: list[str], text: str) -> int:
    if text not in bitmaps:
        bitmaps.append(text)
    return bitmaps.index(text)


def _theory(cell: Cell) -> dict[str, Any]:
    """Keep what can be drawn: lists of numbers as series, single numbers as figures.

    Takes a flat file (name -> list or number) and one with a panel for each seed in `lanes`.
    """
    found = dict(cell.theory or {})
    notes, lanes = found.pop("notes", None), found.pop("lanes", None)
    notes = [str(note) for note in notes] if isinstance(notes, list) else []
    lanes = [lane for lane in lanes if isinstance(lane, dict)] if isinstance(lanes, list) else []
    lanes = [lane for lane in lanes if lane.get("seed") == cell.seed]
    flat = flatten(lanes[0] if lanes else found)
    values = {name.removeprefix("series."): value for name, value in flat.items() if name != "seed"}
    series = {
        name: [_short(v) for v in value]
        for name, value in values.items()
        if isinstance(value, list) and value and all(v is None or _is_number(v) for v in value)
    }
    return {
        "rounds": series.pop("round", None),
        "series": {
            name: value for name, value in series.items() if any(_is_number(v) for v in value)
        },
        "figures": {name: _short(value) for name, value in values.items() if _is_number(value)},
        "notes": notes,
    }


def _short(value: float | None) -> float | None:
    """Return five digits of a number; None for what cannot be drawn."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
