"""Pretraining (`fedglimpse teach`): one policy from many simulated federations, for a new one.

A run of a few hundred rounds has one reward a round, too few to tell clients apart. Many runs have
enough: identities do not carry over from one federation to another, but what clients report of
themselves means the same everywhere.

The federations run side by side with random selections, and one Q-network learns from everything
they remember (`PooledMemories`). A few of them are held out: on these, the values of the network
are compared with the rewards that were observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.agent.agent import Agents
from fedglimpse.agent.inputs import standardised
from fedglimpse.agent.learner import set_value
from fedglimpse.agent.memory import Sampled
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
LEAST_ROUNDS = 10  # of a run, to correlate Q-values with rewards


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


class PooledMemories:
    """What the agents of several runs with the same settings remember, to train one network on."""

    def __init__(self, agents: Agents) -> None:
        """Take what the lanes of `agents` remember; later rounds are not noticed."""
        self.agents = agents
        self.config = agents.config
        memory = agents.memory
        starts = [self._starts_of(lane) for lane in range(agents.lanes)]
        self.starts = torch.cat(starts)  # [M, 2]
        self.width = max(int(memory.visible.max()), 1)
        self._oldest = torch.from_numpy(memory.oldest)  # [R]
        self._sketches = memory.rows["sketch"]  # [R, capacity, D], each on the scale of its run
        if self.config.normalise_history:
            mean, factor = agents.scale.numbers()
            self._sketches = standardised(
                self._sketches,
                mean.to(agents.device),
                factor.to(agents.device),
            )

    def _starts_of(self, lane: int) -> Tensor:
        """Return where the transitions of a lane begin: (lane, round) `[m, 2]`."""
        rounds = torch.from_numpy(self.agents.memory.starts(lane))
        lanes = torch.full_like(rounds, lane)
        return torch.stack([lanes, rounds], dim=1)

    def sampled(self, starts: Tensor) -> Sampled:
        """Return transitions that begin at (lane, round) `[B, 2]` as those of one lane."""
        lanes, rounds = starts.unbind(1)
        device = self.agents.device
        oldest = self._oldest[lanes]
        return Sampled(
            lanes=lanes.unsqueeze(0).to(device),
            entries=rounds.unsqueeze(0).to(device),
            oldest=oldest.unsqueeze(0).to(device),
            sketches=self._sketches,
        )

    def train(
        self,
        pupil: Agents,
        lessons: int,
        seed: int,
        after: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Train `pupil` on mini-batches of all memories; returns the TD loss of each.

        Steps become smaller until the last, so that the result does not hang on the last few.

        Args:
            pupil: one lane with the same settings.
            lessons: mini-batches.
            seed: of the draws.
            after: called after every lesson.
        """
        size = self.config.batch_size
        device = self.agents.device
        memory = self.agents.memory
        weights = torch.full((1, size), 1 / size, device=device)
        active = torch.ones(1, 1, device=device)
        losses = []
        for lesson in range(lessons):
            share_left = 1 - lesson / lessons
            pupil.learner.lr = self.config.lr * share_left
            draw = rng.generator(seed, "lesson", lesson)
            drawn = torch.randint(len(self.starts), (size,), generator=draw)
            sampled = self.sampled(self.starts[drawn])
            batch = memory.gather(sampled, self.width)
            later = sampled._replace(entries=sampled.entries + self.config.n_step)
            obs = memory.observe(later, self.width)
            (k,) = memory.rows_of(later.lanes, later.entries, "k")
            future = pupil.learner.future(obs, k)
            loss = pupil.learner.update(batch, future, weights, active)
            losses.append(loss)
            after()
        return torch.cat(losses).tolist() if losses else []

    @torch.no_grad()
    def agreement(self, pupil: Agents) -> list[float]:
        """Correlate the pupil's values of the selected sets with the changes of the reward.

        Returns:
            One correlation for each run, over its own rounds; none for a run with too few rounds,
            or whose values or rewards are all the same.
        """
        correlations = []
        for lane in range(self.agents.lanes):
            starts = self._starts_of(lane)
            has_predecessor = starts[:, 1] > self._oldest[lane]
            starts = starts[has_predecessor]
            if not len(starts):
                continue
            sampled = self.sampled(starts)
            batch = self.agents.memory.gather(sampled, self.width)
            q, _ = pupil.learner.online(batch.obs)
            scores = pupil.learner.class_scores(q.squeeze(0), dim=2)  # [B, V]
            mask = batch.obs.mask[0]
            chosen = batch.chosen[0]
            was_choice = (chosen.sum(1) < mask.sum(1)).cpu()  # not everybody was selected
            values = advantage(scores, mask, chosen).cpu()
            changes = reward_changes(self.agents, lane, starts[:, 1])
            pairs = torch.stack([values, changes])[:, was_choice]  # [2, rounds]
            if pairs.shape[1] < LEAST_ROUNDS:
                continue
            correlation = torch.corrcoef(pairs)[0, 1]
            if correlation.isfinite():
                correlations.append(float(correlation))
        return correlations


def advantage(q: Tensor, mask: Tensor, chosen: Tensor) -> Tensor:
    """Return how far the mean Q of the chosen lies above that of all, in standard deviations.

    Args:
        q: of every slot.  # [B, V]
        mask: True for real clients.  # [B, V]
        chosen: True for the chosen.  # [B, V]
    """
    count = mask.sum(dim=1)
    mean = set_value(q, mask)  # [B]
    distance = torch.where(mask, q - mean.unsqueeze(1), 0.0)
    variance = distance.square().sum(dim=1) / count
    deviation = variance.sqrt().clamp_min(1e-12)
    above_mean = set_value(q, chosen) - mean
    return above_mean / deviation


def reward_changes(agents: Agents, lane: int, rounds: Tensor) -> Tensor:
    """Return the change of the reward in rounds of a lane `[B]`, over classes the mean."""
    of_classes = agents.memory.rows["reward"][lane].cpu()  # [capacity, 1 or C]
    rewards = of_classes.mean(dim=1)
    capacity = len(rewards)
    current = rewards[rounds % capacity]
    if agents.config.reward == "change":
        return current
    before = rewards[(rounds - 1) % capacity]
    return current - before
