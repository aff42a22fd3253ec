"""Published figures, as a paper_*.toml or a stored study holds them: can they be used?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def problem_of(paper: Mapping[str, Any]) -> str:
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
    for key in ("source", "title"):
        if key not in paper:
            return f"holds no published figures: it must say its `{key}`"
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
