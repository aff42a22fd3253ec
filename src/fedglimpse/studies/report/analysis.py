"""The numbers of a report: one row for each variant in each setting."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedglimpse.config import retired
from fedglimpse.config.loading import resolve
from fedglimpse.config.presets import DEFAULT_PRESET, VALUES_ALONE
from fedglimpse.errors import UserError, nearest
from fedglimpse.runs.folder import FREE_TO_CHANGE
from fedglimpse.studies.results.published import (
    PublishedFigure,
    check_paper,
    published_figure,
    read_paper,
)
from fedglimpse.studies.results.study import CellResult, Study
from fedglimpse.studies.statistics.difference import (
    SIGNIFICANT,
    Difference,
    Spread,
    against_published,
    holm,
    paired,
)
from fedglimpse.studies.statistics.participation import Fairness, Participation
from fedglimpse.studies.statistics.to_target import Saving, Spent, ToTarget, saving

DEFAULT_CONTROL = "fedavg-window"  # random selection with averaging over time
DEFAULT_TARGET = 0.9  # of the best variant's final accuracy
MEASURES: dict[str, tuple[str, str]] = {  # name -> (what it is, unit)
    "rounds": ("rounds", ""),
    "uplink_bytes": ("uplink", "B"),
    "downlink_bytes": ("downlink", "B"),
    "client_flops": ("client compute", "FLOP"),
    "server_flops": ("server compute", "FLOP"),
}
LATECOMERS = ("clients", "accuracy", "accuracy_of_first")  # entries of `CellResult.latecomers`
ALWAYS_NAMED = ("data.name", "method", "rounds")  # in the command that repeats a run


@dataclass(frozen=True)
class Options:
    """What a reader may choose."""

    control: str | None = None  # a variant; default: the study's, else DEFAULT_CONTROL
    target: float | None = None  # accuracy for all settings; default: the study's, else 90 %
    paper: Path | None = None  # published figures; default: the study's


@dataclass(frozen=True)
class Target:
    """The accuracy to which costs are counted."""

    value: float
    given: bool  # False: derived from the results themselves


@dataclass(frozen=True)
class Comparison:
    """A difference with its p-value after Holm's correction over the whole report."""

    difference: Difference
    p: float | None
    verdict: str  # significant, not significant, inconclusive

    @property
    def significant(self) -> bool:
        """True if the difference is significant, in whichever direction."""
        return self.verdict == SIGNIFICANT

    @property
    def in_words(self) -> str:
        """The verdict with its direction: `significantly higher`, `not significant`, ..."""
        if not self.significant:
            return self.verdict
        return f"significantly {'higher' if self.difference.mean > 0 else 'lower'}"


@dataclass(frozen=True)
class ReportRow:
    """One variant in one setting, over its seeds."""

    setting: str
    variant: str
    cells: Sequence[CellResult]
    spread: Spread | None  # None if no seed has finished
    best: bool
    control: Comparison | None
    published: PublishedFigure | None
    paper: Comparison | None
    to_target: Mapping[str, ToTarget]  # by measure; empty if nothing was recorded
    savings: Mapping[str, Saving]  # against the control, of the seeds that both have
    fairness: Fairness | None
    command: str

    @property
    def finished(self) -> int:
        """How many seeds have finished."""
        return sum(cell.state == "finished" for cell in self.cells)

    @property
    def oracle(self) -> bool:
        """True for a method that may read what no server can know."""
        return bool(config_of(self.cells).get("options.allow_oracle"))


@dataclass(frozen=True)
class Results:
    """Everything a report shows."""

    study: Study
    control: str | None
    targets: Mapping[str, Target]
    rows: Sequence[ReportRow]

    def of(self, setting: str) -> list[ReportRow]:
        """Return the rows of one setting."""
        return [row for row in self.rows if row.setting == setting]

    @property
    def with_latecomers(self) -> list[tuple[ReportRow, dict[str, float]]]:
        """Rows with clients that came late, and the means over seeds of what is known of them."""
        rows: list[tuple[ReportRow, dict[str, float]]] = []
        for row in self.rows:
            entries = [cell.latecomers for cell in row.cells if cell.latecomers]
            if entries:
                means = {name: fmean(entry[name] for entry in entries) for name in LATECOMERS}
                rows.append((row, means))
        return rows


Finals = Mapping[tuple[str, str], Mapping[int, float]]  # (setting, variant) -> seed -> accuracy


