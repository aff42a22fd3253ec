"""How fast the studies ran, and how much GPU time they took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedglimpse.runs.folder import run_identity
from fedglimpse.studies.results.study import CellResult
from reproduction.markdown import table
from reproduction.shelf import Stored

HEADER = (
    "study", "data", "GPU", "precision", "lane-rounds", "seconds of rounds",
    "lane-rounds a minute", "GPU-hours",
)  # fmt: skip


def speed(studies: Sequence[Stored]) -> str:
    """Return lane-rounds a minute and GPU-hours of every study and of all together."""
    rows: list[list[str]] = []
    all_cells: list[CellResult] = []
    for stored in studies:
        all_cells += stored.study.cells
        cells_of_data: dict[str, list[CellResult]] = {}
        for cell in on_gpu(stored.study.cells):
            cells_of_data.setdefault(str(cell.config["data.name"]), []).append(cell)
        for data, cells in cells_of_data.items():
            rows.append([stored.name, data, *_figures(cells)])
    if not rows:
        return "No round was run on a GPU yet."
    rows.append(["**all**, each run once", "", *_figures(on_gpu(all_cells))])
    return table(HEADER, rows)


def on_gpu(cells: Iterable[CellResult]) -> list[CellResult]:
    """Return the cells that were run on a GPU, each run once.

    A run that another study took over with --reuse has the same configuration and the same time.
    """
    runs: dict[tuple[str, int, float], CellResult] = {}
    for cell in cells:
        if cell.facts is not None and _device(cell):
            runs[run_identity(cell.config), cell.seed, cell.facts.seconds] = cell
    return list(runs.values())


def _device(cell: CellResult) -> str:
    """Return the GPU a cell was run on; empty for a CPU."""
    device = cell.config.get("engine.device", "auto")
    return "" if device == "cpu" else str(cell.environment.get("gpu") or "")


def _figures(cells: Sequence[CellResult]) -> list[str]:
    rounds = 0
    seconds = 0.0
    gpus: dict[str, None] = {}
    precisions: dict[str, None] = {}
    for cell in cells:
        gpus[_device(cell)] = None
        precisions[str(cell.config["engine.precision"])] = None
        if cell.facts is not None:
            rounds += cell.facts.climb.played
            seconds += cell.facts.seconds
    return [
        ", ".join(gpus),
        ", ".join(precisions),
        f"{rounds:,}",
        f"{seconds:,.0f}",
        f"{60 * rounds / seconds:,.0f}" if seconds else "–",
        f"{seconds / 3600:.2f}",
    ]
