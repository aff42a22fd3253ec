"""The studies of the paper: what their files plan, joined with what results/ holds of it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedglimpse.runs.folder import affects_results, run_identity
from fedglimpse.runs.provenance import draws_of
from fedglimpse.studies.report.analysis import Results, analyse
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.published import read_paper
from fedglimpse.studies.results.study import CellName, CellResult, Study
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.version import DRAWS

CHOSE_THE_RECIPE = frozenset({0, 1})  # seeds of recipe_study.toml
TUNED_ON = dict.fromkeys(  # studies of preset `tuned-1` on the data of recipe_study.toml
    (
        "table1",
        "fig6_history",
        "fig7_selection",
        "fig8_identity",
        "components",
        "proof",
        "taught",
        "averaged",
    ),
    CHOSE_THE_RECIPE,
)


@dataclass(frozen=True)
class Stored:
    """One study: every planned cell, and every cell that was run."""

    name: str
    study: Study  # a planned cell that was not begun is `missing`, with its configuration
    departures: tuple[str, ...]  # keys in which runs are not what the file says now
    lenders: Mapping[str, int] = field(default_factory=dict)  # study -> how many runs are its own
    tuned_on: frozenset[int] = frozenset()  # seeds of the runs by which its recipe was chosen

    @property
    def begun(self) -> bool:
        """True if at least one round of one cell was run."""
        return any(cell.facts is not None for cell in self.study.cells)

    @cached_property
    def results(self) -> Results:
        """Everything the report computes, with the settings' own targets."""
        return analyse(self.study)

    @cached_property
    def results_to_best(self) -> Results:
        """The same with 90 % of the best accuracy of each setting as its target."""
        return analyse(dataclasses.replace(self.study, targets={}))


class Shelf:
    """Reads studies below one folder, each of them once.

    A run that a study has not finished, but another one has, is taken from there.
    """

    def __init__(self, root: Path) -> None:
        """Name the folder that holds `plans/` and `results/`."""
        self.root = root
        self._studies: dict[str, Stored] = {}

    def study(self, name: str) -> Stored:
        """Return a study by the name of its file and its folder; results may be missing."""
        if name not in self._studies:
            self._studies[name] = self._join(name)
        return self._studies[name]

    def paper(self, name: str) -> dict[str, Any]:
        """Return a file of published figures or claims, such as `paper_table1`."""
        return read_paper(self.root / "plans" / f"{name}.toml")

    @cached_property
    def _finished_runs(self) -> dict[str, tuple[str, CellResult]]:
        """The finished runs of all studies, each with the study that has it."""
        runs: dict[str, tuple[str, CellResult]] = {}
        for name, cells in self._cells.items():
            for cell in cells.values():
                if cell.state == "finished":
                    identity = run_identity(cell.config, draws_of(cell.environment))
                    runs[identity] = (name, cell)
        return runs

    def _lent(
        self, config: Mapping[str, Any], own: Mapping[CellName, CellResult], setting: str
    ) -> tuple[str, CellResult] | None:
        """Return a run that another study has finished, with the draws of this one's setting.

        Args:
            config: how it was run.
            own: the cells that this study has.
            setting: that of the run. Where none of its own cells is finished, older draws come
                first: the results of the paper's settings were made with them.
        """
        versions: set[int] = set()
        for cell in own.values():
            if cell.setting == setting and cell.state == "finished":
                versions.add(draws_of(cell.environment))
        for draws in sorted(versions or range(1, DRAWS + 1)):
            lent = self._finished_runs.get(run_identity(config, draws))
            if lent is not None:
                return lent
        return None

    @cached_property
    def _cells(self) -> dict[str, dict[CellName, CellResult]]:
        """The cells of every study of `plans/` that has results, all its files together."""
        cells: dict[str, dict[CellName, CellResult]] = {}
        for plan in sorted((self.root / "plans").glob("*.toml")):
            folder = self.root / "results" / plan.stem
            if list(folder.glob("study*.json.gz")):
                cells[plan.stem] = {cell.name: cell for cell in load_study(folder).cells}
        return cells

    def _join(self, name: str) -> Stored:
        plan = read_plan(self.root / "plans" / f"{name}.toml", to_run=False)
        own_cells = self._cells.get(name, {})
        stored_cells = dict(own_cells)
        cells: list[CellResult] = []
        departures: dict[str, None] = {}
        lenders: Counter[str] = Counter()
        for planned in plan.cells:
            cell_name = planned.setting, planned.variant, planned.seed
            config = _as_stored(planned.described())
            cell = stored_cells.pop(cell_name, None)
            if cell is None:
                cell = CellResult(planned.id, *cell_name, state="missing")
            lent = self._lent(config, own_cells, planned.setting)
            if cell.state != "finished" and lent is not None:
                lender, run = lent
                lenders[lender] += 1
                cell = dataclasses.replace(
                    run, id=planned.id, setting=planned.setting, variant=planned.variant
                )
            departures |= dict.fromkeys(_departures(cell.config, config))
            if not cell.config:
                cell = dataclasses.replace(cell, config=config)
            cells.append(cell)
        study = Study(
            title=plan.title,
            claim=plan.claim,
            control=plan.control,
            targets=plan.targets,
            paper=plan.paper,
            cells=[*cells, *stored_cells.values()],
            source=f"results/{name}",
        )
        return Stored(name, study, tuple(departures), lenders, TUNED_ON.get(name, frozenset()))


def _as_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat configuration as a stored study has it: lists for tuples."""
    return dict(json.loads(json.dumps(config)))


def _departures(run: Mapping[str, Any], planned: Mapping[str, Any]) -> list[str]:
    """Return the keys in which a run is not what its file plans."""
    departures: list[str] = []
    for key, value in run.items():
        if key in planned and planned[key] != value and affects_results(key, value):
            departures.append(f"`{key}` {value} (file: {planned[key]})")
    return departures
