"""Pretraining (`fedglimpse teach`): one policy from many simulated federations, for a new one.

The federations run side by side with random selections, and one Q-network learns from everything
they remember (`agent/pretraining.py`). A few of them are held out: on these, the values of the
network are compared with the rewards that were observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, cast

from fedglimpse.agent.agent import Agents
from fedglimpse.agent.pretraining import PooledMemories
from fedglimpse.config.schema import Config
from fedglimpse.errors import require
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.methods.registry import WITH_AGENT
from fedglimpse.runs.build import build_world
from fedglimpse.runs.progress import Listener, Silent
from fedglimpse.runs.rounds import run_round, selectors_of
from fedglimpse.runs.summary import Estimate
from fedglimpse.simulation.world import Lane

HELD_OUT_EVERY = 8  # of so many seeds one is held out, and one of fewer


@dataclass(frozen=True)
class Taught:
    """A pretrained policy and how well it fits."""

    policy: dict[str, Any]  # as `agent.save` writes it
    runs: int  # that it was trained on
    rounds: int  # of all of these
    td_loss: float  # mean over the last tenth of the lessons
    held_out: int  # runs that were held out and are long enough to compare with
    agreement: Estimate | None  # with the rewards of the runs that were held out


def teach(configs: Sequence[Config], lessons: int, listener: Listener | None = None) -> Taught:
    """Run federations with random selections and train one network on all of them.

    Args:
        configs: federations that can share a world, with the same agent; one for each seed.
        lessons: mini-batches to train on.
        listener: follows the rounds, then the lessons.

    Raises:
        UserError: for settings that do not allow pretraining, before anything runs.
    """
    for i, config in enumerate(configs):
        check(config, configs[0])
        require(
            config not in configs[:i],
            "Two federations have the same settings: leave one --also out.",
            key="--also",
        )
    require(lessons > 0, f"--lessons {lessons} must be 1 or more, such as 6000.", key="--lessons")
    world = build_world([exploring(config) for config in configs])
    lanes = list(world.lanes)
    rounds = configs[0].rounds
    listener = listener or Silent()
    selectors = selectors_of(world)
    with _progress(listener, f"{len(lanes)} runs", rounds):
        for _ in range(rounds):
            listener.round(run_round(world, False, selectors))
    with _progress(listener, "lessons", lessons):
        return _train(configs[0], lanes, lessons, lambda: listener.round([]))


@contextmanager
def _progress(listener: Listener, name: str, total: int) -> Iterator[None]:
    listener.begin(name, 0, total)
    try:
        yield
    finally:
        listener.end()


def _train(
    config: Config, lanes: Sequence[Lane], lessons: int, after_lesson: Callable[[], None]
) -> Taught:
    """Train a new agent on what the agents of the lanes remember."""
    held_out_seeds = held_out([lane.seed for lane in lanes])
    training: list[GlimpseSelector] = []
    held_out_selectors: list[GlimpseSelector] = []
    for lane in lanes:
        selectors = held_out_selectors if lane.seed in held_out_seeds else training
        selectors.append(cast(GlimpseSelector, lane.method.selector))
    memories = pooled(training)
    require(
        len(memories.starts) > 0,
        "No update was used in any round, so there is nothing to learn from: too few clients were "
        "visible (visibility.min_visible) or they diverged (local.lr).",
        key="local.lr",
    )
    agents = memories.agents
    new_agent = Agents(config.agent, agents.sizes, config.seeds[:1], agents.device)
    losses = memories.train(new_agent, lessons, config.seeds[0], after_lesson)
    last_tenth = losses[-max(lessons // 10, 1) :]
    td_loss = mean(last_tenth)
    require(
        math.isfinite(td_loss),
        f"Training diverged (TD loss {td_loss}): lower agent.lr={config.agent.lr}.",
        key="agent.lr",
    )
    agreements = pooled(held_out_selectors).agreement(new_agent) if held_out_selectors else []
    return Taught(
        policy=new_agent.policy(0) | {"step": config.rounds, "sketch": asdict(config.sketch)},
        runs=len(training),
        rounds=int(agents.memory.count.sum()),
        td_loss=td_loss,
        held_out=len(agreements),
        agreement=Estimate.of(agreements) if agreements else None,
    )


def pooled(selectors: Sequence[GlimpseSelector]) -> PooledMemories:
    """Return what the agents of some selectors remember."""
    return PooledMemories(Agents.joined([(one.agents, one.lane) for one in selectors]))


def held_out(seeds: Sequence[int]) -> set[int]:
    """Return the seeds that are held out.

    Whole seeds are, because all federations of a seed begin with the same model.
    """
    distinct = list(dict.fromkeys(seeds))
    if len(distinct) < 2:
        return set()
    return set(distinct[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or distinct[-1:])


def exploring(config: Config) -> Config:
    """Return the configuration of a run that selects at random and remembers all its rounds."""
    agent = replace(
        config.agent,
        epsilon_min=1.0,
        updates_per_round=0,
        buffer=max(config.rounds, config.agent.n_step + config.agent.history + 1),
    )
    return replace(config, agent=agent)


def check(config: Config, first: Config) -> None:
    """Raise UserError for settings that allow no pretraining, or differ between federations."""
    agent = config.agent
    require(
        config.method == WITH_AGENT,
        f"method={config.method} has no policy to pretrain: use method={WITH_AGENT}.",
        key="method",
    )
    for name, value in asdict(agent).items():
        first_value = getattr(first.agent, name)
        require(
            value == first_value,
            f"All federations must have the same agent.{name}, but have {first_value} and {value}: "
            "set it once for all of them.",
            key=f"agent.{name}",
        )
    require(
        config.rounds == first.rounds,
        f"All federations must have the same rounds, but have {first.rounds} and {config.rounds}: "
        "set rounds once for all of them.",
        key="rounds",
    )
    require(
        config.rounds > agent.n_step,
        f"rounds={config.rounds} must be above agent.n_step={agent.n_step}, or there is nothing to "
        "learn from: raise rounds.",
        key="rounds",
    )
    require(
        agent.identity == "none",
        f"agent.identity={agent.identity} learns the clients of one federation, which another does "
        "not have: set agent.identity=none.",
        key="agent.identity",
    )
    for name in ("load", "save", "frozen", "aux_weight"):
        require(
            not getattr(agent, name),
            f"agent.{name} has no effect in pretraining: leave it out.",
            key=f"agent.{name}",
        )
    require(
        agent.exploration == "all",
        f"agent.exploration={agent.exploration} selects only some clients at random, but "
        "pretraining needs all of them: set agent.exploration=all.",
        key="agent.exploration",
    )
