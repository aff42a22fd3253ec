"""For every study a world in which its claims clearly hold, and one in which they clearly fail."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from random import Random
from typing import Any

from fedglimpse.studies.results.study import CellResult
from played import BASELINES, PLANS, Came, World, disagree, jitter
from reproduction.evidence import Evidence

TABLE = PLANS.paper("paper_table1")
Config = Mapping[str, Any]


def _gain(config: Config, better: bool) -> float:
    """Return how far glimpse is ahead: most under label skew and with a mobile server."""
    if config["data.partition"] == "subject":
        return 0.01
    skewed, mobile = config["data.partition"] == "label_skew", config["visibility.kind"] == "mobile"
    if better:
        return 0.06 + 0.04 * skewed + 0.02 * mobile
    return 0.06 - 0.04 * skewed - 0.04 * mobile


def table_holds(cell: CellResult, config: Config) -> Came:
    base = 0.94 if config["data.partition"] == "subject" else 0.5
    if cell.variant == "glimpse":
        return Came(base + _gain(config, True) + jitter(cell, 0.0002), 0.01 + jitter(cell), 20)
    return Came(base + 0.002 * disagree(cell), 0.05 + jitter(cell), 500 + cell.seed)


def table_fails(cell: CellResult, config: Config) -> Came:
    base = 0.7 if config["visibility.kind"] == "mobile" else 0.5
    if cell.variant == "glimpse":
        behind = 0.12 - _gain(config, False) if config["data.partition"] != "subject" else 0.1
        return Came(base - behind + 0.005 * disagree(cell), 0.06 + jitter(cell), 550)
    return Came(base + jitter(cell, 0.0005), 0.01 + jitter(cell), 100 + cell.seed)


def noise(cell: CellResult, config: Config) -> Came:
    return Came(0.5 + 0.3 * disagree(cell), 0.5 + 0.3 * disagree(cell), reached=False)


def context_holds(cell: CellResult, config: Config) -> Came:
    return Came(0.4 + 0.05 * log2(min(config["agent.history"], 8)) + jitter(cell))


def context_fails(cell: CellResult, config: Config) -> Came:
    history = config["agent.history"]
    return Came(0.6 - 0.05 * log2(min(history, 8)) + (0.1 if history > 8 else 0) + jitter(cell))


def selection_holds(cell: CellResult, config: Config) -> Came:
    size = config["visibility.cluster_size"] / 100 + config["selection.k"] / 50
    gain = 0.05 if cell.variant == "glimpse" else 0.0
    return Came(0.4 + size + config["visibility.p"] + gain + jitter(cell))


def selection_fails(cell: CellResult, config: Config) -> Came:
    size = config["visibility.cluster_size"] / 100 + config["selection.k"] / 50
    loss = 0.05 if cell.variant == "glimpse" else 0.0
    return Came(0.9 - size - config["visibility.p"] - loss + jitter(cell))


def identity_holds(cell: CellResult, config: Config) -> Came:
    has = cell.variant == "identity table"
    return Came(0.6 + 0.05 * has + jitter(cell), 0.05 - 0.03 * has + jitter(cell))


def identity_fails(cell: CellResult, config: Config) -> Came:
    has = cell.variant == "identity table"
    return Came(0.6 - 0.05 * has + jitter(cell), 0.02 + 0.03 * has + jitter(cell))


def components_hold(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + 0.05 * (cell.variant == "glimpse") + jitter(cell))


def components_fail(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + 0.05 * (cell.variant == "no spatial attention") + jitter(cell))


def choosing_is_nothing(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + jitter(cell))


def choosing_pays(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + 0.05 * (cell.variant == "dpp") + jitter(cell))


def choosing_may_pay(cell: CellResult, config: Config) -> Came:
    """Seeds disagree about more than a point."""
    return Came(0.6 + 0.05 * (cell.variant == "dpp") * disagree(cell))


def _published(cell: CellResult, name: str) -> float:
    figures = Evidence(PLANS.study(name).study, TABLE).published(cell.setting)
    if cell.variant in BASELINES:
        return figures[cell.variant][0] / 100
    return max(mean for mean, _ in figures.values()) / 100


def adam_holds(cell: CellResult, config: Config) -> Came:
    ahead = 0.05 if cell.variant == "glimpse" else 0.0
    behind = 0.3 if cell.variant == "fedavg-window" else 0.0
    return Came(_published(cell, "recipe_adam") + ahead - behind + jitter(cell))


def far_below(cell: CellResult, config: Config) -> Came:
    return Came(0.02 + jitter(cell))


def agent_holds(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + 0.05 * (cell.variant == "glimpse") + jitter(cell))


def agent_fails(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.05 * (cell.variant == "glimpse") + jitter(cell))


def presets_hold(cell: CellResult, config: Config) -> Came:
    low = 0.5 if cell.variant == "glimpse, released" else 0.0
    return Came(_published(cell, "presets") - low + jitter(cell))


def recipe_holds(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.3 * (config["local.optimizer"] == "adam") + jitter(cell))


def luck(cell: CellResult, config: Config) -> Came:
    """Every cell on its own: what one seed finds best says nothing about another seed."""
    return Came(0.5 + 0.2 * Random(cell.id).gauss())


def recipe_fails(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + jitter(cell))


def turns_hold(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.05 * (cell.variant == "glimpse") + jitter(cell))


def turns_fail(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.05 * ("turns" in cell.variant) + jitter(cell))


def changes_hold(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + 0.05 * (cell.variant == "glimpse, changes") + jitter(cell))


def changes_fail(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.05 * (cell.variant == "glimpse, changes") + jitter(cell))


def leaning_holds(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + 0.05 * (cell.variant == "glimpse, leaning") + jitter(cell))


def leaning_fails(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.05 * (cell.variant == "glimpse, leaning") + jitter(cell))


def proof_holds(cell: CellResult, config: Config) -> Came:
    gain = {"glimpse": -0.05, "glimpse, proven, leaning": 0.05}
    return Came(0.6 + gain.get(cell.variant, 0.0) + 1e-4 * Random(cell.id).gauss())


def proof_fails(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.05 * ("proven" in cell.variant) + jitter(cell))


def teaching_holds(cell: CellResult, config: Config) -> Came:
    return Came(0.6 + 0.05 * (cell.variant == "glimpse, taught") + jitter(cell))


def teaching_fails(cell: CellResult, config: Config) -> Came:
    return Came(0.6 - 0.05 * (cell.variant == "glimpse, taught") + jitter(cell))


OPEN: dict[str, World] = {  # every verdict is inconclusive; all others: `noise`
    "recipe_study": luck,
    "averaged_digits": choosing_may_pay,
    "averaged": choosing_may_pay,
}
WORLDS: dict[str, tuple[World, World]] = {  # study -> claims hold, claims fail
    "table1": (table_holds, table_fails),
    "fig6_history": (context_holds, context_fails),
    "fig7_selection": (selection_holds, selection_fails),
    "fig8_identity": (identity_holds, identity_fails),
    "components": (components_hold, components_fail),
    "agent_study": (turns_hold, turns_fail),
    "history_study": (changes_hold, changes_fail),
    "lean_study": (leaning_holds, leaning_fails),
    "proof_study": (proof_holds, proof_fails),
    "proof": (proof_holds, proof_fails),
    "taught_study": (teaching_holds, teaching_fails),
    "taught": (teaching_holds, teaching_fails),
    "recipe_adam": (adam_holds, far_below),
    "presets": (presets_hold, far_below),
    "recipe_study": (recipe_holds, recipe_fails),
    "averaged_digits": (choosing_is_nothing, choosing_pays),
    "averaged": (choosing_is_nothing, choosing_pays),
    "adam_study": (agent_holds, agent_fails),
}
