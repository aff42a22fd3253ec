"""What the agent costs the server, counted from shapes: 2 FLOPs per multiply-add of a product."""

from __future__ import annotations

from fedglimpse.agent.config import AgentConfig


def forward_flops(
    config: AgentConfig,
    *,
    features: int,
    sketch_dim: int,
    outputs: int,
    sets: int,
    visible: int,
) -> int:
    """Count one forward pass of the Q-network.

    Args:
        config: the architecture.
        features: F of a client.
        sketch_dim: D.
        outputs: Q-values per client, 1 or C.
        sets: B, visible sets in the batch.
        visible: V, padding included.
    """
    d = config.d_token
    length = config.history + 1
    clients = sets * visible
    total = clients * features * d + sets * length * sketch_dim * d  # the encoder
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
    return sets * (rows * d * d + context * 2 * d * d + 2 * rows * context * d)


def update_flops(current: int, later: int) -> int:
    """Count one mini-batch from its forward costs: a backward pass is twice its forward.

    Args:
        current: forward cost of the observations that are learnt from.
        later: forward cost of the next observations, read by both networks.
    """
    return 3 * current + 2 * later
