"""What a target accuracy cost, and how evenly clients took part."""

from __future__ import annotations

from fedglimpse.studies.report.analysis import DEFAULT_TARGET, MEASURES, ReportRow, Results
from fedglimpse.studies.report.numbers import cost, percent
from fedglimpse.studies.statistics.condense import SMOOTHED_OVER
from reproduction.markdown import table


def to_target(results: Results, setting: str) -> str:
    """Return the costs of one setting's target; nothing where it has none."""
    target, rows = results.targets.get(setting), results.of(setting)
    if target is None or not any(row.to_target for row in rows):
        return ""
    said = f"{percent(target.value)} %"
    if not target.given:
        said = f"{percent(DEFAULT_TARGET, 0)} % of the best accuracy here, {said}"
    head = ["variant", "seeds that got there", *(what for what, _ in MEASURES.values())]
    title = f"Costs until {said}:"
    return f"{title}\n\n{table(head, [_line(row) for row in rows if row.to_target])}"


def _line(row: ReportRow) -> list[str]:
    runs = row.to_target["rounds"]
    costs = [cost(row.to_target[measure], unit) for measure, (_, unit) in MEASURES.items()]
    return [row.variant, f"{runs.reached} of {len(runs.runs)}", *costs]


def legend() -> str:
    """Return how to read costs."""
    return (
        f"A target is reached when the mean over {SMOOTHED_OVER} scored rounds gets there. "
        "`33 [30–36]`: mean over seeds, cheapest and dearest. `≥ 30 (2 of 3)`: a lower bound, one "
        "seed missed. `> 80 (0 of 3)`: not reached."
    )


def participation(results: Results, setting: str) -> str:
    """Return how evenly clients were chosen in one setting; nothing where it is not known."""
    lines = []
    for row in results.of(setting):
        if row.fairness is not None:
            fair = row.fairness
            covered = fair.classes_covered
            lines.append(
                [
                    row.variant,
                    f"{fair.jain:.2f}",
                    f"{fair.jain_of_seen:.2f}",
                    f"{fair.fewest} · {fair.median:.0f} · {fair.most}",
                    f"{fair.never:.1f}",
                    "–" if covered is None else percent(covered, 0),
                ]
            )
    head = ["variant", "Jain, chosen", "Jain, visible", "visits: fewest · median · most"]
    head += ["never chosen", "classes in a round, %"]
    return f"Participation:\n\n{table(head, lines)}" if lines else ""
