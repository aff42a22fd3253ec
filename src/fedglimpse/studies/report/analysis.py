"""The numbers of a report: one row for each variant in each setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedglimpse.errors import UserError, nearest
from fedglimpse.studies.compare import DEFAULT_TARGET
from fedglimpse.studies.report.fairness import Fairness
from fedglimpse.studies.report.numbers import MEASURES
from fedglimpse.studies.report.published import Beside, beside, check_paper, read_paper
from fedglimpse.studies.report.reproduce import command
from fedglimpse.studies.results import Cell, Study
from fedglimpse.studies.statistics.censored import Saving, Spent, ToTarget, saving
from fedglimpse.studies.statistics.difference import Difference, against_published, holm, paired
from fedglimpse.studies.statistics.spread import Spread


@dataclass(frozen=True)
class Options:
    """What a reader may choose."""

    control: str | None = None  # a variant; default: the study's, else its first
    target: float | None = None  # accuracy for all settings; default: the study's, else 90 %
    paper: Path | None = None  # published figures; default: the study's


@dataclass(frozen=True)
class Target:
    """The accuracy that costs are counted to."""

    value: float
    given: bool  # False: worked out from the results themselves


@dataclass(frozen=True)
class Comparison:
    """A difference with its p-value after Holm's correction over the whole report."""

    difference: Difference
    p: float | None
    verdict: str  # real, within noise, cannot tell


@dataclass(frozen=True)
class Row:
    """One variant in one setting, over its seeds."""

    setting: str
    variant: str
    cells: Sequence[Cell]
    spread: Spread | None  # None where no seed has finished
    best: bool
    control: Comparison | None
    beside: Beside | None
    paper: Comparison | None
    to_target: Mapping[str, ToTarget]  # by measure; empty where nothing was recorded
    savings: Mapping[str, Saving]  # against the control, of the seeds that both have
    fairness: Fairness | None
    command: str

    @property
    def finished(self) -> int:
        """How many seeds have finished."""
        return sum(c.state == "finished" for c in self.cells)

    @property
    def oracle(self) -> bool:
        """True for a method that is shown what no server can know."""
        return bool(config_of(self.cells).get("options.allow_oracle"))


@dataclass(frozen=True)
class Results:
    """Everything a report shows."""

    study: Study
    control: str | None
    targets: Mapping[str, Target]
    rows: Sequence[Row]

    def of(self, setting: str) -> list[Row]:
        """Return the rows of one setting."""
        return [row for row in self.rows if row.setting == setting]


def analyse(study: Study, options: Options | None = None) -> Results:
    """Work out every number of a report."""
    options = options or Options()
    if options.paper is not None:
        study = dataclasses.replace(study, paper=read_paper(options.paper))
    check_paper(study)
    control = _control(study, options)
    pairs = [(s, v) for s in study.settings for v in study.variants if study.of(s, v)]
    finals = {pair: final_accuracies(study.of(*pair)) for pair in pairs}
    targets = {s: t for s in study.settings if (t := _target(study, finals, s, options))}
    rows = [_row(study, pair, finals, targets, control) for pair in pairs]
    rows = _with_verdicts(rows)
    return Results(study, control, targets, rows)


def _control(study: Study, options: Options) -> str | None:
    name, known = options.control or study.control, study.variants
    if name is None:
        return known[0] if len(known) > 1 else None
    if name not in known:
        raise UserError(
            f"The control '{name}' is not among the variants.{nearest(name, known)} "
            f"Choose one of {', '.join(known)}."
        )
    return name


Finals = Mapping[tuple[str, str], Mapping[int, float]]  # (setting, variant) -> seed -> accuracy


def final_accuracies(cells: Sequence[Cell]) -> dict[int, float]:
    """Return seed -> final accuracy, of the cells that have finished."""
    return {
        c.seed: c.facts.accuracy
        for c in cells
        if c.state == "finished" and c.facts is not None and c.facts.accuracy is not None
    }


