"""The loop: build a world, play its rounds, write records, checkpoint, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedglimpse.builder import build_world
from fedglimpse.config import Config
from fedglimpse.configure import resolve
from fedglimpse.errors import UserError
from fedglimpse.progress import Listener, Silent
from fedglimpse.records import RunFolder
from fedglimpse.rl.policy import write_policy
from fedglimpse.sim.world import Lane, World
from fedglimpse.summary import summarise
from fedglimpse.types import Choice, View


class Stopped(Exception):
    """The run was asked to stop; it ended after a whole round and can be resumed."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    world: World
    path: Path | None


def run(
    config: Config | Mapping[str, Any],
    out: Path | str | None = None,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run a federation from start to end.

    Args:
        config: a `Config`, or a mapping of dotted keys such as `{"data.name": "digits"}`.
        out: the run folder; None keeps everything in memory.
        resume: go on with the run in `out`, if there is one.
        listener: told about every round.
        should_stop: asked after every round; True ends the run with `Stopped`.

    Example:
        >>> result = run({"method": "fedavg-window", "rounds": 2, "seeds": [0, 1]})
        >>> len(result.records)
        4
    """
    if not isinstance(config, Config):
        config = resolve(config)
    listener = listener or Silent()
    world = build_world(config)
    check_policy(config, world)
    folder = None if out is None else RunFolder(Path(out))
    state = None if folder is None else folder.open(config, resume)
    if state is not None:
        restore(world, state)
    records = folder.read() if folder is not None else []
    listener.begin(config.method, world.round_num, config.rounds)
    try:
        while world.round_num < config.rounds:
            new = play_round(world, evaluate=_scored(config, world.round_num))
            records += new
            if folder is not None:
                folder.append(new)
                stop = should_stop()
                last = world.round_num == config.rounds
                if stop or last or world.round_num % config.checkpoint.every == 0:
                    folder.save(snapshot(world))
                if stop and not last:
                    raise Stopped
            listener.round(new)
    finally:
        listener.end()
    save_policies(config, world)
    summary = {"method": config.method, **summarise(records, config.rounds)}
    if folder is not None:
        folder.finish(summary)
    return Result(config, records, summary, world, None if folder is None else folder.path)


def play_round(world: World, evaluate: bool) -> list[dict[str, Any]]:
    """Play one round of every lane; returns its records."""
    began = time.perf_counter()
    views = world.observe()
    choices = [
        None if view is None else _choose(lane, view)
        for view, lane in zip(views, world.lanes, strict=True)
    ]
    outcomes = world.commit(choices)
    metrics: list[Mapping[str, float]] = [
        {} if outcome is None else lane.method.selector.feedback(outcome)
        for outcome, lane in zip(outcomes, world.lanes, strict=True)
    ]
    records = world.records(metrics, evaluate)
    seconds = (time.perf_counter() - began) / len(records)
    return [{**record, "seconds": seconds} for record in records]


def _choose(lane: Lane, view: View) -> Choice:
    return lane.method.selector.select(view, lane.method.budget(lane.k, view.num_visible))


def snapshot(world: World) -> dict[str, Any]:
    """Return everything needed to continue after the current round."""
    selectors = [lane.method.selector.state_dict() for lane in world.lanes]
    return {"world": world.state_dict(), "selectors": selectors}


def restore(world: World, state: Mapping[str, Any]) -> None:
    """Put a world back to where `snapshot` was taken."""
    world.load_state_dict(state["world"])
    for lane, selector in zip(world.lanes, state["selectors"], strict=True):
        lane.method.selector.load_state_dict(selector)


def check_policy(config: Config, world: World) -> None:
    """Raise UserError where a policy is to be saved but the method has none."""
    if config.agent.save and not hasattr(world.lanes[0].method.selector, "policy"):
        raise UserError(
            f"agent.save={config.agent.save}, but method={config.method} learns no policy: use "
            "method=glimpse or leave agent.save out."
        )


def save_policies(config: Config, world: World) -> None:
    """Write what the selectors have learnt, if `agent.save` says so."""
    if not config.agent.save:
        return
    for lane in world.lanes:
        policy = cast(Any, lane.method.selector).policy()
        write_policy(policy, config.agent.save, lane.seed, len(world.lanes))


def _scored(config: Config, round_num: int) -> bool:
    """True where this round's model is scored on the test set."""
    return (round_num + 1) % config.evaluate.every == 0 or round_num == config.rounds - 1
