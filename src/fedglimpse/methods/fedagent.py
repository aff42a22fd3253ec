"""FedAgent: FAVOR's choice by Double DQN, with clients that distil from the model they received.

No primary text was available, only the one line of Hou et al. that describes it, so this is our
reading, not the authors' rule. The client's loss is

    (1 - alpha) CE + alpha T^2 KL( softmax(z_global / T) || softmax(z / T) )

with the received model as a frozen teacher. alpha = 0 is FAVOR. See docs/methods/fedagent.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods import favor
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.types import LocalObjective, Method


@dataclass(frozen=True)
class Options(favor.Options):
    """`options.*` of FedAgent, besides those of FAVOR."""

    distill: float = option(
        0.5, "alpha, share of the distillation in the loss", at_least=0, at_most=1
    )
    temperature: float = option(2.0, "T of the distillation", above=0)


def build(setting: Setting) -> Method:
    """Return our reading of FedAgent."""
    options = setting.options(Options)
    objective = LocalObjective(distill=options.distill, temperature=options.temperature)
    return Method(favor.favor_selector(setting, options), WeightedDelta(), objective)


INFO = MethodInfo(
    name="fedagent",
    summary="FAVOR with distillation on the clients (our reading)",
    source="FedAgent, one sentence of Hou et al.",
    build=build,
    confidence="low",
)
