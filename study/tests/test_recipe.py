"""Which recipe `tuned` takes: the proxy set decides, and only when every cell is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedglimpse.studies.results.study import CellResult, Study
from played import Came, played
from reproduction.recipe import chosen_recipe, recipe_table


def scored(proxy: Mapping[str, float], missing: str = "") -> Study:
    """Return the recipe study with a proxy score for each variant; the test set says otherwise."""

    def world(cell: CellResult, config: Mapping[str, Any]) -> Came | None:
        worst = cell.variant == missing and "CIFAR" in cell.setting and cell.seed == 1
        return None if worst else Came(1 - proxy.get(cell.variant, 0.5))

    study = played("recipe_study", world)
    cells = []
    for cell in study.cells:
        reward = proxy.get(cell.variant, 0.5)
        facts = cell.facts and dataclasses.replace(cell.facts, reward=reward)
        cells.append(dataclasses.replace(cell, facts=facts))
    return dataclasses.replace(study, cells=cells)


def test_the_proxy_set_decides_and_not_the_test_set() -> None:
    study = scored({"SGD 3e-2, 6 raw": 0.8, "SGD 1e-3, no window": 0.2})
    assert chosen_recipe(study) == "SGD 3e-2, 6 raw"
    assert "By it: **SGD 3e-2, 6 raw**." in recipe_table(study)


def test_nothing_is_decided_while_a_cell_is_missing() -> None:
    study = scored({"SGD 3e-2, 6 raw": 0.8}, missing="SGD 1e-3, no window")
    assert chosen_recipe(study) is None
    assert "not decided yet" in recipe_table(study)
    assert recipe_table(study).count("not run yet") == 2  # the two settings on CIFAR-10
