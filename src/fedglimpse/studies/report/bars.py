"""Cost to target as bars: solid where every seed arrived, open where some did not."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedglimpse.studies.report.analysis import Results, Row
from fedglimpse.studies.report.markup import name_of, tags
from fedglimpse.studies.report.numbers import MEASURES, cost, percent
from fedglimpse.studies.statistics.censored import ToTarget


def cost_bars(results: Results) -> str:
    """Return one block for each setting, with a group of bars for each measure."""
    return "".join(_setting(results, setting) for setting in results.study.settings)


def _setting(results: Results, setting: str) -> str:
    target, rows = results.targets.get(setting), results.of(setting)
    if target is None:
        return ""
    origin = "" if target.given else ", 90 % of the best final accuracy"
    groups = "".join(_group(rows, measure) for measure in MEASURES)
    return (
        f'<div class="setting" data-setting="{escape(setting)}"><h3>{escape(setting)} '
        f'<span class="note">to {percent(target.value)} %{origin}</span></h3>{groups}</div>'
    )


def _group(rows: Sequence[Row], measure: str) -> str:
    costs = [(row, row.to_target[measure]) for row in rows if measure in row.to_target]
    longest = max((run.amount for _, found in costs for run in found.runs), default=0) * 1.02 or 1
    lines = "".join(_bar(row, found, measure, longest) for row, found in costs)
    title = escape(MEASURES[measure][0])
    return f'<div class="bars" data-measure="{measure}"><h4>{title}</h4>{lines}</div>'


def _bar(row: Row, found: ToTarget, measure: str, longest: float) -> str:
    saved = row.savings.get(measure)
    ticks = "".join(
        f'<i class="tick{"" if run.reached else " miss"}" '
        f'style="left:{100 * run.amount / longest:.1f}%"></i>'
        for run in found.runs
    )
    kind = "exact" if found.exact else "open"
    return (
        f'<div class="bar" {tags(row.setting, row.variant)}>{name_of(row.variant)}'
        f'<span class="track"><span class="fill {kind}" data-fill="{escape(row.variant)}" '
        f'style="width:{100 * found.at_least / longest:.1f}%"></span>{ticks}</span>'
        f'<span class="amount">{escape(cost(found, MEASURES[measure][1]))}</span>'
        f'<span class="saving">{escape(saved.text()) if saved else ""}</span></div>'
    )
