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

from fedglimpse.agent.agent import Agents, ScoredView
from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.explore import Picked, pick
from fedglimpse.agent.memory import Round
from fedglimpse.agent.policy import check_lessons, check_sketch, read_policy
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.types import Choice, Method, Outcome, View

ATTENTION_EVERY = 10  # rounds between records of the attention weights, which are many


class GlimpseSelector:
    """Scores every visible client with a Q-network and learns from the reward that follows.

    Its agent is one lane of `agents`. Selectors that are asked together share one `Agents`
    (`group`); a selector by itself is a group of one.
    """

    learns_from: frozenset[str] = frozenset()

    def __init__(
        self,
        config: AgentConfig,
        *,
        sketch_dim: int,
        num_classes: int,
        num_clients: int,
        seed: int,
        device: str = "cpu",
    ) -> None:
        """Build an agent without experience.

        Args:
            config: every choice of the agent.
            sketch_dim: D, floats of a client's and of the global sketch.
            num_classes: C.
            num_clients: N.
            seed: of the run.
            device: where the networks live.
        """
        self.config = config
        self.needs = config.needs
        self.frozen = config.frozen
        self.num_classes = num_classes
        self.sketch: dict[str, Any] = {}  # how sketches are made, for the policy
        self.step = 0  # rounds acted: the t of the epsilon schedule
        self.last_reward = torch.zeros(1)  # of the round before; Eq. (reward) begins with 0
        sizes = AgentSizes(sketch_dim, num_classes, num_clients)
        self.agents = Agents(config, sizes, [seed], torch.device(device))
        self.lane = 0
        self._unknown = torch.full((num_classes,), torch.nan)  # counts that were not reported
        self._pending: tuple[View, int, ScoredView, Picked] | None = None

    @property
    def group_key(self) -> Hashable:
        """Selectors with equal keys can be asked together."""
        sizes = self.agents.sizes
        if self.config.identity == "none":  # then networks do not depend on N
            sizes = sizes._replace(num_clients=0)
        return (self.config, sizes, self.agents.device)

    @classmethod
    def group(cls, selectors: Sequence[GlimpseSelector]) -> GlimpseGroup:
        """Let selectors with the same `group_key` share their agents, and return the group."""
        agents = selectors[0].agents
        is_shared = all(selector.agents is agents for selector in selectors)
        if not is_shared or agents.lanes != len(selectors):
            members = [(selector.agents, selector.lane) for selector in selectors]
            agents = Agents.joined(members)
            for lane, selector in enumerate(selectors):
                selector.agents = agents
                selector.lane = lane
        return GlimpseGroup(selectors)

    @property
    def epsilon(self) -> float:
        """Probability of exploring in the coming round: Algorithm 1, line 8."""
        if self.frozen:
            return 0.0
        scheduled = 1.0 - self.config.epsilon_decay * self.step
        return max(self.config.epsilon_min, scheduled)

    def select(self, view: View, k: int) -> Choice:
        """Choose by Q, or explore: Algorithm 1, lines 7-12."""
        (choice,) = GlimpseGroup([self]).select([view], [k])
        assert choice is not None
        return choice

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Remember the round and learn: Algorithm 2."""
        (metrics,) = GlimpseGroup([self]).feedback([outcome])
        return metrics

    def choose(self, view: View, k: int, scored: ScoredView) -> Choice:
        """Pick clients by their scores, or at random; keeps what the feedback will need."""
        config = self.config
        picked = pick(
            scored.scores,
            k,
            self.epsilon,
            config.exploration,
            config.partial_random,
            view.rng,
        )
        self._pending = (view, k, scored, picked)
        info: dict[str, Any] = {
            "behaviour": picked.behaviour,
            "epsilon": round(self.epsilon, 6),
            "q": [round(q, 4) for q in scored.scores.tolist()],
        }
        if scored.attention is not None and view.round_num % ATTENTION_EVERY == 0:
            of_clients = scored.attention.mean(dim=0).t()  # [V, H+1] over all heads
            rows = of_clients.tolist()
            info["attention"] = [[round(weight, 3) for weight in row] for row in rows]
        return Choice(picked.slots, None, info)

    def finish_round(self, outcome: Outcome) -> tuple[Round, dict[str, float]]:
        """Return the finished round to remember, and the metrics known before learning."""
        if self._pending is None or self._pending[0].round_num != outcome.round_num:
            raise ValueError(
                f"feedback for round {outcome.round_num} without a choice in it: call select first"
            )
        view, k, scored, picked = self._pending
        counts = view.server.get("proxy_histogram", self._unknown).float()  # [C]
        metrics = {
            "mean_q": float(scored.scores.mean()),
            "q_spread": float(scored.scores.std(correction=0)),
            "epsilon": self.epsilon,
            "fraction_greedy": picked.greedy_share,
            "server_flops": float(scored.flops),
        }
        if scored.entropy is not None:
            metrics["attention_entropy"] = scored.entropy
        finished = Round(
            round_num=view.round_num,
            clients=scored.features,
            ids=view.ids,
            chosen=torch.isin(view.ids, outcome.selected),  # clients whose update failed are not
            sketch=scored.sketch,
            reward=self._reward(outcome),
            histogram=counts / counts.sum(),  # NaN where it was not reported
            k=k,
        )
        self.step += 1
        self._pending = None
        return finished, metrics

    def _reward(self, outcome: Outcome) -> Tensor:
        """Return what the agent learns from: one reward `[1]`, or one for each class `[C]`.

        With `agent.reward=change` that is what changed: the same optimal choices, without the level
        to be learnt first. The reward is the score of the global model, which depends on all
        choices so far and hardly on the last one. A Q of such rewards is mostly the level of the
        score, and what tells clients apart is lost in the error about that level. Shaping by a
        potential changes no optimal policy (Ng, Harada and Russell, 1999). With the value of a
        score that stays where it is as the potential,

            Phi^t = r^{t-1} / (1 - gamma)
            r^t + gamma Phi^{t+1} - Phi^t = (r^t - r^{t-1}) / (1 - gamma)

        so that Q says how much a choice lifts what is still to come.
        """
        if self.config.q_output == "per_class":
            reward = outcome.reward_per_class.float()
        else:
            reward = torch.full((1,), outcome.reward)
        if self.config.reward == "level":
            return reward
        change = reward - self.last_reward
        self.last_reward = reward.clone()
        return change / (1 - self.config.gamma)

    def policy(self) -> dict[str, Any]:
        """Return the trained policy: weights, settings, identities, statistics. No rounds."""
        policy = self.agents.policy(self.lane)
        policy["step"] = self.step
        policy["sketch"] = self.sketch
        return policy

    def load_policy(
        self,
        policy: dict[str, Any],
        frozen: bool = False,
        keep_scale: bool = False,
    ) -> None:
        """Start from a trained policy, or use it frozen; see `Agents.load_policy`."""
        frozen = frozen or self.config.frozen
        if not frozen:
            check_lessons(policy, self.config)
        self.agents.load_policy(self.lane, policy, keep_scale)
        self.step = policy["step"]
        self.frozen = frozen

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume after a finished round."""
        state = self.agents.state_dict(self.lane)
        state["step"] = self.step
        state["frozen"] = self.frozen
        if self.config.reward == "change":
            state["shaping"] = {"last": self.last_reward.clone()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`."""
        self.agents.load_state_dict(self.lane, state)
        self.step = state["step"]
        self.frozen = state["frozen"]
        if self.config.reward == "change":
            self.last_reward = state["shaping"]["last"].clone()


class GlimpseGroup:
    """Selectors whose agents score and learn in one pass: lanes of one `Agents`."""

    def __init__(self, selectors: Sequence[GlimpseSelector]) -> None:
        """Take selectors that share their agents; other lanes of these agents sit out."""
        self.selectors = list(selectors)

    def select(
        self,
        views: Sequence[View | None],
        ks: Sequence[int],
    ) -> list[Choice | None]:
        """Choose in every lane that sees someone."""
        agents = self.selectors[0].agents
        by_lane: list[View | None] = [None] * agents.lanes
        for selector, view in zip(self.selectors, views, strict=True):
            by_lane[selector.lane] = view
        scored_views = agents.score(by_lane)
        choices: list[Choice | None] = []
        for selector, view, k in zip(self.selectors, views, ks, strict=True):
            scored = scored_views[selector.lane]
            if view is None or scored is None:
                choices.append(None)
            else:
                choices.append(selector.choose(view, k, scored))
        return choices

    def feedback(
        self,
        outcomes: Sequence[Outcome | None],
    ) -> list[Mapping[str, float]]:
        """Remember the finished rounds and learn; returns the metrics of every lane."""
        agents = self.selectors[0].agents
        all_metrics: list[dict[str, float]] = []
        rounds: dict[int, Round] = {}
        for selector, outcome in zip(self.selectors, outcomes, strict=True):
            metrics: dict[str, float] = {}
            if outcome is not None:
                finished, metrics = selector.finish_round(outcome)
                if not selector.frozen:
                    rounds[selector.lane] = finished
            all_metrics.append(metrics)
        results = agents.learn(rounds)
        for selector, metrics in zip(self.selectors, all_metrics, strict=True):
            result = results.get(selector.lane)
            if result is not None:
                metrics["td_loss"] = result.td_loss
                metrics["server_flops"] += result.flops
        return list(all_metrics)


def build(setting: Setting) -> Method:
    """Return the paper's method: the agent of `agent.*` and temporal averaging."""
    agent = setting.config.agent
    selector = GlimpseSelector(
        agent,
        sketch_dim=setting.config.sketch.size,
        num_classes=setting.num_classes,
        num_clients=setting.num_clients,
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
