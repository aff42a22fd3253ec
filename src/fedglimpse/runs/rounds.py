"""One round of every lane in a world, and the state between two rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedglimpse.errors import UserError
from fedglimpse.runs.selectors import Crew
from fedglimpse.simulation.world import Lane, World

Books = Callable[[], list[dict[str, Any]]]  # lets selectors learn; returns the round's records


def nothing() -> None:
    """Do nothing."""


def play_round(
    world: World, evaluate: bool | Sequence[bool], crew: Crew | None = None
) -> list[dict[str, Any]]:
    """Play one round of every lane; returns its records.

    Args:
        world: whose lanes play.
        evaluate: score the new models on the test set; for all lanes, or lane by lane.
        crew: the lanes' selectors in teams; None forms them for this round alone.
    """
    wanted = [evaluate] * len(world.lanes) if isinstance(evaluate, bool) else evaluate
    return open_round(world, wanted, crew or crew_of(world))()


def open_round(
    world: World, evaluate: Sequence[bool], crew: Crew, meanwhile: Callable[[], object] = nothing
) -> Books:
    """Play one round of every lane and start to score it; its books are still to be done.

    Args:
        world: whose lanes play.
        evaluate: which lanes' new models are scored on the test set.
        crew: the lanes' selectors in teams.
        meanwhile: called once before selectors choose, on a GPU while clients train: the books of
            the round before, if they were not done.
    """
    began = time.perf_counter()

    def before() -> None:
        nonlocal began
        paused = time.perf_counter()
        meanwhile()
        began += time.perf_counter() - paused  # that time is the other round's

    views = world.observe(before)
    ks = [
        0 if view is None else lane.method.budget(lane.k, view.num_visible)
        for lane, view in zip(world.lanes, views, strict=True)
    ]
    played = world.play(crew.select(views, ks), may_pass=False)
    on_test = world.score(evaluate)
    so_far = time.perf_counter() - began

    def books() -> list[dict[str, Any]]:
        began = time.perf_counter()
        records = played.records(crew.feedback(played.outcomes()), on_test)
        seconds = (so_far + time.perf_counter() - began) / len(records)
        return [{**record, "seconds": seconds} for record in records]

    return books


def crew_of(world: World, crew: Crew | None = None) -> Crew:
    """Return the crew of a world's selectors: `crew`, if it is still theirs, else a new one."""
    selectors = [lane.method.selector for lane in world.lanes]
    return crew if crew is not None and crew.serves(selectors) else Crew(selectors)


def snapshot(world: World, lanes: Sequence[Lane] | None = None) -> dict[str, Any]:
    """Return everything needed to continue after the current round, of all or some lanes."""
    places = places_of(world, lanes)
    return {
        "round": world.lanes[places[0]].round_num,
        "lanes": [
            world.lane_state(r) | {"selector": world.lanes[r].method.selector.state_dict()}
            for r in places
        ],
    }


def restore(world: World, state: Mapping[str, Any], lanes: Sequence[Lane] | None = None) -> None:
    """Put all or some lanes back to where `snapshot` was taken."""
    if "lanes" not in state:
        raise UserError(
            f"The run there is one on devices, {state['round']} rounds of it: continue it with its "
            "Flower app, or name another --out."
        )
    for r, saved in zip(places_of(world, lanes), state["lanes"], strict=True):
        world.load_lane_state(r, saved)
        world.lanes[r].method.selector.load_state_dict(saved["selector"])


def places_of(world: World, lanes: Sequence[Lane] | None) -> list[int]:
    """Return where in the world some of its lanes are; None: all of them."""
    wanted = {id(lane) for lane in (world.lanes if lanes is None else lanes)}
    return [r for r, lane in enumerate(world.lanes) if id(lane) in wanted]
