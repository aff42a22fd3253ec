"""The data that the page's scripts draw: curves, rasters, Q-values, partitions, theory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

from fedglimpse.config.schema import flatten
from fedglimpse.studies.report.analysis import MEASURES, ReportRow, Results
from fedglimpse.studies.results import CellResult, Study
from fedglimpse.studies.statistics.condense import Curve

T = TypeVar("T")
SCALE = 10_000  # accuracies are written as whole numbers
COSTS = tuple(name for name in MEASURES if name != "rounds")


def page_data(results: Results) -> dict[str, Any]:
    """Return everything the scripts need, as plain JSON values."""
    study = results.study
    curves: dict[str, list[dict[str, Any]]] = {}
    for setting in study.settings:
        curves[setting] = list(map(_curves, results.of(setting)))
    bitmaps: list[str] = []  # runs of one seed see the same clients: each raster is stored once
    runs = [_run(cell, bitmaps) for cell in study.cells if cell.trace is not None]
    return {
        "settings": study.settings,
        "variants": study.variants,
        "control": results.control,
        "targets": {name: target.value for name, target in results.targets.items()},
        "measures": MEASURES,
        "scale": SCALE,
        "curves": curves,
        "runs": runs,
        "bitmaps": bitmaps,
        "partitions": _partitions(study),
    }


def _partitions(study: Study) -> dict[str, Any]:
    partitions: dict[str, Any] = {}
    for partition in study.partitions:
        partitions[partition.setting] = {"seed": partition.seed, "counts": partition.counts}
    return partitions


def _curves(row: ReportRow) -> dict[str, Any]:
    """Return mean and range over the finished seeds, or the one curve there is."""
    finished: list[Curve] = []
    recorded: list[Curve] = []
    for cell in row.cells:
        if cell.facts is not None:
            recorded.append(cell.facts.curve)
            if cell.state == "finished":
                finished.append(cell.facts.curve)
    curves = finished or recorded[:1]
    rounds = _shared_rounds(curves)
    smooth: list[list[float]] = []
    raw: list[list[float]] = []
    costs: dict[str, list[list[int]]] = {name: [] for name in COSTS}
    for curve in curves:
        positions = [i for i, number in enumerate(curve.rounds) if number in rounds]
        smooth.append(_at(curve.smooth, positions))
        raw.append(_at(curve.accuracy, positions))
        for name in COSTS:
            costs[name].append(_at(curve.costs[name], positions))
    return {
        "variant": row.variant,
        "seeds": len(curves),
        "finished": bool(finished),
        "rounds": sorted(rounds),
        "smooth": _band(smooth),
        "raw": _band(raw),
        "costs": {name: _means(seeds) for name, seeds in costs.items()},
    }


def _at(values: Sequence[T], positions: Sequence[int]) -> list[T]:
    return [values[i] for i in positions]


def _shared_rounds(curves: Sequence[Curve]) -> set[int]:
    """Return the rounds that all curves hold."""
    if not curves:
        return set()
    rounds = set(curves[0].rounds)
    for curve in curves[1:]:
        rounds &= set(curve.rounds)
    return rounds


def _band(seeds: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return mean, lowest and highest seed at every point, as whole numbers."""
    means: list[int] = []
    lowest: list[int] = []
    highest: list[int] = []
    for point in zip(*seeds, strict=True):
        means.append(round(fmean(point) * SCALE))
        lowest.append(round(min(point) * SCALE))
        highest.append(round(max(point) * SCALE))
    return [means, lowest, highest]


def _means(seeds: Sequence[Sequence[int]]) -> list[float]:
    return [float(f"{fmean(point):.5g}") for point in zip(*seeds, strict=True)]


def _run(cell: CellResult, bitmaps: list[str]) -> dict[str, Any]:
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
        "moments": list(map(vars, trace.moments)),
        "theory": _theory(cell),
    }


def _index(bitmaps: list[str], text: str) -> int:
    if text not in bitmaps:
        bitmaps.append(text)
    return bitmaps.index(text)


def _theory(cell: CellResult) -> dict[str, Any]:
    """Take from theory.json what can be drawn: lists as series, single numbers as figures.

    Reads a flat file (name -> list or number) and one with a panel for each seed in `lanes`.
    """
    content = dict(cell.theory or {})
    notes = content.pop("notes", None)
    panel = _panel_of_seed(content.pop("lanes", None), cell.seed)
    series: dict[str, list[float | None]] = {}
    figures: dict[str, float | None] = {}
    rounds: list[float | None] | None = None
    for key, value in flatten(content if panel is None else panel).items():
        name = key.removeprefix("series.")
        if name == "round" and _is_series(value):
            rounds = list(map(_five_digits, value))
        elif _is_series(value) and any(map(_is_number, value)):
            series[name] = list(map(_five_digits, value))
        elif _is_number(value) and name != "seed":
            figures[name] = _five_digits(value)
    return {
        "rounds": rounds,
        "series": series,
        "figures": figures,
        "notes": list(map(str, notes)) if isinstance(notes, list) else [],
    }


def _panel_of_seed(panels: object, seed: int) -> Mapping[str, Any] | None:
    if isinstance(panels, list):
        for panel in panels:
            if isinstance(panel, dict) and panel.get("seed") == seed:
                return panel
    return None


def _is_series(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(number is None or _is_number(number) for number in value)


def _five_digits(value: float | None) -> float | None:
    """Return five digits of a number; None for what cannot be drawn."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
