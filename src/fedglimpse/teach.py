"""A policy taught by many simulated federations, for one that is to come.

Federations are played side by side with choices drawn by lot, and one Q-network learns from all
they remember (`rl/school.py`). A few of them are kept aside: on these the network is asked what it
learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, cast

from fedglimpse.builder import build_world
from fedglimpse.config import Config
from fedglimpse.errors import UserError
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.progress import Listener, Silent
from fedglimpse.rl.agent import Agent
from fedglimpse.rl.school import School
from fedglimpse.rounds import crew_of, play_round
from fedglimpse.sim.world import Lane
from fedglimpse.summary import Estimate

METHOD = "glimpse"  # the method whose agent is taught
ASIDE = 8  # one run of so many is kept aside


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
    if lessons < 1:
        raise UserError(f"{lessons} lessons teach nothing: take 1 or more, such as 6000.")
    world = build_world([by_lot(config) for config in configs])
    lanes = list(world.lanes)
    rounds = configs[0].rounds
    listener = listener or Silent()
    listener.begin(f"{len(lanes)} runs", 0, rounds)
    try:
        crew = crew_of(world)
        for _ in range(rounds):
            listener.round(play_round(world, False, crew))
    finally:
        listener.end()
    return _learn(configs[0], lanes, lessons)


def _learn(config: Config, lanes: Sequence[Lane], lessons: int) -> Taught:
    """Teach a new agent by what the agents of the lanes remember."""
    agents = [cast(GlimpseSelector, lane.method.selector).agent for lane in lanes]
    aside = agents[ASIDE - 1 :: ASIDE] or agents[-1:]
    teachers = [agent for agent in agents if agent not in aside] or agents
    seed, first = config.seeds[0], agents[0]
    pupil = Agent(
        config.agent,
        sketch_dim=config.sketch.size,
        num_classes=lanes[0].population.dataset.num_classes,
        seed=seed,
        device=str(first.device),
    )
    losses = School(teachers).teach(pupil, lessons, seed)
    found = School(aside).agreement(pupil) if len(agents) > 1 else []
    return Taught(
        policy=pupil.policy() | {"step": config.rounds, "sketch": asdict(config.sketch)},
        runs=len(teachers),
        rounds=sum(agent.replay.count for agent in teachers),
        td_loss=mean(losses[-max(lessons // 10, 1) :]),
        aside=len(found),
        agreement=Estimate.of(found) if found else None,
    )


def by_lot(config: Config) -> Config:
    """Return the configuration of a run that draws its choices and remembers all of its rounds."""
    room = max(config.agent.buffer, config.rounds)
    agent = replace(config.agent, epsilon_min=1.0, updates_per_round=0, prove=False, buffer=room)
    return replace(config, agent=agent)


def check(config: Config, first: Config) -> None:
    """Raise UserError where a policy of many federations makes no sense, or they do not agree."""
    if config.method != METHOD:
        raise UserError(
            f"method={config.method} learns no policy that could be taught: use method={METHOD}."
        )
    if config.agent != first.agent:
        raise UserError("Federations that teach one policy must agree on agent.*: set it for all.")
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
    for name in ("load", "save"):
        if getattr(config.agent, name):
            raise UserError(f"agent.{name} has no place in teaching: leave it out.")
    if config.agent.frozen:
        raise UserError("agent.frozen=true learns nothing: leave it out of teaching.")
    if config.agent.exploration != "all":
        raise UserError(
            f"agent.exploration={config.agent.exploration} draws only a part of a choice, and "
            "teaching draws all of it: set agent.exploration=all."
        )
