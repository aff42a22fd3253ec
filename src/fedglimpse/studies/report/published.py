"""The paper's own figures beside ours: which belong together, and in what the runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedglimpse.config.loading import read_table
from fedglimpse.errors import UserError
from fedglimpse.studies.results import Study
from fedglimpse.studies.results.paper import problem_of
from fedglimpse.studies.statistics.difference import Published


@dataclass(frozen=True)
class Beside:
    """A published figure, and the keys of its protocol in which our run is not what it says."""

    figure: Published  # as shares, 0 to 1
    deviations: tuple[str, ...]  # "rounds 80 (paper: 600)"


def read_paper(path: Path) -> dict[str, Any]:
    """Read a file of published figures, such as study/plans/paper_table1.toml."""
    paper = read_table(path, "paper_*.toml")
    if problem := problem_of(paper):
        raise UserError(
            f"{path} {problem}: write it like study/plans/paper_table1.toml, or leave --paper out."
        )
    return paper


def check_paper(study: Study) -> None:
    """Raise UserError where the figures that a study itself holds cannot be used."""
    if study.paper is not None and (problem := problem_of(study.paper)):
        raise UserError(
            f"The table `paper` of {study.source} {problem}: mend it there, or name a file of "
            "published figures with --paper."
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