def analyse(study: Study, options: Options | None = None) -> Results:
    """Compute every number of a report."""
    options = options or Options()
    if options.paper is not None:
        study = dataclasses.replace(study, paper=read_paper(options.paper))
    check_paper(study)
    control = _control(study, options)
    finals: dict[tuple[str, str], Mapping[int, float]] = {}
    for setting in study.settings:
        for variant in study.variants:
            cells = study.of(setting, variant)
            if cells:
                finals[setting, variant] = final_accuracies(cells)
    targets: dict[str, Target] = {}
    for setting in study.settings:
        target = _target(study, finals, setting, options)
        if target is not None:
            targets[setting] = target
    rows = [_row(study, pair, finals, targets, control) for pair in finals]
    return Results(
        study=study,
        control=control,
        targets=targets,
        rows=_with_verdicts(rows),
    )


def _control(study: Study, options: Options) -> str | None:
    variants = study.variants
    name = options.control or study.control
    if name is None:
        if len(variants) < 2:
            return None
        return DEFAULT_CONTROL if DEFAULT_CONTROL in variants else variants[0]
    if name not in variants:
        raise UserError(
            f"The control '{name}' is not among the variants.{nearest(name, variants)} "
            f"Choose one of {', '.join(variants)}.",
            key="--control",
        )
    return name


def final_accuracies(cells: Sequence[CellResult]) -> dict[int, float]:
    """Return seed -> final accuracy, of the cells that have finished."""
    accuracies: dict[int, float] = {}
    for cell in cells:
        accuracy = None if cell.facts is None else cell.facts.accuracy
        if cell.state == "finished" and accuracy is not None:
            accuracies[cell.seed] = accuracy
    return accuracies


def _target(
    study: Study,
    finals: Finals,
    setting: str,
    options: Options,
) -> Target | None:
    """Return the target of a setting: given, or derived from its best variant."""
    if options.target is not None:
        return Target(options.target, given=True)
    if study.targets.get(setting) is not None:
        return Target(study.targets[setting], given=True)
    best = _best_mean(finals, setting)
    if best is None:
        return None
    return Target(DEFAULT_TARGET * best, given=False)


def _best_mean(finals: Finals, setting: str) -> float | None:
    """Return the highest mean accuracy among the variants of a setting with a finished seed."""
    means: list[float] = []
    for (other_setting, _), accuracies in finals.items():
        if other_setting == setting and accuracies:
            means.append(fmean(accuracies.values()))
    return max(means, default=None)


def _row(
    study: Study,
    pair: tuple[str, str],
    finals: Finals,
    targets: Mapping[str, Target],
    control: str | None,
) -> ReportRow:
    setting, variant = pair
    cells = study.of(setting, variant)
    accuracies = finals[pair]
    control_accuracies: Mapping[int, float] = {}
    control_cells: list[CellResult] = []
    if control is not None and control != variant:
        control_accuracies = finals.get((setting, control), {})
        control_cells = study.of(setting, control)
    config = config_of(cells)
    published = published_figure(study.paper, config) if config else None
    gap = None
    spread = None
    is_best = False
    if accuracies:
        values = list(accuracies.values())
        spread = _spread(cells, accuracies)
        is_best = fmean(values) == _best_mean(finals, setting)
        if published is not None:
            gap = against_published(values, published.figure)
    target = targets.get(setting)
    seeds = [cell.seed for cell in cells]
    return ReportRow(
        setting=setting,
        variant=variant,
        cells=cells,
        spread=spread,
        best=is_best,
        control=_uncorrected(paired(accuracies, control_accuracies)),
        published=published,
        paper=_uncorrected(gap),
        to_target={} if target is None else _costs(cells, target.value),
        savings={} if target is None else _savings(cells, control_cells, target.value),
        fairness=_fairness(cells),
        command=command(config, seeds) if config else "",
    )


def _fairness(cells: Sequence[CellResult]) -> Fairness | None:
    participations: list[Participation] = []
    for cell in cells:
        if cell.participation is not None:
            participations.append(cell.participation)
    return Fairness.of(participations)


def config_of(cells: Sequence[CellResult]) -> Mapping[str, Any]:
    """Return the configuration of the first seed that has one: a missing cell has none."""
    return next((cell.config for cell in cells if cell.config), {})


