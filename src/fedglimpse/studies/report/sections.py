"""The tables of the page, readable without scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from statistics import fmean

from fedglimpse.studies.report.analysis import Results, Row
from fedglimpse.studies.report.markup import forest, name_of, table, tags, verdict, verdict_class
from fedglimpse.studies.report.numbers import mean_and_std, percent, signed

KINDS = {"up": "▲ better", "noise": "within noise", "down": "▼ worse", "unknown": "cannot tell"}


def answer(results: Results) -> str:
    """Return, for every variant, in how many settings it beats the control."""
    if results.control is None:
        return ""
    found = {v: [r for r in results.rows if r.variant == v] for v in results.study.variants}
    kinds = {v: [_kind(r) for r in rows] for v, rows in found.items() if v != results.control}
    shown = [k for k in KINDS if k != "unknown" or any(k in of for of in kinds.values())]
    rows = []
    for variant, of in kinds.items():
        gaps = [r.control.difference.mean for r in found[variant] if r.control is not None]
        counts = [_count(of.count(kind)) for kind in shown]
        cells = [name_of(variant), *counts, signed(fmean(gaps)) if gaps else "–"]
        rows.append((tags("", variant), cells))
    head = {"variant": "who", **{KINDS[kind]: "num" for kind in shown}, "mean, points": "num"}
    return table(head, rows, "answer")


def _kind(row: Row) -> str:
    return "unknown" if row.control is None else verdict_class(row.control)


def _count(number: int) -> str:
    return f"<b>{number}</b>" if number else '<span class="none">0</span>'


def result_tables(results: Results) -> str:
    """Return one table for each setting."""
    return "".join(_setting(results, setting) for setting in results.study.settings)


def _setting(results: Results, setting: str) -> str:
    rows = results.of(setting)
    with_paper = any(row.beside for row in rows)
    ends = [
        abs(end)
        for row in results.rows
        if row.control is not None
        for end in (row.control.difference.low, row.control.difference.high)
        if end is not None
    ]
    reach = max(ends, default=0.01) or 0.01
    head = {"variant": "who", "accuracy %": "num main", "± rounds": "num", "seeds": "num"}
    if results.control:
        head |= {f"against {results.control}": "gap own", "": "forest"}
    if with_paper:
        head |= {"paper %": "num", "ours − paper": "gap"}
    head |= {"repeat": "copy"}
    body = [(_tags(row), _cells(results, row, reach, with_paper)) for row in rows]
    return (
        f'<div class="setting" data-setting="{escape(setting)}"><h3>{escape(setting)}</h3>'
        f"{table(head, body, 'results cards')}{_deviations(rows)}</div>"
    )


def _tags(row: Row) -> str:
    return tags(row.setting, row.variant, verdict=_kind(row))


def _cells(results: Results, row: Row, reach: float, with_paper: bool) -> list[str]:
    spread, control = row.spread, row.variant == results.control
    accuracy = "–" if spread is None else mean_and_std(spread)
    note = "oracle" if row.oracle else "control" if control else ""
    cells = [
        name_of(row.variant, note),
        f"<b>{accuracy}</b>" if row.best else accuracy,
        "–" if spread is None else percent(spread.over_rounds),
        _seeds(row),
    ]
    if results.control:
        cells += [
            "" if control else verdict(row.control),
            "" if control else forest(row.control, reach),
        ]
    if with_paper:
        figure = row.beside.figure if row.beside else None
        cells.append("–" if figure is None else f"{percent(figure.mean)} ± {percent(figure.std)}")
        cells.append(verdict(row.paper, neutral=True))
    number = results.rows.index(row)
    cells.append(f'<a class="copy" href="#command-{number}">command</a>' if row.command else "")
    return cells


def _seeds(row: Row) -> str:
    if row.finished == len(row.cells):
        return str(row.finished)
    counts = Counter(c.state for c in row.cells if c.state != "finished")
    title = ", ".join(f"{number} {state}" for state, number in counts.items())
    return f'<span class="short" title="{title}">{row.finished} of {len(row.cells)}</span>'


def _deviations(rows: Sequence[Row]) -> str:
    """Say in what our runs are not what the paper describes."""
    found = list(dict.fromkeys(d for r in rows if r.beside for d in r.beside.deviations))
    if not found:
        return ""
    return f'<p class="aside">Not as in the paper: {escape("; ".join(found))}.</p>'


def fairness_table(results: Results) -> str:
    """Return how evenly clients took part."""
    rows = []
    for row in results.rows:
        f = row.fairness
        if f is None:
            continue
        covered = "–" if f.classes_covered is None else percent(f.classes_covered, 0)
        cells = [
            escape(row.setting),
            name_of(row.variant),
            f"{f.jain:.2f}",
            f"{f.jain_of_seen:.2f}",
            f"{f.fewest} · {f.median:.0f} · {f.most}",
            f"{f.never:.1f}",
            covered,
        ]
        rows.append((tags(row.setting, row.variant), cells))
    head = {
        "setting": "where",
        "variant": "who",
        "Jain, chosen": "num",
        "Jain, visible": "num",
        "visits: fewest · median · most": "num",
        "never chosen": "num",
        "classes in a round, %": "num",
    }
    return table(head, rows, "fairness cards")


def commands(results: Results) -> str:
    """Return the command behind every row."""
    items = [
        f'<li id="command-{i}" {tags(row.setting, row.variant)}>'
        f"<p>{escape(row.setting)} · {escape(row.variant)}</p>"
        f"<pre><code>{escape(row.command)}</code></pre></li>"
        for i, row in enumerate(results.rows)
        if row.command
    ]
    return f'<ol class="commands">{"".join(items)}</ol>'


def claims(results: Results) -> str:
    """Return what the paper says, with where it says so."""
    paper = results.study.paper
    if paper is None:
        return ""
    items = []
    for claim in paper.get("claims", ()):
        note = f' <span class="note">{escape(claim["note"])}</span>' if "note" in claim else ""
        source = f'<span class="where">{escape(claim["source"])}</span>'
        items.append(f"<li>{escape(claim['text'])}.{note} {source}</li>")
    title = f"{escape(paper['title'])} <span class='where'>{escape(paper['source'])}</span>"
    return f"<p>{title}</p><ul>{''.join(items)}</ul>"
