"""Theory panels as tables that read well in a terminal and in Markdown.

The keys of `QUANTITIES` and `TERMS` are fields of `Measurement` and of the bound's terms; the
symbols, and what is repaired in the printed bound, are explained in docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from fedglimpse.theory.estimate import Measurement, column
from fedglimpse.theory.panel import LanePanel, Panel

QUANTITIES = {  # field of a Measurement -> its row
    "loss": "F(W)",
    "gradient": "‖∇F‖²",
    "gap": "d², gap of the cluster",
    "spread": "Γ², spread in the cluster",
    "deviation": "‖∇F_C − ∇F_S‖², deviation",
    "weighted_deviation": "the same, as weighted",
    "random_deviation": "the same, random choice",
    "second_moment": "G²",
    "noise": "σ²",
    "smoothness": "L",
    "delta_q": "Δ_Q",
    "mu": "μ",
    "l_q": "L_Q",
}
TERMS = {  # field of Terms -> its row
    "start": "start, F(W⁰) − F*",
    "gap": "visibility, d²",
    "selection": "selection",
    "noise": "noise, σ²",
    "drift": "drift, G²",
    "total": "right-hand side",
}
FIGURES: Mapping[str, Callable[[LanePanel], float | None]] = {  # rows below the terms
    "measured: mean ‖∇F‖²": lambda lane: lane.measured,
    "largest G², a limit of ‖∇F‖²": lambda lane: lane.constants.second_moment,
    "L k η, must be at most 1": lambda lane: lane.step_condition,
    "deviation ÷ random choice": lambda lane: lane.relative_deviation,
    "Lemma 4, each round's own μ and L_Q": lambda lane: lane.lemma_4_by_round,
}


def panel_text(panel: Panel) -> str:
    """Return a run's panel; with several seeds their means."""
    first = panel.lanes[0]
    paragraphs = [
        f"{panel.method} on {panel.data}, {len(panel.lanes)} seed(s), "
        f"{len(first.points)} models measured of {first.constants.rounds:.0f} rounds",
        _measured_table(panel.lanes),
        _bound_table(panel.lanes),
    ]
    for note in panel.notes:
        paragraphs.append(f"note: {note}")
    return "\n\n".join(paragraphs)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = []
    for cells_of_column in zip(head, *body, strict=True):
        widths.append(max(map(len, cells_of_column)))
    lines = []
    for row in [head, *body]:
        cells = []
        for cell, width in zip(row, widths, strict=True):
            cells.append(cell.ljust(width))
        lines.append("| " + " | ".join(cells) + " |")
    rule = "|".join("-" * (width + 2) for width in widths)
    lines.insert(1, f"|{rule}|")
    return "\n".join(lines)


def _measured_table(lanes: Sequence[LanePanel]) -> str:
    """Return the measured quantities: first, middle and last stored model, and their mean."""
    count = min(len(lane.points) for lane in lanes)
    columns = sorted({0, count // 2, count - 1})
    rounds = []
    for i in columns:
        rounds.append(f"round {lanes[0].points[i].round}")
    all_points: list[Measurement] = []
    for lane in lanes:
        all_points += lane.points
    body = []
    for name, label in QUANTITIES.items():
        overall = _mean(column(all_points, name))
        if overall is None:
            continue
        row = [label]
        for i in columns:
            points = [lane.points[i] for lane in lanes]
            average = _mean(column(points, name))
            row.append(_number(average))
        row.append(_number(overall))
        body.append(row)
    return table(["measured", *rounds, "mean"], body)


def _bound_table(lanes: Sequence[LanePanel]) -> str:
    """Return both bounds term by term, with the left-hand side below."""
    with_q = all(lane.q is not None for lane in lanes)
    head = [
        "term of the bound",
        "as printed" if with_q else "printed, before Lemma 4",
        "repaired",
    ]
    body = []
    for name, label in TERMS.items():
        printed = [getattr(lane.printed, name) for lane in lanes]
        repaired = [getattr(lane.repaired, name) for lane in lanes]
        row = [
            label,
            _number(_mean(printed)),
            _number(_mean(repaired)),
        ]
        body.append(row)
    for label, figure in FIGURES.items():
        average = _mean([figure(lane) for lane in lanes])
        if average is not None:
            body.append([label, _number(average), ""])
    return table(head, body)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that exist."""
    existing = [value for value in values if value is not None]
    return mean(existing) if existing else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
