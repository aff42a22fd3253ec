"""The studies of the paper: what their files plan, joined with what results/ holds of it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedglimpse.runs.folder import affects_results, run_identity
from fedglimpse.studies.report.analysis import Results, analyse
from fedglimpse.studies.results import CellResult, Study, load_study
from fedglimpse.studies.results.published import read_paper
from fedglimpse.studies.sweep.plan import read_plan

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
        """True where at least one round of one cell was played."""
        return any(cell.facts is not None for cell in self.study.cells)

    @cached_property
    def results(self) -> Results:
        """Everything the report works out, with the settings' own targets."""
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
        self.root, self._read = root, dict[str, Stored]()

    def study(self, name: str) -> Stored:
        """Return a study by the name of its file and its folder; results may be missing."""
        if name not in self._read:
            self._read[name] = self._join(name)
        return self._read[name]

    def paper(self, name: str) -> dict[str, Any]:
        """Return a file of published figures or claims, such as `paper_table1`."""
        return read_paper(self.root / "plans" / f"{name}.toml")

    @cached_property
    def _runs(self) -> dict[str, tuple[str, CellResult]]:
        """The finished runs of all studies, each with the study that has it."""
        return {
            run_identity(cell.config): (name, cell)
            for name, cells in self._cells.items()
            for cell in cells.values()
            if cell.state == "finished"
        }

    @cached_property
    def _cells(self) -> dict[str, dict[tuple[str, str, int], CellResult]]:
        """The cells of every study of `plans/` that has results, all its parts together."""
        names = sorted(path.stem for path in (self.root / "plans").glob("*.toml"))
        folders = {name: self.root / "results" / name for name in names}
        return {
            name: {_name(cell): cell for cell in load_study(folder).cells}
            for name, folder in folders.items()
            if list(folder.glob("study*.json.gz"))
        }

    def _join(self, name: str) -> Stored:
        plan = read_plan(self.root / "plans" / f"{name}.toml", to_run=False)
        there = dict(self._cells.get(name, {}))
        configs = {cell.id: _plain(cell.described()) for cell in plan.cells}
        cells, departures, lenders = [], dict[str, None](), Counter[str]()
        for planned in plan.cells:
            key, config = _name(planned), configs[planned.id]
            cell = there.pop(key, None) or CellResult(planned.id, *key, state="missing")
            if cell.state != "finished" and (lent := self._runs.get(run_identity(config))):
                lenders[lent[0]] += 1
                cell = dataclasses.replace(
                    lent[1], id=planned.id, setting=planned.setting, variant=planned.variant
                )
            departures |= dict.fromkeys(_departures(cell.config, config))
            cells.append(cell if cell.config else dataclasses.replace(cell, config=config))
        study = Study(
            title=plan.title,
            claim=plan.claim,
            control=plan.control,
            targets=plan.targets,
            paper=plan.paper,
            cells=[*cells, *there.values()],
            source=f"results/{name}",
        )
        return Stored(name, study, tuple(departures), lenders, TUNED_ON.get(name, frozenset()))


def _name(cell: Any) -> tuple[str, str, int]:
    return cell.setting, cell.variant, cell.seed


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat configuration as a stored study has it: lists for tuples."""
    return dict(json.loads(json.dumps(config)))


def _departures(run: Mapping[str, Any], planned: Mapping[str, Any]) -> Iterable[str]:
    for key, value in run.items():
        if key in planned and planned[key] != value and affects_results(key, value):
            yield f"`{key}` {value} (file: {planned[key]})"
