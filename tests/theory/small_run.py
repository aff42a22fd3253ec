"""A small digits run whose models are stored, for the tests of the panel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedglimpse.config.loading import resolve
from fedglimpse.runs.build import build_world
from fedglimpse.runs.folder import RunFolder
from fedglimpse.runs.kept_models import save_models
from fedglimpse.runs.rounds import run_round, snapshot

SMALL: dict[str, Any] = {
    "data.name": "digits",
    "data.clients": 12,
    "visibility.cluster_size": 6,
    "selection.k": 3,
    "model.norm": "group",
    "rounds": 4,
}


def run_with_models(path: Path, every: int = 1, **settings: Any) -> Path:
    """Run and store models of every n-th round; 0 stores none."""
    config = resolve({**SMALL, **settings})
    world = build_world(config)
    folder = RunFolder(path)
    folder.open(config, resume=False)
    for round_num in range(config.rounds):
        if every and round_num % every == 0:
            save_models(path, round_num, world.states)
        folder.append(run_round(world, on_test=True))
    folder.save(snapshot(world))
    return path
