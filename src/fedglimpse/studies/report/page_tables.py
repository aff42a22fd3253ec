"""The tables and bars of the page, readable without scripts; texts of a study are escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from fedglimpse.studies.report.analysis import MEASURES, Comparison, ReportRow, Results
from fedglimpse.studies.report.numbers import (
    cost,
    interval,
    mean_and_std,
    p_value,
    percent,
    signed,
    t_interval,
)
from fedglimpse.studies.statistics.difference import NOT_SIGNIFICANT
from fedglimpse.studies.statistics.to_target import ToTarget

Line = tuple[str, Sequence[str]]  # attributes of a table's row, and the HTML of its cells
FOREST_WIDTH = 104
FOREST_HEIGHT = 18
KINDS = {  # kind of a verdict -> title of its column
    "up": "▲ significantly higher",
    "noise": "not significant",
    "down": "▼ significantly lower",
    "unknown": "inconclusive",
}
LATECOMERS_HEADER = {
    "setting": "where",
    "variant": "who",
    "late-comers": "num",
    "accuracy on their data, %": "num",
    "on that of the first, %": "num",
}
FAIRNESS_HEADER = {
    "setting": "where",
    "variant": "who",
    "Jain, chosen": "num",
    "Jain, visible": "num",
    "visits: fewest · median · most": "num",
    "never chosen": "num",
    "classes in a round, %": "num",
}


def control_counts(results: Results) -> str:
    """Return, for every variant, in how many settings it differs from the control."""
    if results.control is None:
        return ""
    kinds_of: dict[str, Counter[str]] = {}
    gaps_of: dict[str, list[float]] = {}
    for row in results.rows:
        if row.variant != results.control:
            kinds_of.setdefault(row.variant, Counter())[_kind(row.control)] += 1
            gaps = gaps_of.setdefault(row.variant, [])
            if row.control is not None:
                gaps.append(row.control.difference.mean)
    lines: list[Line] = []
    for variant, kinds in kinds_of.items():
        counts = [_count(kinds[kind]) for kind in KINDS]
        mean_gap = signed(fmean(gaps_of[variant])) if gaps_of[variant] else "–"
        lines.append((_tags("", variant), [_name_of(variant), *counts, mean_gap]))
    header = {"variant": "who", **dict.fromkeys(KINDS.values(), "num"), "mean, points": "num"}
    return _table(header, lines, "answer")


def _kind(comparison: Comparison | None) -> str:
    """Return up or down for significant differences, noise, or unknown."""
    if comparison is None:
        return "unknown"
    if comparison.significant:
        return "up" if comparison.difference.mean > 0 else "down"
    return "noise" if comparison.verdict == NOT_SIGNIFICANT else "unknown"


def _count(number: int) -> str:
    return f"<b>{number}</b>" if number else '<span class="none">0</span>'


def result_tables(results: Results) -> str:
    """Return one table for each setting."""
    return "".join(_result_table(results, setting) for setting in results.study.settings)


def _result_table(results: Results, setting: str) -> str:
    rows = results.of(setting)
    with_paper = any(row.published for row in rows)
    header = {"variant": "who", "accuracy %": "num main", "± rounds": "num", "seeds": "num"}
    if results.control:
        header |= {f"minus {results.control}": "gap own", "": "forest"}
    if with_paper:
        header |= {"paper %": "num", "ours − paper": "gap"}
    header["repeat"] = "copy"
    scale = _forest_scale(results)
    lines: list[Line] = []
    for row in rows:
        attributes = _tags(row.setting, row.variant, verdict=_kind(row.control))
        lines.append((attributes, _result_cells(results, row, scale, with_paper)))
    return (
        f'<div class="setting" data-setting="{escape(setting)}"><h3>{escape(setting)}</h3>'
        f"{_table(header, lines, 'results cards')}{_deviations(rows)}</div>"
    )


def _result_cells(results: Results, row: ReportRow, scale: float, with_paper: bool) -> list[str]:
    spread = row.spread
    is_control = row.variant == results.control
    accuracy = "–" if spread is None else mean_and_std(spread)
    note = "oracle" if row.oracle else "control" if is_control else ""
    cells = [
        _name_of(row.variant, note),
        f"<b>{accuracy}</b>" if row.best else accuracy,
        "–" if spread is None else percent(spread.over_rounds),
        _seeds(row),
    ]
    if is_control:
        cells += ["", ""]
    elif results.control:
        cells += [_difference(row.control), _forest(row.control, scale)]
    if with_paper:
        published = "–"
        if row.published:
            figure = row.published.figure
            published = f"{percent(figure.mean)} ± {percent(figure.std)}"
        cells += [published, _difference(row.paper, neutral=True)]
    number = results.rows.index(row)
    link = f'<a class="copy" href="#command-{number}">command</a>'
    return [*cells, link if row.command else ""]


def _seeds(row: ReportRow) -> str:
    if row.finished == len(row.cells):
        return str(row.finished)
    states = Counter(cell.state for cell in row.cells)
    del states["finished"]
    title = ", ".join(f"{number} {state}" for state, number in states.items())
    return f'<span class="short" title="{title}">{row.finished} of {len(row.cells)}</span>'


def _difference(comparison: Comparison | None, neutral: bool = False) -> str:
    """Return a difference in points with its verdict, and its p-value on hover.

    Args:
        comparison: None if there is nothing to compare with.
        neutral: being higher is neither good nor bad.
    """
    if comparison is None:
        return '<span class="none">–</span>'
    difference = comparison.difference
    kind = _kind(comparison)
    mark = {"up": "▲ ", "down": "▼ "}.get(kind, "")
    title = f"p = {p_value(comparison.p)} after Holm's correction; {difference.pairs} seeds"
    if difference.low is not None:
        title += f"; interval that decides: {interval(difference)}"
    colour = "apart" if neutral and comparison.significant else kind
    return (
        f'<span class="difference">{escape(t_interval(difference))}</span> '
        f'<span class="verdict {colour}" title="{escape(title)}">{mark}{comparison.verdict}</span>'
    )


def _forest_scale(results: Results) -> float:
    """Return the share at the end of the interval drawings: the largest end of all intervals."""
    ends: list[float] = []
    for row in results.rows:
        if row.control is not None and row.control.difference.t_interval is not None:
            low, high = row.control.difference.t_interval
            ends += [abs(low), abs(high)]
    return max(ends, default=0.01) or 0.01


def _forest(comparison: Comparison | None, scale: float) -> str:
    """Draw a difference and its t interval around zero."""
    middle = FOREST_WIDTH / 2
    y = FOREST_HEIGHT / 2
    shapes = [f'<line class="zero" x1="{middle}" x2="{middle}" y1="1" y2="{FOREST_HEIGHT - 1}"/>']
    if comparison is not None:
        difference = comparison.difference
        if difference.t_interval is not None:
            low, high = difference.t_interval
            x1 = _forest_x(low, scale)
            x2 = _forest_x(high, scale)
            shapes.append(f'<line class="range" x1="{x1}" x2="{x2}" y1="{y}" y2="{y}"/>')
        x = _forest_x(difference.mean, scale)
        shapes.append(f'<circle cx="{x}" cy="{y}" r="3.5"/>')
    kind = "none" if comparison is None else _kind(comparison)
    return (
        f'<svg class="forest {kind}" viewBox="0 0 {FOREST_WIDTH} {FOREST_HEIGHT}" '
        f'width="{FOREST_WIDTH}" height="{FOREST_HEIGHT}" aria-hidden="true">'
        f"{''.join(shapes)}</svg>"
    )


def _forest_x(value: float, scale: float) -> float:
    middle = FOREST_WIDTH / 2
    return round(middle + (middle - 5) * max(-1.0, min(1.0, value / scale)), 1)


def _deviations(rows: Sequence[ReportRow]) -> str:
    """Return in what our runs depart from what the paper describes."""
    deviations: dict[str, None] = {}
    for row in rows:
        if row.published:
            deviations |= dict.fromkeys(row.published.deviations)
    if not deviations:
        return ""
    return f'<p class="aside">Not as in the paper: {escape("; ".join(deviations))}.</p>'


def fairness_table(results: Results) -> str:
    """Return how evenly clients took part."""
    lines: list[Line] = []
    for row in results.rows:
        fairness = row.fairness
        if fairness is None:
            continue
        covered = "–"
        if fairness.classes_covered is not None:
            covered = percent(fairness.classes_covered, 0)
        cells = [
            escape(row.setting),
            _name_of(row.variant),
            f"{fairness.jain:.2f}",
            f"{fairness.jain_of_seen:.2f}",
            f"{fairness.fewest} · {fairness.median:.0f} · {fairness.most}",
            f"{fairness.never:.1f}",
            covered,
        ]
        lines.append((_tags(row.setting, row.variant), cells))
    return _table(FAIRNESS_HEADER, lines, "fairness cards")


def latecomers_table(results: Results) -> str:
    """Return how well the last models do for clients that came after round 0; empty without any."""
    lines: list[Line] = []
    for row, means in results.with_latecomers:
        cells = [
            escape(row.setting),
            _name_of(row.variant),
            f"{means['clients']:.0f}",
            percent(means["accuracy"]),
            percent(means["accuracy_of_first"]),
        ]
        lines.append((_tags(row.setting, row.variant), cells))
    if not lines:
        return ""
    lead = (
        "Accuracy of the model after the last round on the training examples of clients that came "
        "after round 0, chosen or not, and on those of the clients that were there in round 0; "
        "means over seeds."
    )
    return (
        f'<h3>Late-comers</h3><p class="lead">{lead}</p>'
        f"{_table(LATECOMERS_HEADER, lines, 'fairness cards')}"
    )


def commands(results: Results) -> str:
    """Return the command behind every row."""
    items: list[str] = []
    for number, row in enumerate(results.rows):
        if row.command:
            items.append(
                f'<li id="command-{number}" {_tags(row.setting, row.variant)}>'
                f"<p>{escape(row.setting)} · {escape(row.variant)}</p>"
                f"<pre><code>{escape(row.command)}</code></pre></li>"
            )
    return f'<ol class="commands">{"".join(items)}</ol>'


def paper_claims(results: Results) -> str:
    """Return what the paper claims, with where it says so."""
    paper = results.study.paper
    if paper is None:
        return ""
    items: list[str] = []
    for claim in paper.get("claims", ()):
        note = f' <span class="note">{escape(claim["note"])}</span>' if "note" in claim else ""
        source = f'<span class="where">{escape(claim["source"])}</span>'
        items.append(f"<li>{escape(claim['text'])}.{note} {source}</li>")
    title = f"{escape(paper['title'])} <span class='where'>{escape(paper['source'])}</span>"
    return f"<p>{title}</p><ul>{''.join(items)}</ul>"


def cost_bars(results: Results) -> str:
    """Return the cost to target as bars: solid if every seed reached it, open if some did not."""
    return "".join(_cost_bars_of(results, setting) for setting in results.study.settings)


def _cost_bars_of(results: Results, setting: str) -> str:
    target = results.targets.get(setting)
    if target is None:
        return ""
    rows = results.of(setting)
    origin = "" if target.given else ", 90 % of the best final accuracy"
    groups = "".join(_bars_of_measure(rows, measure) for measure in MEASURES)
    return (
        f'<div class="setting" data-setting="{escape(setting)}"><h3>{escape(setting)} '
        f'<span class="note">to {percent(target.value)} %{origin}</span></h3>{groups}</div>'
    )


def _bars_of_measure(rows: Sequence[ReportRow], measure: str) -> str:
    longest = 0.0
    for row in rows:
        if measure in row.to_target:
            longest = max([longest, *row.to_target[measure].amounts])
    longest = longest * 1.02 or 1
    bars: list[str] = []
    for row in rows:
        if measure in row.to_target:
            bars.append(_bar(row, row.to_target[measure], measure, longest))
    title = escape(MEASURES[measure][0])
    return f'<div class="bars" data-measure="{measure}"><h4>{title}</h4>{"".join(bars)}</div>'


def _bar(row: ReportRow, to_target: ToTarget, measure: str, longest: float) -> str:
    saving = row.savings.get(measure)
    ticks: list[str] = []
    for run in to_target.runs:
        css = "tick" if run.reached else "tick miss"
        ticks.append(f'<i class="{css}" style="left:{100 * run.amount / longest:.1f}%"></i>')
    kind = "exact" if to_target.exact else "open"
    return (
        f'<div class="bar" {_tags(row.setting, row.variant)}>{_name_of(row.variant)}'
        f'<span class="track"><span class="fill {kind}" data-fill="{escape(row.variant)}" '
        f'style="width:{100 * to_target.at_least / longest:.1f}%"></span>{"".join(ticks)}</span>'
        f'<span class="amount">{escape(cost(to_target, MEASURES[measure][1]))}</span>'
        f'<span class="saving">{escape(saving.text()) if saving else ""}</span></div>'
    )


def _table(header: Mapping[str, str], lines: Sequence[Line], css: str) -> str:
    """Return a table that becomes a list of cards on a narrow screen.

    Args:
        header: column title -> class of its cells.
        lines: the rows.
        css: class of the table.
    """
    titles: list[str] = []
    for title, kind in header.items():
        titles.append(f'<th scope="col" class="{kind}">{escape(title)}</th>')
    body: list[str] = []
    for attributes, cells in lines:
        columns: list[str] = []
        for (title, kind), cell in zip(header.items(), cells, strict=True):
            value = f'<span class="value">{cell}</span>' if cell else ""
            columns.append(f'<td class="{kind}" data-label="{escape(title)}">{value}</td>')
        body.append(f"<tr {attributes}>{''.join(columns)}</tr>")
    return (
        f'<table class="{css}"><thead><tr>{"".join(titles)}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _tags(setting: str, variant: str, **more_tags: str) -> str:
    """Return the data attributes that the page's filters read."""
    tags = {"setting": setting, "variant": variant, **more_tags}
    return " ".join(f'data-{name}="{escape(value)}"' for name, value in tags.items())


def _name_of(variant: str, note: str = "") -> str:
    """Return a variant's name with the dot of its colour."""
    suffix = f' <span class="note">{escape(note)}</span>' if note else ""
    dot = f'<i class="dot" data-dot="{escape(variant)}"></i>'
    return f'<span class="name">{dot}{escape(variant)}{suffix}</span>'
