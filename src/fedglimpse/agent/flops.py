"""What the agent costs the server, counted from shapes: 2 FLOPs per multiply-add of a product.

A run meets few sizes of visible sets, so every count is made once and remembered.
"""

from __future__ import annotations

from functools import cache

from fedglimpse.agent.config import AgentConfig, AgentSizes


@cache
def forward_flops(config: AgentConfig, sizes: AgentSizes, sets: int, visible: int) -> int:
    """Count one forward pass of the Q-network.

    Args:
        config: the architecture.
        sizes: the sizes that it does not say.
        sets: B, visible sets in the batch.
        visible: V, padding included.
    """
    d = config.d_token
    length = config.history + 1
    clients = sets * visible
    outputs = sizes.outputs(config)
    client_tokens = clients * sizes.features(config) * d
    global_tokens = sets * length * sizes.sketch_dim * d
    total = client_tokens + global_tokens
    if config.spatial_attention:
        total += _attention(d, sets, visible, visible)
    if config.temporal_attention:
        total += _attention(d, sets, length, length)
        total += _attention(d, sets, visible, length)
    hidden = max(d // 2, 8)
    width = d if config.identity == "none" else d + config.identity_dim
    head = width * hidden + hidden * outputs
    total += (clients + sets) * head  # advantages of clients, values of sets
    if config.advantage_context:
        total += sets * d * hidden
    return 2 * total


def _attention(d: int, sets: int, rows: int, context: int) -> int:
    """Multiply-adds of one attention layer: projections, scores, weighted sum."""
    projections = rows * d * d + context * 2 * d * d
    scores_and_sum = 2 * rows * context * d
    return sets * (projections + scores_and_sum)


@cache
def update_flops(config: AgentConfig, sizes: AgentSizes, visible: int, visible_later: int) -> int:
    """Count what one transition of a mini-batch costs.

    Args:
        config: the architecture.
        sizes: the sizes that it does not say.
        visible: V of the observation that is learnt from; a backward pass is twice its forward.
        visible_later: V of the next observation, which both networks read.
    """
    now = forward_flops(config, sizes, 1, visible)
    later = forward_flops(config, sizes, 1, visible_later)
    return 3 * now + 2 * later
