"""A policy taught by many simulated federations, for one that is to come.

Federations are played side by side with choices drawn by lot, and one Q-network learns from all
they remember (`agent/school.py`). A few of them are kept aside: on these the network is asked what
it learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, cast

from fedglimpse.agent.agent import Agent
from fedglimpse.agent.school import School
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.runs.build import build_world
from fedglimpse.runs.progress import Listener, Silent
from fedglimpse.runs.rounds import crew_of, play_round
from fedglimpse.runs.summary import Estimate
from fedglimpse.simulation.world import Lane

METHOD = "glimpse"  # the method whose agent is taught
ASIDE = 8  # one seed of so many is kept aside, and one of fewer


@dataclass(frozen=True)
class Taught:
    """What came of teaching."""

    policy: dict[str, Any]  # as `agent.save` writes it
    runs: int  # that taught
    rounds: int  # of all of them
    td_loss: float  # mean over the last tenth of the lessons
    aside: int  # runs that were kept aside, and could be asked
    agreement: Estimate | None  # over these


def teach(configs: Sequence[Config], lessons: int, listener: Listener | None = None) -> Taught:
    """Play federations by lot and teach one network by all of them.

    Args:
        configs: of federations that can share a world, with the same agent; one for each seed.
        lessons: mini-batches to learn from.
        listener: told about every round that is played.

    Raises:
        UserError: for settings that cannot be taught, before anything is played.
    """
    for config in configs:
        check(config, configs[0])
    if any(config in configs[:i] for i, config in enumerate(configs)):
        raise UserError("Two of the federations are the same in every setting: leave one out.")
    if lessons < 1:
        raise UserError(f"{lessons} lessons teach nothing: take 1 or more, such as 6000.")
    world = build_world([by_lot(config) for config in configs])
    lanes, rounds = list(world.lanes), configs[0].rounds
    listener = listener or Silent()
    crew = crew_of(world)
    with _telling(listener, f"{len(lanes)} runs", rounds):
        for _ in range(rounds):
            listener.round(play_round(world, False, crew))
    with _telling(listener, "lessons", lessons):
        return _learn(configs[0], lanes, lessons, lambda: listener.round([]))


@contextmanager
def _telling(listener: Listener, name: str, total: int) -> Iterator[None]:
    listener.begin(name, 0, total)
    try:
        yield
    finally:
        listener.end()


def _learn(
    config: Config, lanes: Sequence[Lane], lessons: int, after: Callable[[], None]
) -> Taught:
    """Teach a new agent by what the agents of the lanes remember."""
    kept = kept_aside([lane.seed for lane in lanes])
    teachers = School([_agent(lane) for lane in lanes if lane.seed not in kept])
    if not len(teachers.places):
        raise UserError(
            "In no round an update was used, so there is nothing to learn from: clients were too "
            "few (visibility.min_visible) or diverged (local.lr)."
        )
    seed = config.seeds[0]
    pupil = Agent(
        config.agent,
        sketch_dim=config.sketch.size,
        num_classes=lanes[0].population.dataset.num_classes,
        seed=seed,
        device=str(teachers.device),
    )
    losses = teachers.teach(pupil, lessons, seed, after)
    td_loss = mean(losses[-max(lessons // 10, 1) :])
    if not math.isfinite(td_loss):
        raise UserError(f"The lessons diverged, TD loss {td_loss}: take a smaller agent.lr.")
    found = (
        School([_agent(lane) for lane in lanes if lane.seed in kept]).agreement(pupil)
        if kept
        else []
    )
    return Taught(
        policy=pupil.policy() | {"step": config.rounds, "sketch": asdict(config.sketch)},
        runs=len(teachers.agents),
        rounds=sum(agent.replay.count for agent in teachers.agents),
        td_loss=td_loss,
        aside=len(found),
        agreement=Estimate.of(found) if found else None,
    )


def _agent(lane: Lane) -> Agent:
    return cast(GlimpseSelector, lane.method.selector).agent


def kept_aside(seeds: Sequence[int]) -> set[int]:
    """Return the seeds that do not teach; federations of one seed share their initial model."""
    different = list(dict.fromkeys(seeds))
    if len(different) < 2:
        return set()
    return set(different[ASIDE - 1 :: ASIDE] or different[-1:])


def by_lot(config: Config) -> Config:
    """Return the configuration of a run that draws its choices and remembers all of its rounds."""
    agent = config.agent
    drawn = replace(
        agent,
        epsilon_min=1.0,
        updates_per_round=0,
        prove=False,
        loss_lean=0.0,
        buffer=max(config.rounds, agent.n_step + agent.history + 1),
    )
    return replace(config, agent=drawn)


def check(config: Config, first: Config) -> None:
    """Raise UserError where a policy of many federations makes no sense, or they do not agree."""
    if config.method != METHOD:
        raise UserError(
            f"method={config.method} learns no policy that could be taught: use method={METHOD}."
        )
    for key, value in asdict(config.agent).items():
        if value != getattr(first.agent, key):
            raise UserError(
                f"Federations that teach one policy must agree on agent.{key}, which is "
                f"{getattr(first.agent, key)} and {value}: set it for all."
            )
    if config.rounds != first.rounds:
        raise UserError(
            f"Federations that teach one policy play side by side, but have rounds={first.rounds} "
            f"and rounds={config.rounds}: give them the same."
        )
    if config.rounds <= config.agent.n_step:
        raise UserError(
            f"{config.rounds} rounds leave nothing to learn from with agent.n_step="
            f"{config.agent.n_step}: play more."
        )
    if config.agent.identity != "none":
        raise UserError(
            f"agent.identity={config.agent.identity} remembers the clients of one federation, who "
            "are not those of another: set agent.identity=none."
        )
    for name in ("load", "save", "frozen", "aux_weight"):
        if getattr(config.agent, name):
            raise UserError(f"agent.{name} has no place in teaching: leave it out.")
    if config.agent.exploration != "all":
        raise UserError(
            f"agent.exploration={config.agent.exploration} draws only a part of a choice, and "
            "teaching draws all of it: set agent.exploration=all."
        )
