"""One Q-network trained on the memories of many runs.

A run of a few hundred rounds has one reward a round, too few to tell clients apart. Runs of other
federations that selected at random have many more. Identities do not carry over from one federation
to another, but what clients report of themselves means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.agent.agent import Agents
from fedglimpse.agent.inputs import standardised
from fedglimpse.agent.learner import set_value
from fedglimpse.agent.memory import Sampled

LEAST_ROUNDS = 10  # of a run, to correlate Q-values with rewards


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
