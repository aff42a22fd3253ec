"""One Q-network that learns from the memories of many runs.

A run of a few hundred rounds has one reward a round, too few to tell clients apart by. Runs that
drew their choices by lot, of other federations, have many more. Identities do not travel between
federations, but what clients report of themselves means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.agent.agent import Agent
from fedglimpse.agent.bank import Bank
from fedglimpse.agent.history import Numbers, standardised
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.learner import Batch, class_scores, set_value
from fedglimpse.agent.shared_view import scales

LEAST_ROUNDS = 10  # of which an agreement can be told


class School:
    """Memories of several agents with the same settings, and what can be learnt from them."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        """Take in what the agents remember; later rounds are not noticed."""
        self.agents, self.config = list(agents), agents[0].config
        self.device = agents[0].device
        self.bank = Bank([agent.replay for agent in agents], self.device)
        self.bank.update()
        starts = [agent.replay.starts() for agent in agents]
        lanes = [torch.full_like(some, r) for r, some in enumerate(starts)]
        self.places = torch.stack([torch.cat(lanes), torch.cat(starts)], dim=1)  # [M, 2]
        self.width = max(int(agent.replay.rows["visible"].max()) for agent in agents)
        self._oldest = torch.tensor([agent.replay.oldest for agent in agents])
        self._numbers = Numbers(*(number.to(self.device) for number in scales(agents)))

    def teach(
        self, pupil: Agent, lessons: int, seed: int, after: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Let `pupil` learn from mini-batches of all memories; returns the TD loss of each.

        Steps become smaller until the last, so that what stays is no matter of the last few.

        Args:
            pupil: an agent with the same settings.
            lessons: mini-batches.
            seed: of the draws.
            after: called after every lesson.
        """
        losses = []
        for lesson in range(lessons):
            for group in pupil.learner.optimizer.param_groups:
                group["lr"] = self.config.lr * (1 - lesson / lessons)
            draw = rng.generator(seed, "lesson", lesson)
            drawn = torch.randint(len(self.places), (self.config.batch_size,), generator=draw)
            losses.append(pupil.learner.update(self.batch(self.places[drawn])))
            after()
        return torch.stack(losses).tolist() if losses else []

    def batch(self, places: Tensor) -> Batch:
        """Gather the transitions at (agent, entry) `[B, 2]`."""
        lanes, entries = (column[:, None].to(self.device) for column in places.unbind(1))  # [B, 1]
        oldest = self._oldest[places[:, 0]].to(self.device)
        now = self.bank.gather(lanes, entries, oldest, self.width)
        later = self.bank.later(lanes, entries, oldest, self.width)
        discount = torch.full((len(places),), self.config.gamma**self.config.n_step)
        return Batch(
            obs=self._standardised(now.obs, lanes),
            chosen=now.chosen[:, 0],
            returns=now.returns[:, 0],
            discount=discount.to(self.device),
            next_obs=self._standardised(later.obs, lanes),
            next_k=later.k[:, 0],
        )

    def _standardised(self, obs: Observation, lanes: Tensor) -> Observation:
        """Return one round of each row `[B, ...]`, its history on the scale of its own run."""
        obs = Observation(*(tensor[:, 0] for tensor in obs))
        if not self.config.normalise_history:
            return obs
        numbers = Numbers(*(number[lanes[:, 0]] for number in self._numbers))
        history = standardised(obs.history, numbers)
        return obs._replace(history=history)

    @torch.no_grad()
    def agreement(self, pupil: Agent) -> list[float]:
        """Correlate what the pupil says of drawn sets with the change of the reward that came.

        Returns:
            One correlation for each agent, of its own rounds; none where these are too few, or
            said or came are always the same.
        """
        found = []
        for r, agent in enumerate(self.agents):
            places = self.places[self.places[:, 0] == r]
            places = places[places[:, 1] > agent.replay.oldest]  # there is a round before
            if not len(places):
                continue
            batch = self.batch(places)
            q = class_scores(pupil.net(batch.obs), self.config.per_class_score)
            choice = batch.chosen.sum(1) < batch.obs.mask.sum(1)  # not everybody was taken
            said = advantage(q, batch.obs.mask, batch.chosen)[choice].cpu()
            came = changes(agent, places[:, 1])[choice.cpu()]
            if len(said) < LEAST_ROUNDS:
                continue
            c = torch.corrcoef(torch.stack([said, came]))[0, 1]
            if c.isfinite():
                found.append(float(c))
        return found


def advantage(q: Tensor, mask: Tensor, chosen: Tensor) -> Tensor:
    """Return how far the mean Q of the chosen lies above that of all, in standard deviations.

    Args:
        q: of every slot.  # [B, V]
        mask: True for real clients.  # [B, V]
        chosen: True for the chosen.  # [B, V]
    """
    count = mask.sum(1)
    mean = set_value(q, mask)
    spread = (torch.where(mask, q - mean[:, None], 0.0).square().sum(1) / count).sqrt()
    return (set_value(q, chosen) - mean) / spread.clamp_min(1e-12)  # [B]


def changes(agent: Agent, entries: Tensor) -> Tensor:
    """Return the change of the reward in the rounds of `entries` `[B]`, over classes the mean."""
    replay = agent.replay
    now = replay.rows["reward"][entries % replay.capacity].mean(1)
    if agent.config.reward == "change":
        return now
    return now - replay.rows["reward"][(entries - 1) % replay.capacity].mean(1)
