"""The paper's method: a POMDP agent with a spatio-temporal attention Q-network.

Hou et al., Algorithms 1 and 2. The page docs/methods/glimpse.md maps every equation and line to a
function and numbers the deviations.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fedglimpse.agent.agent import Agent, Glance
from fedglimpse.agent.config import AgentConfig
from fedglimpse.agent.explore import Ask, Picked, epsilon, pick_each
from fedglimpse.agent.memory import Round
from fedglimpse.agent.policy import check_lessons, check_sketch, read_policy
from fedglimpse.agent.reward import Shaping
from fedglimpse.agent.team import Team
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.types import Choice, Method, Outcome, View

ATTENTION_EVERY = 10  # rounds between records of the attention weights, which are many


class GlimpseSelector:
    """Scores every visible client with a Q-network and learns from the reward that follows."""

    learns_from: frozenset[str] = frozenset()

    def __init__(
        self,
        config: AgentConfig,
        *,
        sketch_dim: int,
        num_classes: int,
        seed: int,
        device: str = "cpu",
    ) -> None:
        """Build an agent without experience.

        Args:
            config: every choice of the agent.
            sketch_dim: D, floats of a client's and of the global sketch.
            num_classes: C.
            seed: of the run.
            device: where the networks live.
        """
        self.config, self.needs, self.frozen = config, config.needs, config.frozen
        self.num_classes = num_classes
        self.sketch: dict[str, Any] = {}  # how sketches are made, which a policy tells
        self.step = 0  # rounds acted: the t of the epsilon schedule
        self.shaping = Shaping(config.gamma) if config.reward == "change" else None
        self.agent = Agent(
            config, sketch_dim=sketch_dim, num_classes=num_classes, seed=seed, device=device
        )
        self._unknown = torch.full((num_classes,), torch.nan)  # a histogram that was not reported
        self._pending: tuple[View, int, Glance, Picked] | None = None
        self._alone = GlimpseTeam([self])

    @property
    def epsilon(self) -> float:
        """Probability of exploring in the coming round."""
        if self.frozen:
            return 0.0
        return epsilon(self.step, self.config.epsilon_decay, self.config.epsilon_min)

    def select(self, view: View, k: int) -> Choice:
        """Choose by Q, or explore: Algorithm 1, lines 7-12."""
        choice = self._alone.select([view], [k])[0]
        assert choice is not None
        return choice

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Remember the round and learn: Algorithm 2."""
        return self._alone.feedback([outcome])[0]

    @property
    def group_key(self) -> Hashable:
        """Selectors with equal keys can be asked together."""
        sizes = tuple(self.agent.shape.values())
        return (self.config, self.num_classes, self.agent.device, sizes)

    @classmethod
    def group(cls, selectors: Sequence[GlimpseSelector]) -> GlimpseTeam:
        """Return the team that asks these selectors together."""
        return GlimpseTeam(selectors)

    def ask(self, view: View, k: int, glance: Glance) -> Ask:
        """Return what the picking needs: scores, and how to explore."""
        return Ask(glance.scores, k, self.epsilon, view.rng)

    def choose(self, view: View, k: int, glance: Glance, picked: Picked) -> Choice:
        """Make a choice of what was picked and keep what the feedback will need."""
        self._pending = (view, k, glance, picked)
        info: dict[str, Any] = {
            "behaviour": picked.behaviour,
            "epsilon": round(self.epsilon, 6),
            "q": [round(q, 4) for q in glance.scores.tolist()],
        }
        if glance.attention is not None and view.round_num % ATTENTION_EVERY == 0:
            rows = glance.attention.mean(dim=0).t().tolist()  # [V, H+1] over all heads
            info["attention"] = [[round(w, 3) for w in row] for row in rows]
        return Choice(picked.slots, None, info)

    def remember(self, outcome: Outcome) -> dict[str, float]:
        """Store the finished round; returns what is known of it before learning."""
        if self._pending is None or self._pending[0].round_num != outcome.round_num:
            raise ValueError(
                f"feedback for round {outcome.round_num} without a choice in it: call select first"
            )
        view, k, glance, picked = self._pending
        metrics = {
            "mean_q": glance.mean,
            "q_spread": float(glance.scores.std(correction=0)),
            "epsilon": self.epsilon,
            "fraction_greedy": picked.greedy_share,
            "server_flops": float(glance.flops),
        }
        if glance.entropy is not None:
            metrics["attention_entropy"] = glance.entropy
        reward = self._reward(outcome)
        if not self.frozen:
            self.agent.replay.add(self._round(view, k, glance, outcome, reward))
        self.step += 1
        self._pending = None
        return metrics

    def _reward(self, outcome: Outcome) -> Tensor:
        """Return what the agent learns from `[R]`: one reward, or one for each class."""
        per_class = self.config.q_output == "per_class"
        reward = outcome.reward_per_class if per_class else torch.full((1,), outcome.reward)
        return reward.float() if self.shaping is None else self.shaping(reward.float())

    def _round(self, view: View, k: int, glance: Glance, outcome: Outcome, reward: Tensor) -> Round:
        """Put together what is worth remembering; clients whose update failed were not chosen."""
        return Round(
            clients=glance.clients,
            ids=view.ids,
            chosen=torch.isin(view.ids, outcome.selected),
            sketch=glance.sketch,
            reward=reward,
            histogram=self._histogram(view),
            round_num=view.round_num,
            k=k,
        )

    def _histogram(self, view: View) -> Tensor:
        """Return the global model's class shares on the proxy set `[C]`, NaN where not reported."""
        counts = view.server.get("proxy_histogram")
        if counts is None:
            return self._unknown
        return counts.float() / counts.sum()

    def policy(self) -> dict[str, Any]:
        """Return the trained policy: weights, settings, identities, statistics. No rounds."""
        return self.agent.policy() | {"step": self.step, "sketch": self.sketch}

    def load_policy(
        self, policy: dict[str, Any], frozen: bool = False, keep_scale: bool = False
    ) -> None:
        """Start from a trained policy, or use it frozen; see `Agent.load_policy`."""
        frozen = frozen or self.config.frozen
        if not frozen:
            check_lessons(policy, self.config)
        self.agent.load_policy(policy, keep_scale)
        self.step, self.frozen = policy["step"], frozen

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after a finished round."""
        own = {} if self.shaping is None else {"shaping": self.shaping.state_dict()}
        return self.agent.state_dict() | own | {"step": self.step, "frozen": self.frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        state = dict(state)
        self.step, self.frozen = state.pop("step"), state.pop("frozen")
        if self.shaping is not None:
            self.shaping.load_state_dict(state.pop("shaping"))
        self.agent.load_state_dict(state)


class GlimpseTeam:
    """Selectors of several lanes whose networks look and learn in one pass."""

    def __init__(self, selectors: Sequence[GlimpseSelector]) -> None:
        """Gather selectors with the same `group_key`."""
        self.selectors = list(selectors)
        self.team = Team([selector.agent for selector in selectors])

    def select(self, views: Sequence[View | None], ks: Sequence[int]) -> list[Choice | None]:
        """Choose in every lane that sees someone."""
        lanes = enumerate(zip(views, self.team.look(views), strict=True))
        seen = [
            (r, view, glance)
            for r, (view, glance) in lanes
            if view is not None and glance is not None
        ]
        asked = [self.selectors[r].ask(view, ks[r], glance) for r, view, glance in seen]
        config = self.selectors[0].config
        picks = pick_each(asked, config.exploration, config.partial_random)
        choices: list[Choice | None] = [None] * len(views)
        for (r, view, glance), picked in zip(seen, picks, strict=True):
            choices[r] = self.selectors[r].choose(view, ks[r], glance, picked)
        return choices

    def feedback(self, outcomes: Sequence[Outcome | None]) -> list[Mapping[str, float]]:
        """Remember the rounds that were played and learn from all that is remembered."""
        pairs = list(zip(self.selectors, outcomes, strict=True))
        metrics = [{} if outcome is None else one.remember(outcome) for one, outcome in pairs]
        learns = [
            None if outcome is None or one.frozen else outcome.round_num for one, outcome in pairs
        ]
        lessons = self.team.learn(learns)
        for said, lesson in zip(metrics, lessons, strict=True):
            if said and lesson.td_loss is not None:
                said["server_flops"] += lesson.flops
                said["td_loss"] = lesson.td_loss
        return list(metrics)


def build(setting: Setting) -> Method:
    """Return the paper's method: the agent of `agent.*` and temporal averaging."""
    agent = setting.config.agent
    selector = GlimpseSelector(
        agent,
        sketch_dim=setting.config.sketch.size,
        num_classes=setting.num_classes,
        seed=setting.seed,
        device=setting.device,
    )
    selector.sketch = asdict(setting.config.sketch)
    if agent.load:
        policy = read_policy(agent.load)
        check_sketch(policy, selector.sketch)
        selector.load_policy(policy, frozen=agent.frozen)
    return Method(selector, setting.temporal_window())


INFO = MethodInfo(
    name="glimpse",
    summary="POMDP agent: attention Q-network over visible clients and past models",
    source="Hou et al.",
    build=build,
)
