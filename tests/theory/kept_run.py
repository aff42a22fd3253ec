"""A small digits run whose models are kept, for the tests of the panel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedglimpse.config.loading import resolve
from fedglimpse.runs.build import build_world
from fedglimpse.runs.folder import RunFolder
from fedglimpse.runs.kept_models import save_models
from fedglimpse.runs.rounds import play_round, snapshot

SMALL: dict[str, Any] = {
    "data.name": "digits",
    "data.clients": 12,
    "visibility.cluster_size": 6,
    "selection.k": 3,
    "model.norm": "group",
    "rounds": 4,
}


def kept_run(path: Path, every: int = 1, **settings: Any) -> Path:
    """Run and keep models of every n-th round; 0 keeps none."""
    config = resolve({**SMALL, **settings})
    world, folder = build_world(config), RunFolder(path)
    folder.open(config, resume=False)
    for t in range(config.rounds):
        if every and t % every == 0:
            save_models(path, t, world.states)
        folder.append(play_round(world, evaluate=True))
    folder.save(snapshot(world))
    return path
