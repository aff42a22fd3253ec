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
    d, length = config.d_token, config.history + 1
    clients, past = sets * visible, sets * length
    total = clients * features * d + past * sketch_dim * d
    if config.spatial_attention:
        total += _attention(d, sets, visible, visible)
    if config.temporal_attention:
        total += _attention(d, sets, length, length) + _attention(d, sets, visible, length)
    hidden = max(d // 2, 8)
    width = d + (0 if config.identity == "none" else config.identity_dim)
    head = width * hidden + hidden * outputs
    total += (clients + sets) * head + (sets * d * hidden if config.advantage_context else 0)
    return 2 * total


def _attention(d: int, sets: int, rows: int, context: int) -> int:
    """Multiply-adds of one attention layer: projections, scores, weighted sum."""
    return sets * (rows * d * d + context * 2 * d * d + 2 * rows * context * d)


def update_flops(now: int, later: int) -> int:
    """Count one mini-batch from its forward costs: a backward pass is twice its forward.

    Args:
        now: forward cost of the observations that are learnt from.
        later: forward cost of the next observations, read by both networks.
    """
    return 3 * now + 2 * later
