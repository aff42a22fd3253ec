"""How well the last model does for clients that came late (`visibility.kind=churn`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedglimpse.runs.rounds import positions_of
from fedglimpse.runs.summary import LATECOMERS
from fedglimpse.simulation.lane import Lane
from fedglimpse.simulation.world import World


def latecomers(world: World, lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return the entry of summary.json on clients that came after round 0; empty without any.

    The model after the last round is scored on all examples that these clients hold, and on all
    that clients hold who were there in round 0. Clients that come after the last round do not
    count. The examples are training data: clients that were chosen have trained on theirs, and of
    late-comers fewer were.
    """
    seeds: dict[str, dict[str, Any]] = {}
    for lane, r in zip(lanes, positions_of(world, lanes), strict=True):
        arrivals = getattr(lane.visibility, "arrivals", None)
        if arrivals is None:
            continue
        first_round = arrivals(lane.seed)  # [N]
        late = (first_round > 0) & (first_round < lane.round_num)
        if late.any():
            from_the_start = first_round == 0
            seeds[str(lane.seed)] = {
                "clients": int(late.sum()),
                "accuracy": accuracy_on(world, lane, world.states[r], late),
                "accuracy_of_first": accuracy_on(world, lane, world.states[r], from_the_start),
            }
    return {LATECOMERS: seeds} if seeds else {}


def accuracy_on(world: World, lane: Lane, state: Tensor, clients: Tensor) -> float:
    """Return the share of the clients' examples that a model classifies rightly.

    Args:
        world: whose dataset and model these are.
        lane: whose population this is.
        state: the model.  # [d]
        clients: which clients count.  # [N] bool
    """
    held_by = torch.zeros(len(world.dataset.y_train), dtype=torch.long)  # [n] clients
    for client in clients.nonzero().flatten().tolist():
        held_by[lane.population.rows[client]] += 1
    rows = held_by.nonzero().flatten()
    x = world.dataset.x_train[rows.to(state.device)]
    y = world.dataset.y_train[rows.to(state.device)]
    with torch.no_grad():
        predicted = world.evaluator.logits(state, x).argmax(1)
    right = (predicted == y).cpu()
    return float((right * held_by[rows]).sum() / held_by.sum())
