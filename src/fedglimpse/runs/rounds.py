"""One round of every lane in a world, and the state between two rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedglimpse.errors import UserError
from fedglimpse.runs.selectors import Selectors
from fedglimpse.simulation.world import Lane, World


def selectors_of(world: World) -> Selectors:
    """Return the selectors of a world's lanes; to be formed again when lanes leave."""
    methods = [lane.method for lane in world.lanes]
    return Selectors(methods, [lane.k for lane in world.lanes])


def run_round(
    world: World, on_test: bool | Sequence[bool], selectors: Selectors | None = None
) -> list[dict[str, Any]]:
    """Run one round of every lane from start to end; returns its records.

    `runs/experiment.py` has the loop of whole runs, which also learns while a GPU trains.

    Args:
        world: whose lanes run.
        on_test: score the new models on the test set; for all lanes, or lane by lane.
        selectors: of the lanes; None forms them for this round alone.
    """
    began = time.perf_counter()
    if selectors is None:
        selectors = selectors_of(world)
    if isinstance(on_test, bool):
        on_test = [on_test] * len(world.lanes)
    views = world.views(world.start_round())
    choices = selectors.select(views)
    world.aggregate(world.collect(choices))
    results = world.score(on_test)
    records = results.records(selectors.feedback(results.outcomes()))
    seconds = (time.perf_counter() - began) / len(records)
    for record in records:
        record["seconds"] = seconds
    return records


def snapshot(world: World, lanes: Sequence[Lane] | None = None) -> dict[str, Any]:
    """Return everything needed to continue after the current round, of all or some lanes."""
    saved = []
    for r in positions_of(world, lanes):
        selector = world.lanes[r].method.selector
        saved.append(world.lane_state(r) | {"selector": selector.state_dict()})
    return {"round": saved[0]["round"], "lanes": saved}


def restore(world: World, state: Mapping[str, Any], lanes: Sequence[Lane] | None = None) -> None:
    """Put all or some lanes back to where `snapshot` was taken."""
    if "lanes" not in state:
        raise UserError(
            f"The run is one on devices, {state['round']} rounds of it: resume it with its Flower "
            "app, or choose another --out.",
            key="--out",
        )
    for r, saved in zip(positions_of(world, lanes), state["lanes"], strict=True):
        world.load_lane_state(r, saved)
        world.lanes[r].method.selector.load_state_dict(saved["selector"])


def positions_of(world: World, lanes: Sequence[Lane] | None) -> list[int]:
    """Return where in the world some of its lanes are; None: all of them."""
    if lanes is None:
        return list(range(len(world.lanes)))
    ids = {id(lane) for lane in lanes}
    return [r for r, lane in enumerate(world.lanes) if id(lane) in ids]
