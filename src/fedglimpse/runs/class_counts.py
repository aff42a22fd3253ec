"""How many examples of each class the clients of a run hold, stored where only its code knows it.

Reports show these counts. They compute them from the configuration, but not where that names a
user's own data or partition: reading results imports nobody's code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from fedglimpse.config.schema import Config
from fedglimpse.simulation.lane import Lane
from fedglimpse.storage import store

FILE = "partition.json"  # seed -> class counts of every client [N][C]
MOST_CLIENTS = 10_000  # a larger population is not listed client by client


def store_class_counts(folder: Path, config: Config, lanes: Sequence[Lane]) -> None:
    """Write the class counts of a run on a user's own data or partition, unless they are there."""
    is_own = ":" in config.data.name or ":" in config.data.partition
    if not is_own or (folder / FILE).exists():
        return
    counts: dict[str, list[list[int]]] = {}
    for lane in lanes:
        population = lane.population
        if population.num_clients > MOST_CLIENTS:
            return
        all_clients = torch.arange(population.num_clients)
        counts[str(lane.seed)] = population.label_histogram(all_clients).tolist()
    store.commit(folder, {FILE: json.dumps(counts).encode()})
