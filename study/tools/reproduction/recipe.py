"""The recipe study: the proxy score of each local recipe, and the one that `tuned` takes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from fedglimpse.studies.results.study import Study
from fedglimpse.studies.statistics.condense import Facts
from reproduction.markdown import paragraphs, table

RULE = (
    "Rule, written down before SGD 3e-2 was finished on CIFAR-10: `tuned` takes the recipe with "
    "the highest proxy score, averaged over the four settings, once every cell is finished; one "
    "recipe for all data."
)


def recipe_table(study: Study) -> str:
    """Return accuracy on the test set and score on the proxy set, and what the rule decides."""
    header = ["recipe"]
    for setting in study.settings:
        header += [f"{setting}: test %", "proxy"]
    rows: list[list[str]] = []
    for variant in study.variants:
        row = [variant]
        for setting in study.settings:
            facts = _facts_of_all_seeds(study, setting, variant)
            if facts is None:
                row += ["not run yet", ""]
            else:
                row += [_accuracy(facts), f"{_proxy_score(facts):.3f}"]
        rows.append(row)
    recipe = chosen_recipe(study)
    decision = "not decided yet, for cells are missing" if recipe is None else f"**{recipe}**"
    return paragraphs([table(header, rows), f"{RULE} By it: {decision}."])


def chosen_recipe(study: Study) -> str | None:
    """Return the variant with the highest mean proxy score; None while a cell is missing."""
    mean_scores: dict[str, float] = {}
    for variant in study.variants:
        scores: list[float] = []
        for setting in study.settings:
            facts = _facts_of_all_seeds(study, setting, variant)
            if facts is None:
                return None
            scores.append(_proxy_score(facts))
        mean_scores[variant] = mean(scores)
    return max(mean_scores, key=mean_scores.__getitem__)


def _facts_of_all_seeds(study: Study, setting: str, variant: str) -> list[Facts] | None:
    """Return what is stored of every seed; None if one has not finished."""
    facts: list[Facts] = []
    for cell in study.of(setting, variant):
        if cell.state != "finished" or cell.facts is None:
            return None
        facts.append(cell.facts)
    return facts or None


def _accuracy(seeds: Sequence[Facts]) -> str:
    return f"{100 * mean(facts.accuracy or 0.0 for facts in seeds):.1f}"


def _proxy_score(seeds: Sequence[Facts]) -> float:
    return mean(facts.reward or 0.0 for facts in seeds)
