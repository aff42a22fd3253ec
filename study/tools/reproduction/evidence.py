"""Reading a stored study for a claim: values of cells, and differences between groups of them.

Two arms, each a variant in a setting, are compared seed by seed, and several such pairs of arms
are pooled (`pooling.py`). Where a pair has no seed, cells are not run yet, and so is the whole
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedglimpse.studies.report.analysis import final_accuracies
from fedglimpse.studies.results import Study
from fedglimpse.studies.statistics.condense import Facts
from reproduction.pooling import Pooled, Values, pool

OURS = "glimpse"
STAND_INS = {"hapt": "har"}  # data that is run in place of the paper's
Arm = tuple[str, str | None]  # setting, variant; None: not known yet


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

    def where(self, **keys: str) -> list[str]:
        """Return settings by partition, data or visibility."""
        full = {"partition": "data.partition", "data": "data.name", "visibility": "visibility.kind"}
        return [
            s
            for s in self.study.settings
            if all(self.config(s)[full[k]] == v for k, v in keys.items())
        ]

    def images(self) -> list[str]:
        """Return the settings whose data is dealt out by Dirichlet or label skew."""
        return [*self.where(partition="dirichlet"), *self.where(partition="label_skew")]

    def published(self, setting: str) -> Mapping[str, Sequence[float]]:
        """Return the published figures of a setting; nothing where the paper has none."""
        config = self.config(setting)
        run = {**config, "data.name": STAND_INS.get(config["data.name"], config["data.name"])}
        for name, known in self.table["settings"].items():
            if all(run.get(key) == value for key, value in known["match"].items()):
                return dict(self.table["accuracy"][name])
        return {}

    def published_gain(self, setting: str) -> float | None:
        """Return how far the paper's method is above its best baseline, as a share of one."""
        figures = self.published(setting)
        if not figures:
            return None
        others = [figure[0] for method, figure in figures.items() if method != OURS]
        return float(figures[OURS][0] - max(others)) / 100

    def claimed(self, name: str) -> float:
        """Return the number of another claim on the published table, as a share of one."""
        claim = next(c for c in self.table["claims"] if c["id"] == name)
        return float(claim["value"]) / 100

    def strongest(self, setting: str) -> str | None:
        """Return the baseline with the highest mean accuracy; None until all have a seed."""
        means = {b: final(self, (setting, b)) for b in self.baselines}
        if not all(means.values()):
            return None
        return max(means, key=lambda b: fmean(means[b].values()))


Measure = Callable[[Evidence, Arm], Values]


def _facts(evidence: Evidence, arm: Arm, read: Callable[[Facts], float | None]) -> Values:
    setting, variant = arm
    found = {}
    for cell in evidence.study.of(setting, variant or ""):
        value = read(cell.facts) if cell.state == "finished" and cell.facts is not None else None
        if value is not None:
            found[cell.seed] = value
    return found


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
    middle = fmean(values.values())
    return {seed: abs(value - middle) for seed, value in values.items()}


def gain(evidence: Evidence, arm: Arm) -> Values:
    """Accuracy minus that of the setting's strongest baseline."""
    theirs = final(evidence, (arm[0], evidence.strongest(arm[0])))
    return {s: value - theirs[s] for s, value in final(evidence, arm).items() if s in theirs}


def contrast(
    evidence: Evidence,
    pairs: Sequence[tuple[Arm, Arm]],
    measure: Measure = final,
    margin: float = 0.0,
) -> Pooled | None:
    """Return first arms minus second arms minus margin, pooled; None where cells are missing."""
    groups: dict[str, list[Values]] = {}
    for first, second in pairs:
        a, b = measure(evidence, first), measure(evidence, second)
        gaps = {seed: a[seed] - b[seed] - margin for seed in a.keys() & b.keys()}
        groups.setdefault(evidence.data(first[0]), []).append(gaps)
    return pool(groups)


def above_level(evidence: Evidence, arm: Arm, level: float) -> Pooled | None:
    """Return an arm's accuracy minus a fixed level; None where it has no seed."""
    values = final(evidence, arm)
    return pool({evidence.data(arm[0]): [{s: v - level for s, v in values.items()}]})


def over_strongest(
    evidence: Evidence, settings: Sequence[str], margin: float = 0.0
) -> Pooled | None:
    """Return our method minus the strongest baseline of each setting, pooled over settings."""
    pairs = [((s, OURS), (s, evidence.strongest(s))) for s in settings]
    return contrast(evidence, pairs, final, margin)


def over_each_baseline(
    evidence: Evidence, settings: Sequence[str], measure: Measure = final, margin: float = 0.0
) -> dict[str, Pooled | None]:
    """Return our method minus each baseline, pooled over settings."""
    return {
        b: contrast(evidence, [((s, OURS), (s, b)) for s in settings], measure, margin)
        for b in evidence.baselines
    }


def under_each_baseline(
    evidence: Evidence, settings: Sequence[str], measure: Measure
) -> dict[str, Pooled | None]:
    """Return each baseline minus our method, pooled over settings: above zero, ours is lower."""
    return {
        b: contrast(evidence, [((s, b), (s, OURS)) for s in settings], measure)
        for b in evidence.baselines
    }
