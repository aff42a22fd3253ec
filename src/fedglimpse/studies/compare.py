"""The table that `fedglimpse compare` prints: the report's statistics for runs just finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedglimpse.config.schema import Config
from fedglimpse.runs.summary import final_window
from fedglimpse.studies.report.analysis import MEASURES, Options, ReportRow, Results, analyse
from fedglimpse.studies.report.numbers import amount, cost, percent, t_interval
from fedglimpse.studies.results.study import CellResult, Study
from fedglimpse.studies.statistics.condense import condense

SETTING = "compared"  # all methods of a comparison run in one setting, which needs no name


@dataclass(frozen=True)
class ComparedRun:
    """What a comparison shows of a finished run."""

    config: Config
    records: Sequence[dict[str, Any]]  # of all seeds


def comparison_table(results: Sequence[ComparedRun], target: float | None = None) -> str:
    """Return a Markdown table with one line for each method, and how to read it.

    Args:
        results: one finished run for each method, over the same seeds.
        target: accuracy to reach; None: 90 % of the best method's.
    """
    analysis = analyse(_study_of(results), Options(target=target))
    reached = percent(analysis.targets[SETTING].value)
    header = [
        "method",
        "accuracy %",
        f"minus {analysis.control} [95 % interval]",
        "verdict",
        f"rounds to {reached} %",
        "uplink",
    ]
    lines = [_line(row, analysis.control) for row in analysis.rows]
    window = final_window(results[0].config.rounds)
    table = _markdown([header, *lines])
    return f"{table}\n\n{_legend(analysis, window)}"


def _study_of(results: Sequence[ComparedRun]) -> Study:
    cells: list[CellResult] = []
    for result in results:
        config = result.config.flat()
        for seed in result.config.seeds:
            records = [record for record in result.records if record["seed"] == seed]
            cells.append(_cell(config, seed, records))
    return Study(
        title="",
        claim="",
        control=None,
        targets={},
        paper=None,
        cells=cells,
    )


def _cell(config: dict[str, Any], seed: int, records: list[dict[str, Any]]) -> CellResult:
    method = str(config["method"])
    return CellResult(
        id=f"{method}-{seed}",
        setting=SETTING,
        variant=method,
        seed=seed,
        state="finished",
        config=config,
        facts=condense(records, config["rounds"]),
    )


def _line(row: ReportRow, control: str | None) -> list[str]:
    name = f"{row.variant} (oracle)" if row.oracle else row.variant
    accuracy = "–" if row.spread is None else row.spread.over_seeds.text()
    if row.variant == control:
        comparison = ["(control)", ""]
    elif row.control is None:
        comparison = ["–", ""]
    else:
        comparison = [t_interval(row.control.difference), row.control.in_words]
    _, unit = MEASURES["rounds"]
    return [
        name,
        accuracy,
        *comparison,
        cost(row.to_target["rounds"], unit),
        amount(_mean_uplink(row), "B"),
    ]


def _mean_uplink(row: ReportRow) -> float:
    totals: list[int] = []
    for cell in row.cells:
        if cell.facts is not None:
            totals.append(cell.facts.climb.totals["uplink_bytes"])
    return fmean(totals)


def _legend(analysis: Results, window: int) -> str:
    seeds = len(analysis.rows[0].cells)
    lines = [
        f"accuracy: mean over {seeds} seed{'' if seeds == 1 else 's'} of the last {window} rounds, "
        "± half of its 95 % t interval.",
    ]
    if seeds > 1:
        lines.append(
            f"minus {analysis.control}: in percentage points, paired by seed; significant: p < "
            "0.05 after Holm's correction."
        )
    else:
        lines.append(
            "One seed says nothing about significance: run several, such as seeds=[0,1,2]."
        )
    lines.append("uplink: sent by clients in the whole run, mean over seeds.")
    return "\n".join(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table with aligned columns, which also reads well in a terminal."""
    widths: list[int] = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(len, column)))
    rows: list[str] = []
    for line in lines:
        cells = map(str.ljust, line, widths)
        rows.append(f"| {' | '.join(cells)} |")
    rule = "|".join("-" * (width + 2) for width in widths)
    rows.insert(1, f"|{rule}|")
    return "\n".join(rows)
