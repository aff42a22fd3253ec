"""The paper's own figures beside ours: which belong together, and in what the runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError
from fedglimpse.stats.difference import Published
from fedglimpse.toml import read_table


@dataclass(frozen=True)
class Beside:
    """A published figure, and every key in which our run is not what the paper describes."""

    figure: Published  # as shares, 0 to 1
    deviations: tuple[str, ...]  # "rounds 80 (paper: 600)"


def read_paper(path: Path) -> dict[str, Any]:
    """Read a file of published figures, such as experiments/paper_table1.toml."""
    paper = read_table(path, "paper_*.toml")
    if "source" not in paper:
        raise UserError(f"{path} holds no published figures: it must say its `source`.")
    if problem := _problem(paper):
        raise UserError(
            f"{path} {problem}: write it like experiments/paper_table1.toml, or leave --paper out."
        )
    return paper


def _problem(paper: Mapping[str, Any]) -> str:
    """Say what in a file of published figures cannot be used; empty where all can."""
    for key, kind, wanted in (
        ("source", str, "a text"),
        ("title", str, "a text"),
        ("settings", dict, "a table"),
        ("accuracy", dict, "a table"),
        ("protocol", dict, "a table"),
        ("protocol_of", dict, "a table of tables"),
        ("claims", list, "a list of tables"),
    ):
        if not isinstance(paper.get(key, kind()), kind):
            return f"has `{key}` = {paper[key]!r}, which must be {wanted}"
    if "title" not in paper:
        return "must say its `title`"
    if not paper.get("settings") and not paper.get("claims"):
        return "holds no published figures, neither `settings` with `accuracy` nor `claims`"
    for claim in paper.get("claims", ()):
        if not isinstance(claim, dict) or not all(
            isinstance(claim.get(k, ""), str) for k in ("text", "source", "note")
        ):
            return f"has a claim {claim!r}, which must be a table of texts"
        if "text" not in claim or "source" not in claim:
            return f"has a claim {claim!r}, which must say its `text` and `source`"
    for name, table in paper.get("protocol_of", {}).items():
        if not isinstance(table, dict):
            return f"has `protocol_of.{name}` = {table!r}, which must be a table"
    return _problem_of_settings(paper)


def _problem_of_settings(paper: Mapping[str, Any]) -> str:
    settings, accuracy = paper.get("settings", {}), paper.get("accuracy", {})
    seeds = paper.get("seeds")
    if settings and (not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1):
        return f"has `seeds` = {seeds!r}, which must be the number of the paper's seeds"
    for name, setting in settings.items():
        if not isinstance(setting, dict) or not isinstance(setting.get("match"), dict):
            return f"has `settings.{name}` without a table `match`"
        if not isinstance(setting.get("protocol", {}), dict):
            return f"has `settings.{name}.protocol`, which must be a table"
        figures = accuracy.get(name)
        if not isinstance(figures, dict):
            return f"has `settings.{name}`, but no table `accuracy.{name}`"
        for method, figure in figures.items():
            if not _is_figure(figure):
                return (
                    f"has `accuracy.{name}.{method}` = {figure!r}, which must be [mean, deviation] "
                    "in %"
                )
    return ""


def _is_figure(figure: object) -> bool:
    return (
        isinstance(figure, list)
        and len(figure) >= 2
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in figure[:2])
    )


def beside(paper: Mapping[str, Any] | None, config: Mapping[str, Any]) -> Beside | None:
    """Return the published figure of the setting and method of a run; None where there is none.

    Settings are matched by what was run (dataset, partition, visibility), never by name.
    """
    if paper is None:
        return None
    for name, setting in paper.get("settings", {}).items():
        if all(config.get(key) == value for key, value in setting["match"].items()):
            figure = paper["accuracy"][name].get(config["method"])
            if figure is None:
                return None
            published = Published(figure[0] / 100, figure[1] / 100, int(paper["seeds"]))
            return Beside(published, _deviations(paper, setting, config))
    return None


def _deviations(
    paper: Mapping[str, Any], setting: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str, ...]:
    protocol = {
        **paper.get("protocol", {}),
        **paper.get("protocol_of", {}).get(config["method"], {}),
        **setting.get("protocol", {}),
    }
    return tuple(
        f"{key} {config[key]} (paper: {value})"
        for key, value in protocol.items()
        if key in config and config[key] != value
    )
