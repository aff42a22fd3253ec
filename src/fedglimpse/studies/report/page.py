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
from fedglimpse.studies.report import sections
from fedglimpse.studies.report.analysis import Results
from fedglimpse.studies.report.bars import cost_bars
from fedglimpse.studies.report.numbers import covers
from fedglimpse.studies.report.payload import payload
from fedglimpse.studies.report.terminal import diverged, missing
from fedglimpse.version import VERSION

SCRIPTS = ("colours.js", "tip.js", "filters.js", "curves.js", "raster.js", "agent.js", "main.js")


def page(results: Results) -> str:
    """Return the whole report as one HTML file that needs nothing else."""
    study = results.study
    return Template(_asset("page.html")).substitute(
        version=VERSION,
        title=escape(study.title),
        claim=f'<p class="claim">{escape(study.claim)}</p>' if study.claim else "",
        facts="".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in _facts(results)),
        missing=_missing(results),
        answer=_answer(results),
        final_text=_final_text(results),
        results=sections.result_tables(results),
        bars=cost_bars(results),
        fairness=sections.fairness_table(results),
        paper=_section("paper", "What the paper says", sections.claims(results)),
        reading=Template(_asset("reading.html")).substitute(covers=covers()),
        report_command=escape(f"fedglimpse report {shlex.quote(study.source)}"),
        commands=sections.commands(results),
        environment=escape(_environment(results)),
        payload=_json(payload(results)),
        css=_asset("page.css"),
        chart_css=_asset("uPlot.min.css"),
        chart_js=_asset("uPlot.iife.min.js"),
        js="\n".join(_asset(name) for name in SCRIPTS),
    )


def _asset(name: str) -> str:
    return resources.files("fedglimpse.studies.report").joinpath("assets", name).read_text("utf-8")


def _json(value: Mapping[str, Any]) -> str:
    """Write JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>' if body else ""


def _answer(results: Results) -> str:
    control = escape(str(results.control))
    lead = (
        f'<p class="lead">In how many settings each method differs from <b>{control}</b>, by seeds '
        "that both have run. A difference counts as real only if it survives the correction for "
        "looking at many.</p>"
    )
    body = sections.answer(results)
    return _section("answer", "Is any difference real?", lead + body) if body else ""


def _facts(results: Results) -> list[tuple[str, str]]:
    study = results.study
    seeds = sorted({cell.seed for cell in study.cells})
    rounds = sorted({int(c.config["rounds"]) for c in study.cells if c.config})
    done = f"{study.count('finished')} of {len(study.cells)}"
    found = [
        ("Runs finished", done),
        ("Settings", str(len(study.settings))),
        ("Methods", str(len(study.variants))),
        ("Seeds", str(len(seeds))),
        ("Rounds", ", ".join(map(str, rounds)) or "–"),
    ]
    return [*found, ("Control", results.control)] if results.control else found


def _final_text(results: Results) -> str:
    windows = sorted(
        {final_window(int(c.config["rounds"])) for c in results.study.cells if c.config}
    )
    over = " or ".join(map(str, windows)) or "some"
    text = (
        f"Mean test accuracy over the last {over} rounds, then over seeds, ± standard deviation "
        "over seeds. <b>± rounds</b> is the deviation of one run over those rounds. "
    )
    if results.control:
        text += "Differences are in points, paired by seed, with a bootstrap 95 % interval that "
        text += f"{covers()}. "
    if any(row.beside for row in results.rows):
        source = (results.study.paper or {}).get("source", "the paper")
        text += f"Paper: {escape(source)}; the interval of ours − paper is Welch's."
    return text


def _missing(results: Results) -> str:
    cells, lines, bad = len(results.study.cells), missing(results), diverged(results)
    text = f"{len(lines)} of {cells} runs have not finished; what follows is not the last word."
    return _listed(text, lines) + _listed(f"{len(bad)} of {cells} runs have diverged.", bad)


def _listed(text: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines[:8])
    more = f"<li>and {len(lines) - 8} more</li>" if len(lines) > 8 else ""
    return f'<div class="missing">{text}<ul>{items}{more}</ul></div>'


def _environment(results: Results) -> str:
    """Say on what it was run: one line for each different machine."""
    names = ("fedglimpse", "python", "torch", "platform", "gpu")
    lines = {
        ", ".join(f"{n} {c.environment[n]}" for n in names if c.environment.get(n))
        for c in results.study.cells
        if c.environment
    }
    return "Run with " + "; ".join(sorted(lines)) + "." if lines else ""
