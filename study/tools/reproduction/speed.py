"""How fast the studies were played, and how much GPU time they took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedglimpse.runs.folder import run_identity
from fedglimpse.studies.results import CellResult
from reproduction.markdown import table
from reproduction.shelf import Stored


def on_gpu(cells: Iterable[CellResult]) -> list[CellResult]:
    """Return the cells that were played on a GPU, each run once.

    A run that another study took over with --reuse has the same configuration and the same time.
    """
    runs = {}
    for cell in cells:
        if cell.facts is not None and _device(cell):
            runs[_run(cell)] = cell
    return list(runs.values())


def _device(cell: CellResult) -> str:
    """Return the GPU a cell was played on; nothing for a CPU."""
    asked = cell.config.get("engine.device", "auto")
    return "" if asked == "cpu" else str(cell.environment.get("gpu") or "")


def _run(cell: CellResult) -> tuple[str, int, float]:
    seconds = cell.facts.seconds if cell.facts is not None else 0.0
    return run_identity(cell.config), cell.seed, seconds


def speed(studies: Sequence[Stored]) -> str:
    """Return lane-rounds a minute and GPU-hours of every study and of all together."""
    lines = []
    for stored in studies:
        cells = on_gpu(stored.study.cells)
        for data in dict.fromkeys(str(cell.config["data.name"]) for cell in cells):
            part = [cell for cell in cells if cell.config["data.name"] == data]
            lines.append([stored.name, data, *_figures(part)])
    if not lines:
        return "No round was played on a GPU yet."
    everything = on_gpu(cell for stored in studies for cell in stored.study.cells)
    lines.append(["**all**, each run once", "", *_figures(everything)])
    head = ["study", "data", "GPU", "precision", "lane-rounds", "seconds of rounds"]
    return table([*head, "lane-rounds a minute", "GPU-hours"], lines)


def _figures(cells: Sequence[CellResult]) -> list[str]:
    rounds = sum(cell.facts.climb.played for cell in cells if cell.facts is not None)
    seconds = sum(cell.facts.seconds for cell in cells if cell.facts is not None)
    pace = f"{60 * rounds / seconds:,.0f}" if seconds else "–"
    gpus = ", ".join(dict.fromkeys(_device(cell) for cell in cells))
    precisions = ", ".join(dict.fromkeys(str(cell.config["engine.precision"]) for cell in cells))
    return [gpus, precisions, f"{rounds:,}", f"{seconds:,.0f}", pace, f"{seconds / 3600:.2f}"]
