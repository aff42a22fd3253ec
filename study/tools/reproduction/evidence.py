"""Reading a stored study for a claim: values of cells, and differences between groups of them.

Two arms, each a variant in a setting, are compared seed by seed, and several such pairs of arms
are pooled (`pooling.py`). If one pair has no seed in common, the whole comparison is not run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedglimpse.studies.report.analysis import final_accuracies
from fedglimpse.studies.results.study import Study
from fedglimpse.studies.statistics.condense import Facts
from reproduction.pooling import Pooled, Values, pool

OURS = "glimpse"
STAND_INS = {"hapt": "har"}  # data that is run instead of the paper's
Arm = tuple[str, str | None]  # setting, variant; None: the strongest baseline is not known yet


@dataclass(frozen=True)
class Evidence:
    """A study, the published table, and the number that the claim prints."""

    study: Study
    table: Mapping[str, Any]  # paper_table1.toml
    value: float | None = None  # in the claim's own unit

    @property
    def share(self) -> float:
        """The claim's percent or points as a share of one."""
        return float(self.value or 0) / 100

    @property
    def baselines(self) -> list[str]:
        """The methods that the paper compares its own with."""
        figures = next(iter(self.table["accuracy"].values()))
        return [method for method in figures if method != OURS]

    def config(self, setting: str) -> Mapping[str, Any]:
        """Return the configuration of a setting's first cell."""
        return next(c.config for c in self.study.cells if c.setting == setting)

    def data(self, setting: str) -> str:
        """Return the data of a setting."""
        return str(self.config(setting)["data.name"])

    def where(
        self,
        partition: str | None = None,
        data: str | None = None,
        visibility: str | None = None,
    ) -> list[str]:
        """Return settings by partition, data or visibility."""
        settings: list[str] = []
        for setting in self.study.settings:
            config = self.config(setting)
            if (
                partition in (None, config["data.partition"])
                and data in (None, config["data.name"])
                and visibility in (None, config["visibility.kind"])
            ):
                settings.append(setting)
        return settings

    def images(self) -> list[str]:
        """Return the settings whose data is dealt out by Dirichlet or label skew."""
        return [*self.where(partition="dirichlet"), *self.where(partition="label_skew")]

    def published(self, setting: str) -> Mapping[str, Sequence[float]]:
        """Return the published figures of a setting; nothing where the paper has none."""
        config = self.config(setting)
        run = {**config, "data.name": STAND_INS.get(config["data.name"], config["data.name"])}
        for name, published in self.table["settings"].items():
            if published["match"].items() <= run.items():
                return dict(self.table["accuracy"][name])
        return {}

    def published_gain(self, setting: str) -> float | None:
        """Return how far the paper's method is above its best baseline, as a share of one."""
        figures = self.published(setting)
        if not figures:
            return None
        baselines = [figure[0] for method, figure in figures.items() if method != OURS]
        return float(figures[OURS][0] - max(baselines)) / 100

    def claimed(self, name: str) -> float:
        """Return the number of another claim on the published table, as a share of one."""
        claim = next(c for c in self.table["claims"] if c["id"] == name)
        return float(claim["value"]) / 100

    def strongest(self, setting: str) -> str | None:
        """Return the baseline with the highest mean accuracy; None until all have a seed."""
        means: dict[str, float] = {}
        for baseline in self.baselines:
            accuracies = final(self, (setting, baseline))
            if not accuracies:
                return None
            means[baseline] = fmean(accuracies.values())
        return max(means, key=means.__getitem__)


Measure = Callable[[Evidence, Arm], Values]


def _facts(evidence: Evidence, arm: Arm, read: Callable[[Facts], float | None]) -> Values:
    setting, variant = arm
    values: Values = {}
    for cell in evidence.study.of(setting, variant or ""):
        value = read(cell.facts) if cell.state == "finished" and cell.facts is not None else None
        if value is not None:
            values[cell.seed] = value
    return values


def final(evidence: Evidence, arm: Arm) -> Values:
    """Accuracy: the mean over the last 50 rounds."""
    return final_accuracies(evidence.study.of(arm[0], arm[1] or ""))


