"""Small JSON files of a run folder.

Who holds which classes: read beside the run, or worked out again from its configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedglimpse.config.loading import read_stored
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.sources import load
from fedglimpse.errors import UserError
from fedglimpse.runs.build import population_of
from fedglimpse.studies.results.check import check_counts


def read_json(path: Path) -> dict[str, Any]:
    """Return the table in a file, an empty one where there is no file; raises UserError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise UserError(f"{path} is not valid JSON{why}: restore or delete it.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no table of names and values: restore or delete it.")
    return found


Counts = list[list[int]]  # [N, C]


MOST_CLIENTS = 10_000  # a larger population is not listed client by client


class Holdings:
    """Class counts of clients; every dataset is read once and every partition made once."""

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._datasets: dict[str, Dataset | None] = {}
        self._made: dict[tuple[Any, ...], Counts | None] = {}

    def of(self, folder: Path, config: Mapping[str, Any], seed: int) -> Counts | None:
        """Return the class counts of one seed's clients; None where the data is not here.

        Raises UserError for a damaged `partition.json`.
        """
        stored = folder / "partition.json"
        if stored.exists():
            return _stored(stored, str(seed))
        data = tuple(sorted((k, v) for k, v in config.items() if k.startswith("data.")))
        key = (*data, seed)
        if key not in self._made:
            self._made[key] = self._make(config, seed)
        return self._made[key]

    def _make(self, config: Mapping[str, Any], seed: int) -> Counts | None:
        dataset = self._dataset(str(config["data.name"]))
        if dataset is None or config["data.clients"] > MOST_CLIENTS:
            return None
        try:
            population = population_of(read_stored(config).config, dataset, seed)
        except UserError:  # clients of a Flower federation, say, have data of their own
            return None
        counts: Counts = population.label_histogram(torch.arange(population.num_clients)).tolist()
        return counts

    def _dataset(self, name: str) -> Dataset | None:
        if name not in self._datasets:
            try:
                self._datasets[name] = load(name)
            except UserError:  # the results are here, the data is not
                self._datasets[name] = None
        return self._datasets[name]


def _stored(path: Path, seed: str) -> Counts | None:
    counts: Counts | None = read_json(path).get(seed)
    if counts is None:
        return None
    try:
        check_counts(seed, counts)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore or delete it.") from None
    return counts
