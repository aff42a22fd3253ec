"""Accuracy over rounds as one picture: a panel for each setting, a line for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor
from statistics import fmean

from fedglimpse.studies.results import CellResult, Study
from fedglimpse.studies.statistics.condense import thinned
from reproduction.shelf import Stored

WIDTH, HEIGHT, GAP, COLUMNS = 300, 190, 58, 2  # of a panel; the gap holds its labels
SPAN = 0.3  # accuracies shown below the highest
POINTS = 60  # of a line
COLOURS = {  # told apart by colour-blind readers; the other variants are grey
    "fedprox": "#56b4e9", "ha-edgeflow": "#e69f00", "fedawac": "#009e73", "f3ast": "#cc79a7",
    "glimpse": "#d55e00", "fedavg-window": "#000000",
}  # fmt: skip
BOLD = ("glimpse", "fedavg-window")
GREY = ("#8a8a8a", "#b0b0b0")
DASHES = ("", "6 3", "2 2", "8 2 2 2")

Line = list[tuple[int, float]]  # (round, accuracy)


def curves(stored: Stored) -> str:
    """Return an SVG of the settings that have results, mean over the seeds that have finished."""
    study = stored.study
    panels = {s: found for s in study.settings if (found := _lines(study, s))}
    rows = -(-len(panels) // COLUMNS)
    wide, high = COLUMNS * (WIDTH + GAP) + 10, rows * (HEIGHT + GAP) + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for i, (setting, lines) in enumerate(panels.items()):
        x, y = i % COLUMNS * (WIDTH + GAP) + 45, i // COLUMNS * (HEIGHT + GAP) + 25
        parts.append(f'<g transform="translate({x} {y})">{_panel(setting, lines)}</g>')
    parts.append(_legend(study.variants, rows * (HEIGHT + GAP) + 20))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _lines(study: Study, setting: str) -> dict[str, Line]:
    found = {v: _mean(study.of(setting, v)) for v in study.variants}
    return {variant: line for variant, line in found.items() if line}


def _mean(cells: Sequence[CellResult]) -> Line:
    """Average the trailing mean accuracy of finished seeds over the rounds that all scored."""
    done = [c.facts.curve for c in cells if c.state == "finished" and c.facts is not None]
    if not done:
        return []
    each = [dict(zip(curve.rounds, curve.smooth, strict=True)) for curve in done]
    rounds = sorted(set.intersection(*map(set, each)))
    kept = [rounds[i] for i in thinned(len(rounds), POINTS)]
    return [(r, fmean(one[r] for one in each)) for r in kept]


def _panel(setting: str, lines: dict[str, Line]) -> str:
    top = max(a for line in lines.values() for _, a in line) + 0.01
    last = max(r for line in lines.values() for r, _ in line)
    low = max(0.0, top - SPAN)

    def place(at: int, accuracy: float) -> str:
        down = min(HEIGHT, HEIGHT * (top - accuracy) / (top - low))  # lower ones run on the floor
        return f"{WIDTH * at / last:.1f},{down:.1f}"

    parts = [f'<text x="0" y="-8" font-weight="bold">{escape(setting)}</text>']
    for percent in range(5 * ceil(20 * low), floor(100 * top) + 1, 5):
        down = HEIGHT * (top - percent / 100) / (top - low)
        parts.append(f'<path d="M0 {down:.1f}H{WIDTH}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="-6" y="{down + 4:.1f}" text-anchor="end">{percent}</text>')
    for share in (0, 0.5, 1):
        parts.append(
            f'<text x="{WIDTH * share:.0f}" y="{HEIGHT + 15}" text-anchor="middle">'
            f"{round(last * share)}</text>"
        )
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999999"/>')
    for variant, line in sorted(lines.items(), key=lambda pair: pair[0] in BOLD):  # bold on top
        points = " ".join(place(*point) for point in line)
        parts.append(f'<polyline points="{points}" {_style(variant, list(lines))}/>')
    return "\n".join(parts)


def _style(variant: str, variants: Sequence[str]) -> str:
    if variant in COLOURS:
        bold = 2.4 if variant in BOLD else 1.4
        return f'fill="none" stroke="{COLOURS[variant]}" stroke-width="{bold}"'
    place = [v for v in variants if v not in COLOURS].index(variant)
    dash = f' stroke-dasharray="{DASHES[place % 4]}"' if DASHES[place % 4] else ""
    return f'fill="none" stroke="{GREY[place % 2]}" stroke-width="1.2"{dash}'


def _legend(variants: Sequence[str], y: int) -> str:
    parts = []
    for i, variant in enumerate(variants):
        x, down = 45 + i % 5 * 138, y + i // 5 * 20
        parts.append(f'<path d="M{x} {down}h24" {_style(variant, variants)}/>')
        parts.append(f'<text x="{x + 30}" y="{down + 4}">{escape(variant)}</text>')
    return "\n".join(parts)
