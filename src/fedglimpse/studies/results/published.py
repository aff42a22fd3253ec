"""The paper's own figures: read, checked, and matched with runs.

Settings are matched by what was run (dataset, partition, visibility, method), never by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedglimpse.config.loading import read_table
from fedglimpse.errors import UserError
from fedglimpse.studies.results.study import Study
from fedglimpse.studies.statistics.difference import Published

KINDS: tuple[tuple[str, type, str], ...] = (
    ("source", str, "a text"),
    ("title", str, "a text"),
    ("settings", dict, "a table"),
    ("accuracy", dict, "a table"),
    ("protocol", dict, "a table"),
    ("protocol_of", dict, "a table of tables"),
    ("claims", list, "a list of tables"),
)


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure, and the keys in which our run departs from its protocol."""

    figure: Published  # as shares, 0 to 1
    deviations: tuple[str, ...]  # "rounds 80 (paper: 600)"


def read_paper(path: Path) -> dict[str, Any]:
    """Read a file of published figures, such as study/plans/paper_table1.toml."""
    paper = read_table(path, "paper_*.toml")
    problem = problem_of(paper)
    if problem:
        raise UserError(
            f"{path} {problem}: write it like study/plans/paper_table1.toml, or leave --paper out.",
            key="--paper",
        )
    return paper


def check_paper(study: Study) -> None:
    """Raise UserError if the published figures that a study itself holds cannot be used."""
    problem = "" if study.paper is None else problem_of(study.paper)
    if problem:
        raise UserError(
            f"The table `paper` of {study.source} {problem}: fix it there, or name a file of "
            "published figures with --paper.",
            key="--paper",
        )


def published_figure(
    paper: Mapping[str, Any] | None,
    config: Mapping[str, Any],
) -> PublishedFigure | None:
    """Return the published figure of the setting and method of a run; None if there is none."""
    if paper is None:
        return None
    for name, setting in paper.get("settings", {}).items():
        if _matches(config, setting["match"]):
            figure = paper["accuracy"][name].get(config["method"])
            if figure is None:
                return None
            published = Published(
                mean=figure[0] / 100,
                std=figure[1] / 100,
                seeds=int(paper["seeds"]),
            )
            deviations = _deviations(paper, setting, config)
            return PublishedFigure(published, deviations)
    return None


def _matches(config: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(config.get(key) == value for key, value in expected.items())


def _deviations(
    paper: Mapping[str, Any],
    setting: Mapping[str, Any],
    config: Mapping[str, Any],
) -> tuple[str, ...]:
    protocol_of_methods = paper.get("protocol_of", {})
    protocol = {
        **paper.get("protocol", {}),
        **protocol_of_methods.get(config["method"], {}),
        **setting.get("protocol", {}),
    }
    deviations: list[str] = []
    for key, value in protocol.items():
        if key in config and config[key] != value:
            deviations.append(f"{key} {config[key]} (paper: {value})")
    return tuple(deviations)


def problem_of(paper: Mapping[str, Any]) -> str:
    """Return the first thing in published figures that cannot be used; empty if all can."""
    for key, kind, expected in KINDS:
        if not isinstance(paper.get(key, kind()), kind):
            return f"has `{key}` = {paper[key]!r}, which must be {expected}"
    for key in ("source", "title"):
        if key not in paper:
            return f"holds no published figures: it must say its `{key}`"
    if not paper.get("settings") and not paper.get("claims"):
        return "holds no published figures, neither `settings` with `accuracy` nor `claims`"
    for claim in paper.get("claims", ()):
        problem = _problem_of_claim(claim)
        if problem:
            return problem
    for name, table in paper.get("protocol_of", {}).items():
        if not isinstance(table, dict):
            return f"has `protocol_of.{name}` = {table!r}, which must be a table"
    return _problem_of_settings(paper)


def _problem_of_claim(claim: object) -> str:
    not_texts = f"has a claim {claim!r}, which must be a table of texts"
    if not isinstance(claim, dict):
        return not_texts
    for key in ("text", "source", "note"):
        if not isinstance(claim.get(key, ""), str):
            return not_texts
    if "text" not in claim or "source" not in claim:
        return f"has a claim {claim!r}, which must say its `text` and `source`"
    return ""


def _problem_of_settings(paper: Mapping[str, Any]) -> str:
    settings = paper.get("settings", {})
    seeds = paper.get("seeds")
    if settings and (type(seeds) is not int or seeds < 1):
        return f"has `seeds` = {seeds!r}, which must be the number of the paper's seeds"
    for name, setting in settings.items():
        if not isinstance(setting, dict) or not isinstance(setting.get("match"), dict):
            return f"has `settings.{name}` without a table `match`"
        if not isinstance(setting.get("protocol", {}), dict):
            return f"has `settings.{name}.protocol`, which must be a table"
        figures = paper.get("accuracy", {}).get(name)
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
    if not isinstance(figure, list) or len(figure) < 2:
        return False
    mean, deviation = figure[:2]
    return _is_number(mean) and _is_number(deviation)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