def _target(study: Study, finals: Finals, setting: str, options: Options) -> Target | None:
    given = options.target if options.target is not None else study.targets.get(setting)
    if given is not None:
        return Target(given, True)
    means = _means(finals, setting)
    return Target(DEFAULT_TARGET * max(means), False) if means else None


def _means(finals: Finals, setting: str) -> list[float]:
    """Return the mean accuracy of every variant of a setting that has finished a seed."""
    return [fmean(seeds.values()) for (s, _), seeds in finals.items() if s == setting and seeds]


def _row(
    study: Study,
    pair: tuple[str, str],
    finals: Finals,
    targets: Mapping[str, Target],
    control: str | None,
) -> Row:
    (setting, variant), mine = pair, finals[pair]
    cells = study.of(setting, variant)
    base = None if control in (None, variant) else finals.get((setting, str(control)), {})
    difference = paired(mine, base) if mine and base else None
    config = config_of(cells)
    figure = beside(study.paper, config) if config else None
    gap = against_published(list(mine.values()), figure.figure) if figure and mine else None
    target = targets.get(setting)
    against = study.of(setting, control) if control and control != variant else []
    return Row(
        setting=setting,
        variant=variant,
        cells=cells,
        spread=_spread(cells, mine) if mine else None,
        best=bool(mine) and fmean(mine.values()) == max(_means(finals, setting)),
        control=_uncorrected(difference),
        beside=figure,
        paper=_uncorrected(gap),
        to_target={} if target is None else _costs(cells, target.value),
        savings={} if target is None else _savings(cells, against, target.value),
        fairness=Fairness.of(cells),
        command=command(config, [c.seed for c in cells]) if config else "",
    )


def config_of(cells: Sequence[Cell]) -> Mapping[str, Any]:
    """Return the configuration of the first seed that has one: a missing cell has none."""
    return next((cell.config for cell in cells if cell.config), {})


def _spread(cells: Sequence[Cell], mine: Mapping[int, float]) -> Spread:
    rounds = [c.facts.over_rounds for c in cells if c.seed in mine and c.facts is not None]
    return Spread.of(list(mine.values()), rounds)


def spent(cells: Sequence[Cell], measure: str, target: float) -> dict[int, Spent]:
    """Return what each seed spent on the way to a target; cells not yet begun are left out.

    A run that failed or is unfinished has not reached what it has not reached: it is a miss, even
    where it failed before its first round.
    """
    found = {}
    for cell in cells:
        if cell.facts is not None:
            found[cell.seed] = cell.facts.climb.spent(measure, target)
        elif cell.state == "failed":
            found[cell.seed] = Spent(0, False)
    return found


def _costs(cells: Sequence[Cell], target: float) -> dict[str, ToTarget]:
    found = {measure: spent(cells, measure, target) for measure in MEASURES}
    return {measure: ToTarget(tuple(runs.values())) for measure, runs in found.items() if runs}


def _savings(cells: Sequence[Cell], against: Sequence[Cell], target: float) -> dict[str, Saving]:
    found = {}
    for measure in MEASURES:
        mine, other = (spent(part, measure, target) for part in (cells, against))
        seeds = [seed for seed in mine if seed in other]
        result = saving([mine[s] for s in seeds], [other[s] for s in seeds])
        if result is not None:
            found[measure] = result
    return found


def _uncorrected(difference: Difference | None) -> Comparison | None:
    return None if difference is None else Comparison(difference, difference.p, "")


def _with_verdicts(rows: Sequence[Row]) -> list[Row]:
    """Correct p-values over all rows: comparisons with the control, and those with the paper."""
    control = _corrected([row.control for row in rows])
    paper = _corrected([row.paper for row in rows])
    return [
        dataclasses.replace(row, control=c, paper=p)
        for row, c, p in zip(rows, control, paper, strict=True)
    ]


def _corrected(found: Sequence[Comparison | None]) -> list[Comparison | None]:
    adjusted = holm([None if c is None else c.difference.p for c in found])
    return [
        None if c is None else Comparison(c.difference, p, c.difference.verdict(p))
        for c, p in zip(found, adjusted, strict=True)
    ]
