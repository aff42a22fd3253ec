"""Theory panels as tables that read well in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from statistics import mean

from fedglimpse.theory.bound import Terms
from fedglimpse.theory.estimate import Point
from fedglimpse.theory.panel import LanePanel, Panel

QUANTITIES = {
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
TERMS = {
    "start": "start, F(W⁰) − F*",
    "gap": "visibility, d²",
    "selection": "selection",
    "noise": "noise, σ²",
    "drift": "drift, G²",
    "total": "right-hand side",
}


def panel_text(panel: Panel) -> str:
    """Return a run's panel; with several seeds their means."""
    title = f"{panel.method} on {panel.data}, {len(panel.lanes)} seed(s), "
    title += (
        f"{len(panel.lanes[0].points)} models measured of {panel.lanes[0].constants.rounds:.0f}"
    )
    title += " rounds"
    notes = [f"note: {note}" for note in panel.notes]
    return "\n\n".join([title, _series(panel.lanes), _bound(panel.lanes), *notes])


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in [head, *body]
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _series(lanes: Sequence[LanePanel]) -> str:
    """Return the measured quantities: first, middle and last stored model, and their mean."""
    count = min(len(lane.points) for lane in lanes)
    picks = sorted({0, count // 2, count - 1})
    head = ["measured", *(f"round {lanes[0].points[i].round}" for i in picks), "mean"]
    body = []
    for field in fields(Point):
        if field.name not in QUANTITIES:
            continue
        at = [_mean([getattr(lane.points[i], field.name) for lane in lanes]) for i in picks]
        overall = _mean([getattr(p, field.name) for lane in lanes for p in lane.points])
        if overall is not None:
            body.append([QUANTITIES[field.name], *map(_number, [*at, overall])])
    return table(head, body)


def _bound(lanes: Sequence[LanePanel]) -> str:
    """Return both bounds term by term, with the left-hand side below."""
    with_q = all(lane.q is not None for lane in lanes)
    head = ["term of the bound", "as printed" if with_q else "printed, before Lemma 4", "repaired"]
    sides: tuple[Callable[[LanePanel], Terms[float]], ...] = (
        lambda lane: lane.printed,
        lambda lane: lane.repaired,
    )
    body = [
        [label, *(_number(mean(getattr(side(lane), name) for lane in lanes)) for side in sides)]
        for name, label in TERMS.items()
    ]
    extra: list[tuple[str, float]] = [
        ("measured: mean ‖∇F‖²", mean(lane.measured for lane in lanes)),
        (
            "largest G², which ‖∇F‖² cannot pass",
            mean(lane.constants.second_moment for lane in lanes),
        ),
        ("L k η, must be at most 1", mean(lane.step_condition for lane in lanes)),
        ("deviation ÷ random choice", mean(lane.relative_deviation for lane in lanes)),
    ]
    by_round = _mean([lane.lemma_4_by_round for lane in lanes])
    if by_round is not None:
        extra.append(("Lemma 4, each round's own μ and L_Q", by_round))
    return table(head, [*body, *([name, _number(value), ""] for name, value in extra)])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return mean(known) if known else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