def _spread(cells: Sequence[CellResult], accuracies: Mapping[int, float]) -> Spread:
    over_rounds: list[float | None] = []
    for cell in cells:
        if cell.seed in accuracies and cell.facts is not None:
            over_rounds.append(cell.facts.over_rounds)
    return Spread.of(list(accuracies.values()), over_rounds)


def spent(cells: Sequence[CellResult], measure: str, target: float) -> dict[int, Spent]:
    """Return what each seed spent until it reached a target; cells not yet begun are left out.

    A run that failed or is unfinished and has not reached the target is a miss, even if it failed
    before its first round.
    """
    amounts: dict[int, Spent] = {}
    for cell in cells:
        if cell.facts is not None:
            amounts[cell.seed] = cell.facts.climb.spent(measure, target)
        elif cell.state == "failed":
            amounts[cell.seed] = Spent(0, reached=False)
    return amounts


def _costs(cells: Sequence[CellResult], target: float) -> dict[str, ToTarget]:
    costs: dict[str, ToTarget] = {}
    for measure in MEASURES:
        runs = spent(cells, measure, target)
        if runs:
            costs[measure] = ToTarget(tuple(runs.values()))
    return costs


def _savings(
    cells: Sequence[CellResult], control_cells: Sequence[CellResult], target: float
) -> dict[str, Saving]:
    savings: dict[str, Saving] = {}
    for measure in MEASURES:
        runs: list[Spent] = []
        control_runs: list[Spent] = []
        spent_by_control = spent(control_cells, measure, target)
        for seed, run in spent(cells, measure, target).items():
            if seed in spent_by_control:
                runs.append(run)
                control_runs.append(spent_by_control[seed])
        saved = saving(runs, control_runs)
        if saved is not None:
            savings[measure] = saved
    return savings


def _uncorrected(difference: Difference | None) -> Comparison | None:
    if difference is None:
        return None
    return Comparison(difference, difference.p, verdict="")


def _with_verdicts(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Correct p-values over all rows: comparisons with the control, and those with the paper."""
    controls = _corrected([row.control for row in rows])
    papers = _corrected([row.paper for row in rows])
    judged: list[ReportRow] = []
    for row, control, paper in zip(rows, controls, papers, strict=True):
        judged.append(dataclasses.replace(row, control=control, paper=paper))
    return judged


def _corrected(comparisons: Sequence[Comparison | None]) -> list[Comparison | None]:
    p_values: list[float | None] = []
    for comparison in comparisons:
        p_values.append(None if comparison is None else comparison.difference.p)
    adjusted = holm(p_values)
    corrected: list[Comparison | None] = []
    for comparison, p in zip(comparisons, adjusted, strict=True):
        if comparison is None:
            corrected.append(None)
        else:
            difference = comparison.difference
            verdict = difference.verdict(p)
            corrected.append(Comparison(difference, p, verdict))
    return corrected


def command(config: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """Return `fedglimpse run ...` for these seeds of a configuration of dotted keys.

    A preset that only sets values may have set others when the run was made; then the preset that
    needs the fewest overrides is named.
    """
    preset = config["preset"]
    presets = VALUES_ALONE if preset in VALUES_ALONE else (preset,)
    overrides = min((_overrides(config, name) for name in presets), key=len)
    seed_list = json.dumps(list(seeds), separators=(",", ":"))
    overrides.append(f"seeds={seed_list}")
    return f"fedglimpse run {shlex.join(overrides)}"


def _overrides(config: Mapping[str, Any], preset: str) -> list[str]:
    """Return what has to be set, beside a preset, to have this configuration."""
    defaults = resolve({"preset": preset, "data.name": config["data.name"]}).flat()
    overrides = [] if preset == DEFAULT_PRESET else [f"preset={preset}"]
    for key, value in retired.without_defaults(config).items():
        if key in ("preset", "seeds") or key.startswith(FREE_TO_CHANGE):
            continue
        is_default = False
        if key in defaults:
            is_default = _as_list(defaults[key]) == _as_list(value)
        if key in ALWAYS_NAMED or not is_default:
            overrides.append(f"{key}={_as_word(value)}")
    return overrides


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_word(value: Any) -> str:
    """Write a value so that `config.loading.parse_overrides` reads it back as it was."""
    if not isinstance(value, str):
        return json.dumps(_as_list(value))
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return json.dumps(value)  # a text that would be read as a number or a list
