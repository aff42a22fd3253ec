"""What a target accuracy cost, and how evenly clients took part."""

from __future__ import annotations

from fedglimpse.studies.report.analysis import DEFAULT_TARGET, MEASURES, ReportRow, Results
from fedglimpse.studies.report.numbers import cost, percent
from fedglimpse.studies.statistics.condense import SMOOTHED_OVER
from reproduction.markdown import table

LEGEND = (
    f"A target is reached when the mean over {SMOOTHED_OVER} scored rounds gets there. "
    "`33 [30–36]`: mean over seeds, cheapest and dearest. `≥ 30 (2 of 3)`: a lower bound, one "
    "seed missed. `> 80 (0 of 3)`: not reached."
)
COST_HEADER = (
    "variant",
    "seeds that got there",
    *(name for name, _ in MEASURES.values()),
)
PARTICIPATION_HEADER = (
    "variant",
    "Jain, chosen",
    "Jain, visible",
    "visits: fewest · median · most",
    "never chosen",
    "classes in a round, %",
)


def to_target(results: Results, setting: str) -> str:
    """Return the costs of one setting's target; empty if it has none."""
    target = results.targets.get(setting)
    rows = [_cost_row(row) for row in results.of(setting) if row.to_target]
    if target is None or not rows:
        return ""
    accuracy = f"{percent(target.value)} %"
    if not target.given:
        accuracy = f"{percent(DEFAULT_TARGET, 0)} % of the best accuracy here, {accuracy}"
    return f"Costs until {accuracy}:\n\n{table(COST_HEADER, rows)}"


def _cost_row(row: ReportRow) -> list[str]:
    rounds = row.to_target["rounds"]
    cells = [row.variant, f"{rounds.reached} of {len(rounds.runs)}"]
    for measure, (_, unit) in MEASURES.items():
        cells.append(cost(row.to_target[measure], unit))
    return cells


def participation(results: Results, setting: str) -> str:
    """Return how evenly clients were chosen in one setting; empty if it is not known."""
    rows: list[list[str]] = []
    for row in results.of(setting):
        fairness = row.fairness
        if fairness is None:
            continue
        covered = fairness.classes_covered
        rows.append(
            [
                row.variant,
                f"{fairness.jain:.2f}",
                f"{fairness.jain_of_seen:.2f}",
                f"{fairness.fewest} · {fairness.median:.0f} · {fairness.most}",
                f"{fairness.never:.1f}",
                "–" if covered is None else percent(covered, 0),
            ]
        )
    return f"Participation:\n\n{table(PARTICIPATION_HEADER, rows)}" if rows else ""
