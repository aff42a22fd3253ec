"""Environments that are small enough to run many episodes."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "data.name": "digits",
    "data.clients": 12,
    "visibility.cluster_size": 4,
    "selection.k": 2,
    "local.epochs": 1,
    "sketch.size": 6,
    "agent.history": 2,
    "rounds": 5,
    "method": "fedavg-window",
}
RAGGED = {**SMALL, "visibility.kind": "random", "visibility.p": 0.2, "visibility.min_visible": 2}
