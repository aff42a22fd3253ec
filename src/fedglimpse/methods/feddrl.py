"""FedDRL: untrusted models are left out, an actor-critic weighs the others.

Chen et al., "FedDRL: A Trustworthy Federated Learning Model Fusion Method Based on Staged
Reinforcement Learning", arXiv 2307.13716: only its abstract was available. State and reward are
those of a different FedDRL, Nguyen et al., "FedDRL: Deep Reinforcement Learning-based Adaptive
Aggregation for Non-IID Data in Federated Learning", 2022, from third-party notes. This is our
reading of the two, with PPO as the learner; see docs/methods/feddrl.md.

    stage 1: drop i where (loss of W_i - median) / (1.4826 MAD) > z
    stage 2: weights = softmax(actor)     reward = -(mean loss + largest - smallest)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.methods.learners.learned_weights import (
    REWARDS,
    LearnedWeights,
    RewardedRandom,
    TrustRule,
    WeightAgent,
    WeightOptions,
    everyone,
)
from fedglimpse.types import Method

TO_SIGMA = 1.4826  # makes the median absolute deviation of a normal variable its sigma


@dataclass(frozen=True)
class Options(WeightOptions):
    """`options.*` of FedDRL, besides those of its learner."""

    reward: str = option("losses", "as of FedPPO, with another default", choices=REWARDS)
    filter: float = option(
        3.5, "z, robust deviations above the median at which a model is dropped; 0: off", at_least=0
    )


def not_outlying(losses: Tensor, limit: float) -> Tensor:
    """Mark the models whose loss is not far above the median `[K]`; at least half always are.

    A loss that is not a number is never trusted, unless all are such. Where more than half of the
    losses are equal there is no measure of spread, and all finite ones are trusted.
    """
    is_finite = losses.isfinite()
    if not is_finite.any():
        return everyone(losses)
    values = losses.double()
    median = values[is_finite].quantile(0.5)
    deviations = values[is_finite] - median
    spread = TO_SIGMA * deviations.abs().quantile(0.5)
    is_near = (values - median <= limit * spread) | (spread == 0)
    return is_finite & is_near


def build(setting: Setting) -> Method:
    """Return our reading of FedDRL."""
    options = setting.options(Options)
    agent = WeightAgent(setting, options)
    trust: TrustRule = everyone
    if options.filter:
        trust = partial(not_outlying, limit=options.filter)
    return Method(RewardedRandom(agent), LearnedWeights(agent, trust))


INFO = MethodInfo(
    name="feddrl",
    summary="outlying models dropped, the others weighed by an actor-critic (our reading)",
    source="Chen et al. 2023, abstract; Nguyen et al. 2022, notes",
    build=build,
    confidence="low",
)
