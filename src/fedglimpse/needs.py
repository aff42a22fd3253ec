"""What a selector may ask for, when it becomes known, and what it costs to send.

A name listed in `Selector.needs` decides when clients train (`phase`) and what travels. Adding a
report means one entry here and one function in `sim/reports.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedglimpse.errors import UserError, nearest

Phase = Literal["probe", "trained", "server"]


@dataclass(frozen=True)
class Need:
    """One kind of information a selector can ask for.

    Phases: "probe" is computed by every visible client at the global model, before any training;
    "trained" needs every visible client to have trained; "server" costs clients nothing.
    """

    phase: Phase
    meaning: str
    floats_up: int = 0  # floats each visible client sends; -1: the configured sketch size
    passes: float = 0.0  # extra passes over local data: 1 forward, 3 forward and backward


CATALOGUE: dict[str, Need] = {
    "sketch": Need("trained", "random projection of the client's parameters", -1),
    "delta_sketch": Need("trained", "random projection of the client's update W_i - W", -1),
    "update_norm": Need("trained", "L2 norm of the client's parameter update", 1),
    "train_loss": Need("trained", "mean loss over all local batches and epochs", 1),
    "loss": Need("probe", "mean loss of the global model on the client's data", 1, passes=1),
    "global_sketch": Need("server", "random projection of the global model's parameters"),
    "reward": Need("server", "smoothed score of the new global model on the proxy set"),
}


def check(needs: frozenset[str]) -> None:
    """Raise UserError for a need that is not in the catalogue."""
    for name in sorted(needs - CATALOGUE.keys()):
        raise UserError(
            f"A selector needs '{name}', which is not a known report."
            f"{nearest(name, CATALOGUE)} Known: {', '.join(sorted(CATALOGUE))}."
        )


def trains_before_choice(needs: frozenset[str]) -> bool:
    """True where all visible clients must train before the selector can choose."""
    return any(CATALOGUE[name].phase == "trained" for name in needs)
