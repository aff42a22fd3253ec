"""One self-contained HTML page, and the data that its scripts draw."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from statistics import fmean
from string import Template
from typing import Any, TypeVar

from fedglimpse.config.schema import flatten
from fedglimpse.runs.summary import final_window
from fedglimpse.studies.report.analysis import MEASURES, ReportRow, Results
from fedglimpse.studies.report.page_tables import (
    commands,
    control_counts,
    cost_bars,
    fairness_table,
    latecomers_table,
    paper_claims,
    result_tables,
)
from fedglimpse.studies.report.tables import diverged, drawn_differently, missing
from fedglimpse.studies.results.study import CellResult, Study
from fedglimpse.studies.statistics.condense import Curve
from fedglimpse.studies.statistics.difference import COVERAGE
from fedglimpse.version import VERSION

SCRIPTS = ("colours.js", "tip.js", "filters.js", "curves.js", "raster.js", "agent.js", "main.js")
MOST_LISTED = 8  # lines of missing or diverged runs at the top of the page
MACHINE = ("fedglimpse", "draws", "python", "torch", "platform", "gpu")  # of the environment
SCALE = 10_000  # accuracies for the scripts are written as whole numbers
COSTS = tuple(name for name in MEASURES if name != "rounds")

T = TypeVar("T")


def page(results: Results) -> str:
    """Return the whole report as one HTML file that needs nothing else."""
    study = results.study
    return Template(_asset("page.html")).substitute(
        version=VERSION,
        title=escape(study.title),
        claim=f'<p class="claim">{escape(study.claim)}</p>' if study.claim else "",
        facts=_facts(results),
        missing=_missing(results),
        answer=_answer(results),
        final_text=_final_text(results),
        results=result_tables(results),
        bars=cost_bars(results),
        fairness=fairness_table(results) + latecomers_table(results),
        paper=_section("paper", "What the paper says", paper_claims(results)),
        reading=Template(_asset("reading.html")).substitute(coverage=bootstrap_coverage()),
        report_command=escape(f"fedglimpse report {shlex.quote(study.source)}"),
        commands=commands(results),
        environment=escape(_environment(results)),
        payload=_json(page_data(results)),
        css=_asset("page.css"),
        chart_css=_asset("uPlot.min.css"),
        chart_js=_asset("uPlot.iife.min.js"),
        js="\n".join(map(_asset, SCRIPTS)),
    )


def bootstrap_coverage() -> str:
    """Return how often bootstrap 95 % intervals of few pairs cover the true mean."""
    cases: list[str] = []
    for pairs, share in COVERAGE.items():
        cases.append(f"{100 * share:.0f} % of studies with {pairs} pairs")
    return f"covers the true mean in about {', '.join(cases)}"


def _asset(name: str) -> str:
    folder = resources.files("fedglimpse.studies.report").joinpath("assets")
    return folder.joinpath(name).read_text("utf-8")


def _json(value: Mapping[str, Any]) -> str:
    """Write JSON that cannot end the script element that contains it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _section(name: str, title: str, body: str) -> str:
    if not body:
        return ""
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>'


def _answer(results: Results) -> str:
    control = escape(str(results.control))
    lead = (
        f'<p class="lead">In how many settings each method differs from <b>{control}</b>, by seeds '
        "that both have run. A difference is significant only if it survives the correction for "
        "multiple comparisons.</p>"
    )
    counts = control_counts(results)
    if not counts:
        return ""
    return _section("answer", "Is any difference significant?", lead + counts)


def _configured_rounds(results: Results) -> list[int]:
    """Return the different lengths of the study's runs."""
    return sorted({int(cell.config["rounds"]) for cell in results.study.cells if cell.config})


def _facts(results: Results) -> str:
    study = results.study
    facts = {
        "Runs finished": f"{study.count('finished')} of {len(study.cells)}",
        "Settings": str(len(study.settings)),
        "Methods": str(len(study.variants)),
        "Seeds": str(len(study.seeds)),
        "Rounds": ", ".join(map(str, _configured_rounds(results))) or "–",
    }
    if results.control:
        facts["Control"] = results.control
    entries = ""
    for name, value in facts.items():
        entries += f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
    return entries


def _final_text(results: Results) -> str:
    windows = sorted(set(map(final_window, _configured_rounds(results))))
    last_rounds = " or ".join(map(str, windows)) or "few"
    text = (
        f"Mean test accuracy over the last {last_rounds} rounds, then over seeds, ± standard "
        "deviation over seeds. <b>± rounds</b> is the deviation of one run over those rounds. "
    )
    if results.control:
        text += "Differences are in points, paired by seed, with a 95 % t interval. "
    if any(row.published for row in results.rows):
        source = (results.study.paper or {}).get("source", "the paper")
        text += f"Paper: {escape(source)}; the interval of ours − paper is Welch's."
    return text


def _missing(results: Results) -> str:
    cells = len(results.study.cells)
    unfinished = missing(results)
    diverging = diverged(results)
    preliminary = _listed(
        f"{len(unfinished)} of {cells} runs have not finished; these results are preliminary.",
        unfinished,
    )
    unpaired = drawn_differently(results)
    return (
        preliminary
        + _listed(f"{len(diverging)} of {cells} runs have diverged.", diverging)
        + _listed("Not all runs of a setting share their random draws.", unpaired)
    )


def _listed(text: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = [f"<li>{escape(line)}</li>" for line in lines[:MOST_LISTED]]
    if len(lines) > MOST_LISTED:
        items.append(f"<li>and {len(lines) - MOST_LISTED} more</li>")
    return f'<div class="missing">{text}<ul>{"".join(items)}</ul></div>'


def _environment(results: Results) -> str:
    """Return on what it was run: one entry for each different machine."""
    machines: set[str] = set()
    for cell in results.study.cells:
        if cell.environment:
            versions: list[str] = []
            for name in MACHINE:
                if cell.environment.get(name):
                    versions.append(f"{name} {cell.environment[name]}")
            machines.add(", ".join(versions))
    return f"Run with {'; '.join(sorted(machines))}." if machines else ""


def page_data(results: Results) -> dict[str, Any]:
    """Return everything the scripts need, as plain JSON values."""
    study = results.study
    curves: dict[str, list[dict[str, Any]]] = {}
    for setting in study.settings:
        curves[setting] = list(map(_curves, results.of(setting)))
    targets: dict[str, float] = {}
    for setting, target in results.targets.items():
        targets[setting] = target.value
    bitmaps: list[str] = []  # runs of one seed see the same clients: each raster is stored once
    runs = [_run(cell, bitmaps) for cell in study.cells if cell.trace is not None]
    return {
        "settings": study.settings,
        "variants": study.variants,
        "control": results.control,
        "targets": targets,
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
        partitions[partition.setting] = {
            "seed": partition.seed,
            "counts": partition.counts,
        }
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
    means: list[float] = []
    for point in zip(*seeds, strict=True):
        means.append(float(f"{fmean(point):.5g}"))
    return means


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
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
