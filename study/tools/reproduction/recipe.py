"""The recipe study: what the proxy set says of each local recipe, and which one `tuned` takes."""

from __future__ import annotations

from statistics import mean

from fedglimpse.studies.results import Study
from fedglimpse.studies.statistics.condense import Facts
from reproduction.markdown import paragraphs, table

RULE = (
    "Rule, written down before SGD 3e-2 was finished on CIFAR-10: `tuned` takes the recipe with "
    "the highest proxy score, averaged over the four settings, once every cell is finished; one "
    "recipe for all data."
)


def recipe_table(study: Study) -> str:
    """Return accuracy on the test set and score on the proxy set, and what the rule decides."""
    head = [text for setting in study.settings for text in (f"{setting}: test %", "proxy")]
    rows = []
    for variant in study.variants:
        row = [variant]
        for setting in study.settings:
            facts = _facts(study, setting, variant)
            row += (
                ["not run yet", ""] if facts is None else [_accuracy(facts), f"{_proxy(facts):.3f}"]
            )
        rows.append(row)
    chosen = chosen_recipe(study)
    said = "not decided yet, for cells are missing" if chosen is None else f"**{chosen}**"
    return paragraphs([table(["recipe", *head], rows), f"{RULE} By it: {said}."])


def chosen_recipe(study: Study) -> str | None:
    """Return the variant with the highest mean proxy score; None while a cell is missing."""
    scores: dict[str, float] = {}
    for variant in study.variants:
        found = [_facts(study, setting, variant) for setting in study.settings]
        if None in found:
            return None
        scores[variant] = mean(_proxy(facts) for facts in found if facts is not None)
    return max(scores, key=scores.__getitem__)


def _facts(study: Study, setting: str, variant: str) -> list[Facts] | None:
    """Return what is known of all seeds; None where one has not finished."""
    cells = study.of(setting, variant)
    facts = [c.facts for c in cells if c.state == "finished" and c.facts is not None]
    return facts if facts and len(facts) == len(cells) else None


def _accuracy(facts: list[Facts]) -> str:
    return f"{100 * mean(f.accuracy or 0.0 for f in facts):.1f}"


def _proxy(facts: list[Facts]) -> float:
    return mean(f.reward or 0.0 for f in facts)
