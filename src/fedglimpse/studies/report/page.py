"""One self-contained HTML page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from fedglimpse.runs.summary import final_window
from fedglimpse.studies.report import page_tables
from fedglimpse.studies.report.analysis import Results
from fedglimpse.studies.report.page_data import page_data
from fedglimpse.studies.report.terminal import diverged, missing
from fedglimpse.studies.statistics.difference import COVERAGE
from fedglimpse.version import VERSION

SCRIPTS = ("colours.js", "tip.js", "filters.js", "curves.js", "raster.js", "agent.js", "main.js")
MOST_LISTED = 8  # lines of missing or diverged runs at the top of the page
MACHINE = ("fedglimpse", "python", "torch", "platform", "gpu")


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
        results=page_tables.result_tables(results),
        bars=page_tables.cost_bars(results),
        fairness=page_tables.fairness_table(results),
        paper=_section("paper", "What the paper says", page_tables.paper_claims(results)),
        reading=Template(_asset("reading.html")).substitute(coverage=bootstrap_coverage()),
        report_command=escape(f"fedglimpse report {shlex.quote(study.source)}"),
        commands=page_tables.commands(results),
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
    return resources.files("fedglimpse.studies.report").joinpath("assets", name).read_text("utf-8")


def _json(value: Mapping[str, Any]) -> str:
    """Write JSON that cannot end the script element that contains it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>' if body else ""


def _answer(results: Results) -> str:
    control = escape(str(results.control))
    lead = (
        f'<p class="lead">In how many settings each method differs from <b>{control}</b>, by seeds '
        "that both have run. A difference is significant only if it survives the correction for "
        "multiple comparisons.</p>"
    )
    counts = page_tables.control_counts(results)
    return _section("answer", "Is any difference significant?", lead + counts) if counts else ""


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
    text = f"{len(unfinished)} of {cells} runs have not finished; these results are preliminary."
    return _listed(text, unfinished) + _listed(
        f"{len(diverging)} of {cells} runs have diverged.", diverging
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
