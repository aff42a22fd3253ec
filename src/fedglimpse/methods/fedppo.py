"""FedPPO: random clients, whose aggregation weights a PPO agent sets.

Zhao et al.: only the one line of Hou et al. that describes it was available, so this is our
reading, not the authors' rule. It is FedDRL without its first stage and with the proxy score as
reward; see docs/methods/fedppo.md.
"""

from __future__ import annotations

from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.methods.learners.learned_weights import (
    LearnedWeights,
    RewardedRandom,
    WeightAgent,
    WeightOptions,
    everyone,
)
from fedglimpse.types import Method


def build(setting: Setting) -> Method:
    """Return our reading of FedPPO."""
    agent = WeightAgent(setting, setting.options(WeightOptions))
    return Method(RewardedRandom(agent), LearnedWeights(agent, everyone))


INFO = MethodInfo(
    name="fedppo",
    summary="aggregation weights set by PPO (our reading)",
    source="Zhao et al., one sentence of Hou et al.",
    build=build,
    confidence="low",
)