def swing(evidence: Evidence, arm: Arm) -> Values:
    """Standard deviation of the accuracy over the last 50 rounds."""
    return _facts(evidence, arm, lambda facts: facts.over_rounds)


def whole(evidence: Evidence, arm: Arm) -> Values:
    """Mean accuracy over the whole training."""
    return _facts(evidence, arm, lambda facts: facts.whole)


def proxy(evidence: Evidence, arm: Arm) -> Values:
    """Smoothed score on the proxy set: the mean over the last 50 rounds."""
    return _facts(evidence, arm, lambda facts: facts.reward)


def early(evidence: Evidence, arm: Arm) -> Values:
    """Mean accuracy over the first tenth of the rounds."""
    return _facts(evidence, arm, lambda facts: facts.early)


def deviation(evidence: Evidence, arm: Arm) -> Values:
    """Distance of each seed's accuracy from the mean over seeds, three at least.

    Two are equally far from their mean, and would look like a distance without noise.
    """
    values = final(evidence, arm)
    if len(values) < 3:
        return {}
    mean = fmean(values.values())
    return {seed: abs(value - mean) for seed, value in values.items()}


def gain(evidence: Evidence, arm: Arm) -> Values:
    """Accuracy minus that of the setting's strongest baseline."""
    setting, _ = arm
    return minus(final(evidence, arm), final(evidence, (setting, evidence.strongest(setting))))


def minus(values: Values, subtracted: Values, margin: float = 0.0) -> Values:
    """Return the differences, minus a margin, of the seeds that both have."""
    differences: Values = {}
    for seed in values.keys() & subtracted.keys():
        differences[seed] = values[seed] - subtracted[seed] - margin
    return differences


def contrast(
    evidence: Evidence,
    pairs: Sequence[tuple[Arm, Arm]],
    measure: Measure = final,
    margin: float = 0.0,
) -> Pooled | None:
    """Return first arms minus second arms minus margin, pooled; None if cells are missing."""
    groups: dict[str, list[Values]] = {}
    for first, second in pairs:
        differences = minus(measure(evidence, first), measure(evidence, second), margin)
        groups.setdefault(evidence.data(first[0]), []).append(differences)
    return pool(groups)


def above_level(evidence: Evidence, arm: Arm, level: float) -> Pooled | None:
    """Return an arm's accuracy minus a fixed level; None if it has no seed."""
    values = final(evidence, arm)
    differences = {seed: value - level for seed, value in values.items()}
    return pool({evidence.data(arm[0]): [differences]})


def in_every_setting(
    evidence: Evidence,
    variant: str,
    other: str,
    measure: Measure = final,
    margin: float = 0.0,
    settings: Sequence[str] | None = None,
) -> Pooled | None:
    """Return a variant minus another one, pooled over settings; by default over all of them."""
    pairs: list[tuple[Arm, Arm]] = []
    for setting in evidence.study.settings if settings is None else settings:
        pairs.append(((setting, variant), (setting, other)))
    return contrast(evidence, pairs, measure, margin)


def over_strongest(
    evidence: Evidence, settings: Sequence[str], margin: float = 0.0
) -> Pooled | None:
    """Return our method minus the strongest baseline of each setting, pooled over settings."""
    pairs: list[tuple[Arm, Arm]] = []
    for setting in settings:
        pairs.append(((setting, OURS), (setting, evidence.strongest(setting))))
    return contrast(evidence, pairs, final, margin)


def over_each_baseline(
    evidence: Evidence, settings: Sequence[str], measure: Measure = final, margin: float = 0.0
) -> dict[str, Pooled | None]:
    """Return our method minus each baseline, pooled over settings."""
    differences: dict[str, Pooled | None] = {}
    for baseline in evidence.baselines:
        differences[baseline] = in_every_setting(
            evidence, OURS, baseline, measure, margin, settings
        )
    return differences


def under_each_baseline(
    evidence: Evidence, settings: Sequence[str], measure: Measure
) -> dict[str, Pooled | None]:
    """Return each baseline minus our method, pooled over settings: above zero, ours is lower."""
    differences: dict[str, Pooled | None] = {}
    for baseline in evidence.baselines:
        differences[baseline] = in_every_setting(
            evidence, baseline, OURS, measure, settings=settings
        )
    return differences
