"""Accuracy over rounds as one picture: a panel for each setting, a line for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor
from statistics import fmean

from fedglimpse.studies.results.study import CellResult, Study
from fedglimpse.studies.statistics.condense import thinned
from reproduction.shelf import Stored

WIDTH = 300  # of a panel
HEIGHT = 190
GAP = 58  # between panels; it holds their labels
COLUMNS = 2
LEGEND_COLUMNS = 5
SPAN = 0.3  # accuracies shown below the highest
POINTS = 60  # of a line
COLOURS = {  # distinguishable by colour-blind readers; the other variants are grey
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
    panels: dict[str, dict[str, Line]] = {}
    for setting in study.settings:
        lines = _lines(study, setting)
        if lines:
            panels[setting] = lines
    num_rows = -(-len(panels) // COLUMNS)
    width = COLUMNS * (WIDTH + GAP) + 10
    height = num_rows * (HEIGHT + GAP) + 70
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (setting, lines) in enumerate(panels.items()):
        x = i % COLUMNS * (WIDTH + GAP) + 45
        y = i // COLUMNS * (HEIGHT + GAP) + 25
        shapes.append(f'<g transform="translate({x} {y})">{_panel(setting, lines)}</g>')
    shapes.append(_legend(study.variants, num_rows * (HEIGHT + GAP) + 20))
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _lines(study: Study, setting: str) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for variant in study.variants:
        line = _mean(study.of(setting, variant))
        if line:
            lines[variant] = line
    return lines


def _mean(cells: Sequence[CellResult]) -> Line:
    """Average the trailing mean accuracy of finished seeds over the rounds that all scored."""
    seeds: list[dict[int, float]] = []  # round -> accuracy
    for cell in cells:
        if cell.state == "finished" and cell.facts is not None:
            curve = cell.facts.curve
            seeds.append(dict(zip(curve.rounds, curve.smooth, strict=True)))
    if not seeds:
        return []
    rounds = sorted(set.intersection(*map(set, seeds)))
    line: Line = []
    for i in thinned(len(rounds), POINTS):
        number = rounds[i]
        line.append((number, fmean(seed[number] for seed in seeds)))
    return line


def _panel(setting: str, lines: dict[str, Line]) -> str:
    accuracies: list[float] = []
    last_round = 0
    for line in lines.values():
        for number, accuracy in line:
            accuracies.append(accuracy)
            last_round = max(last_round, number)
    highest = max(accuracies) + 0.01
    lowest = max(0.0, highest - SPAN)

    def y_of(accuracy: float) -> float:
        return HEIGHT * (highest - accuracy) / (highest - lowest)

    shapes = [f'<text x="0" y="-8" font-weight="bold">{escape(setting)}</text>']
    for percent in range(5 * ceil(20 * lowest), floor(100 * highest) + 1, 5):
        y = y_of(percent / 100)
        shapes.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="#e5e5e5"/>')
        shapes.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{percent}</text>')
    for share in (0, 0.5, 1):
        shapes.append(
            f'<text x="{WIDTH * share:.0f}" y="{HEIGHT + 15}" text-anchor="middle">'
            f"{round(last_round * share)}</text>"
        )
    shapes.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999999"/>')
    for variant, line in sorted(lines.items(), key=lambda pair: pair[0] in BOLD):  # bold on top
        points: list[str] = []
        for number, accuracy in line:
            y = min(HEIGHT, y_of(accuracy))  # lower accuracies run along the bottom
            points.append(f"{WIDTH * number / last_round:.1f},{y:.1f}")
        style = _style(variant, list(lines))
        shapes.append(f'<polyline points="{" ".join(points)}" {style}/>')
    return "\n".join(shapes)


def _style(variant: str, variants: Sequence[str]) -> str:
    if variant in COLOURS:
        stroke = 2.4 if variant in BOLD else 1.4
        return f'fill="none" stroke="{COLOURS[variant]}" stroke-width="{stroke}"'
    grey_variants = [name for name in variants if name not in COLOURS]
    position = grey_variants.index(variant)
    dashes = DASHES[position % len(DASHES)]
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'fill="none" stroke="{GREY[position % len(GREY)]}" stroke-width="1.2"{dash}'


def _legend(variants: Sequence[str], top: int) -> str:
    shapes: list[str] = []
    for i, variant in enumerate(variants):
        x = 45 + i % LEGEND_COLUMNS * 138
        y = top + i // LEGEND_COLUMNS * 20
        shapes.append(f'<path d="M{x} {y}h24" {_style(variant, variants)}/>')
        shapes.append(f'<text x="{x + 30}" y="{y + 4}">{escape(variant)}</text>')
    return "\n".join(shapes)
