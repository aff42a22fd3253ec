"""Snake Learning: the model visits clients in turn, each trains one block of layers.

Yu et al., "Snake Learning: A Communication- and Computation-Efficient Distributed Learning
Framework for 6G", 2024. A client trains only the block it is assigned, the others stay frozen, and
learns from the received model by distillation; blocks move to and fro through the network.

Our reading: 1. clients are visited in random order. 2. The loss is (1 - a) cross-entropy +
a T^2 KL to the received model, with a = 0.5 and T = 2. 3. Whole models travel, also frozen blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.methods.sequential import LastModel, RandomOrder
from fedglimpse.types import LocalObjective, Method


@dataclass(frozen=True)
class Options:
    """`options.*` of Snake Learning."""

    distill: float = option(0.5, "a, share of the loss that is distillation", at_least=0, at_most=1)
    temperature: float = option(2.0, "T of the distillation", above=0)
    blocks: bool = option(True, "train one block of layers at a time")


def build(setting: Setting) -> Method:
    """Return Snake Learning."""
    options = setting.options(Options)
    objective = LocalObjective(
        distill=options.distill,
        temperature=options.temperature,
        block_cycle=options.blocks,
    )
    return Method(RandomOrder(), LastModel(), objective, schedule="sequential")


INFO = MethodInfo(
    name="snake",
    summary="the model visits K clients in turn; each trains one block of layers (our reading)",
    source="Yu et al. 2024",
    build=build,
    confidence="low",
)
