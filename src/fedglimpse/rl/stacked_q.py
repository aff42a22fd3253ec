"""The Q-networks of R agents in one pass: `rl/qnet.py` with a dimension for lanes in front.

The same arithmetic in fewer and larger operations: tokens travel as `[R, T * B, d]`, slots before
rounds, and every Linear is one batched product over lanes. `qnet.py` is the readable twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse import rng
from fedglimpse.rl.attention import BLOCKED, PerTokenMLP, SpatioTemporal
from fedglimpse.rl.identity import HashedIdentity, NoIdentity
from fedglimpse.rl.observation import Observation
from fedglimpse.rl.qnet import QNetwork

Parameters = Mapping[str, Tensor]  # name in QNetwork -> [R, *shape]


class Seen(NamedTuple):
    """B rounds of each of R lanes, arranged for one pass."""

    clients: Tensor  # [R, V * B, F]
    ids: Tensor  # [R, V * B]
    history: Tensor  # [R, T * B, D]
    share: Tensor  # [R * B, 1, V] weights of a mean over real clients
    past_share: Tensor  # [R * B, 1, T] weights of a mean over rounds that exist
    client_bias: (
        Tensor  # [R * B * h, V, 1] very low where a client is padding; or all zero, [1, 1, 1]
    )
    past_bias: Tensor  # [R * B * h, T, 1] very low where a round does not exist; likewise


def arrange(obs: Observation, heads: int, full: bool) -> Seen:
    """Put slots before rounds and work out what is the same for every layer.

    Args:
        obs: rounds of all lanes, with a leading dimension R.  # [R, B, ...]
        heads: of the attention layers.
        full: nothing is padded, so that no mask is needed.
    """
    lanes, sets, slots = obs.mask.shape
    return Seen(
        clients=obs.clients.transpose(1, 2).reshape(lanes, slots * sets, -1),
        ids=obs.ids.transpose(1, 2).reshape(lanes, slots * sets),
        history=obs.history.transpose(1, 2).reshape(lanes, -1, obs.history.shape[-1]),
        share=_shares(obs.mask),
        past_share=_shares(obs.history_mask),
        client_bias=_bias(obs.mask, heads, full),
        past_bias=_bias(obs.history_mask, heads, full),
    )


def q_values(net: QNetwork, p: Parameters, seen: Seen) -> tuple[Tensor, Tensor | None]:
    """Return Q `[R, B, V]`, or `[R, B, V, C]` per class, and the cross-attention weights.

    Args:
        net: any of the networks, for its architecture; its own parameters are not read.
        p: the parameters of all R networks.
        seen: what the agents saw.

    Returns:
        Q, whose padded slots hold values of no meaning, and weights `[R * B * heads, H+1, V]`, or
        None without a cross-attention.
    """
    lanes = len(seen.clients)
    sets = len(seen.share) // lanes
    cluster, history = _encode(net, p, seen)
    weights = None
    if isinstance(net.mixer, PerTokenMLP):
        cluster = _per_token(net.mixer, p, cluster, history, seen, sets)
    else:
        cluster, weights = _mix(net.mixer, p, cluster, history, seen, sets)
    q = _clip(net, _dueling(net, p, cluster, seen, sets))  # [R, B, V, outputs]
    return (q if net.per_class else q.squeeze(-1)), weights


def histogram(net: QNetwork, p: Parameters, seen: Seen) -> Tensor:
    """Predict the class histogram of the current global model from its token `[R, B, C]`."""
    sets = len(seen.share) // len(seen.history)
    newest = seen.history[:, -sets:]
    name = "encoder.client_input" if net.encoder.global_input is None else "encoder.global_input"
    tokens = _norm(p, "encoder.norm", F.gelu(_linear(p, name, newest)))
    return _linear(p, "histogram_head", tokens).softmax(dim=-1)


def _encode(net: QNetwork, p: Parameters, seen: Seen) -> tuple[Tensor, Tensor]:
    """Return client tokens `[R, V * B, d]` and global tokens `[R, T * B, d]`."""
    if net.encoder.global_input is None:
        both = _linear(p, "encoder.client_input", torch.cat([seen.clients, seen.history], dim=1))
    else:
        own = _linear(p, "encoder.client_input", seen.clients)
        both = torch.cat([own, _linear(p, "encoder.global_input", seen.history)], dim=1)
    tokens = _norm(p, "encoder.norm", F.gelu(both))
    cluster, history = tokens.split([seen.clients.shape[1], seen.history.shape[1]], dim=1)
    return cluster, history


def _mix(
    mixer: SpatioTemporal, p: Parameters, cluster: Tensor, history: Tensor, seen: Seen, sets: int
) -> tuple[Tensor, Tensor | None]:
    """Let client tokens take in each other and the history: Eq. (attnlayers)."""
    width = cluster.shape[-1] // mixer.heads
    folded = (len(cluster), -1, sets * mixer.heads)  # [R, T, B * h]
    if mixer.spatial is not None:
        q, k, v = _linear(p, "mixer.spatial.qkv", cluster).view(*folded, 3, width).unbind(3)
        cluster = _residual(cluster, _attend(q, k, v, seen.client_bias)[0])
    if mixer.cross is None:
        return cluster, None
    length = history.shape[1] // sets
    positions = (
        p["mixer.positions"].expand(-1, -1, sets, -1).reshape(len(history), length * sets, -1)
    )
    history = history + positions
    q, k, v = _linear(p, "mixer.temporal.qkv", history).view(*folded, 3, width).unbind(3)
    ahead = mixer.causal[:length, :length]  # [S, T]
    history = _residual(history, _attend(q, k, v, seen.past_bias + ahead)[0])
    query = _linear(p, "mixer.cross.query", cluster).view(*folded, width)
    key, value = _linear(p, "mixer.cross.key_value", history).view(*folded, 2, width).unbind(3)
    gathered, weights = _attend(query, key, value, seen.past_bias)
    return _residual(cluster, gathered), weights


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return what queries gather `[R, T, B * h, width]`, and the weights `[R * B * h, S, T]`.

    Keys come first in the weights: a softmax over the first of two short dimensions is faster.

    Args:
        q: queries.  # [R, T, B * h, width]
        k: keys.  # [R, S, B * h, width]
        v: values.  # [R, S, B * h, width]
        bias: zero, or very low where a key must not be seen.  # [R * B * h or 1, S or 1, T or 1]
    """
    lanes, _, many, width = q.shape
    queries = q.permute(0, 2, 3, 1).reshape(lanes * many, width, -1)
    keys = k.transpose(1, 2).reshape(lanes * many, -1, width)
    values = v.transpose(1, 2).reshape(lanes * many, -1, width)
    weights = torch.baddbmm(bias, keys, queries, alpha=width**-0.5).softmax(dim=1)
    gathered = torch.bmm(weights.transpose(1, 2), values)
    return gathered.view(lanes, many, -1, width).transpose(1, 2), weights


def _residual(tokens: Tensor, gathered: Tensor) -> Tensor:
    return (tokens.view(gathered.shape) + gathered).view(tokens.shape)


def _per_token(
    mixer: PerTokenMLP, p: Parameters, cluster: Tensor, history: Tensor, seen: Seen, sets: int
) -> Tensor:
    """The ablation without attention."""
    inner = cluster
    if mixer.temporal:
        past = _pooled(history, seen.past_share, sets)  # [R, B, d]
        slots = cluster.shape[1] // sets
        inner = torch.cat([cluster, past.repeat(1, slots, 1)], dim=-1)
    inner = F.gelu(_linear(p, "mixer.layers.0", inner))
    return cluster + _linear(p, "mixer.layers.2", inner)


def _dueling(net: QNetwork, p: Parameters, xi: Tensor, seen: Seen, sets: int) -> Tensor:
    """Return Q `[R, B, V, outputs]`: value of the round plus centred advantages of clients."""
    cluster = _pooled(xi, seen.share, sets)  # [R, B, d]
    value = _linear(p, "heads.value_input", cluster)
    advantage = _linear(p, "heads.advantage_input", xi)  # [R, V * B, hidden]
    if not isinstance(net.identity, NoIdentity):
        identity = _identity(net, p, seen.ids)
        value = _linear(p, "heads.value_identity", _pooled(identity, seen.share, sets), value)
        advantage = _linear(p, "heads.advantage_identity", identity, advantage)
    lanes, slots = len(xi), xi.shape[1] // sets
    if net.heads.advantage_context is not None:
        context = _linear(p, "heads.advantage_context", cluster)  # [R, B, hidden]
        advantage = (advantage.view(lanes, slots, sets, -1) + context.unsqueeze(1)).flatten(1, 2)
    value = _linear(p, "heads.value_output", F.gelu(value))  # [R, B, outputs]
    advantage = _linear(p, "heads.advantage_output", F.gelu(advantage))
    level = value - _pooled(advantage, seen.share, sets)
    q = advantage.view(lanes, slots, sets, -1) + level.unsqueeze(1)
    return q.transpose(1, 2).contiguous()  # sums over clients round by the layout


def _identity(net: QNetwork, p: Parameters, ids: Tensor) -> Tensor:
    """Embed ids `[R, n]` -> `[R, n, d_emb]`, each lane by its own table."""
    table = p["identity.weight"]  # [R, rows, d_emb]
    lanes, rows, dim = table.shape
    if isinstance(net.identity, HashedIdentity):
        ids = rng.hashed(ids.flatten(), 0, 2).view(lanes, -1, 2) % rows
    first = torch.arange(lanes, device=ids.device).view(lanes, *[1] * (ids.dim() - 1)) * rows
    found = F.embedding(ids + first, table.reshape(lanes * rows, dim))
    return _norm(p, "identity.norm", found if found.dim() == 3 else found.sum(dim=2))


def _clip(net: QNetwork, q: Tensor) -> Tensor:
    if net.bound is None:
        return q
    if net.squash == "tanh":
        return net.bound * torch.tanh(q / net.bound)
    return q.clamp(-net.bound, net.bound)


def _linear(p: Parameters, name: str, x: Tensor, onto: Tensor | None = None) -> Tensor:
    """Apply every lane's own Linear to `[R, n, in]`, on top of `onto` where it is given."""
    weight = p[f"{name}.weight"].transpose(1, 2)  # [R, in, out]
    if weight.shape[2] == 1:  # a product with one column rounds by the number of lanes
        return (x * p[f"{name}.weight"]).sum(dim=2, keepdim=True) + p[f"{name}.bias"][:, None]
    if onto is None:
        bias = p.get(f"{name}.bias")
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias[:, None], x, weight)
    return torch.baddbmm(onto, x, weight)


def _norm(p: Parameters, name: str, x: Tensor) -> Tensor:
    """Apply every lane's own LayerNorm to `[R, n, d]`."""
    scale, shift = p[f"{name}.weight"], p[f"{name}.bias"]
    return torch.addcmul(shift[:, None], F.layer_norm(x, x.shape[-1:]), scale[:, None])


def _pooled(tokens: Tensor, share: Tensor, sets: int) -> Tensor:
    """Average `[R, T * B, d]` over T with the weights `[R * B, 1, T]` -> `[R, B, d]`."""
    lanes, dim = len(tokens), tokens.shape[-1]
    by_set = tokens.view(lanes, -1, sets, dim).transpose(1, 2).reshape(lanes * sets, -1, dim)
    return torch.bmm(share, by_set).view(lanes, sets, dim)


def _shares(mask: Tensor) -> Tensor:
    weights = mask / mask.sum(dim=2, keepdim=True).clamp_min(1)
    return weights.view(-1, 1, mask.shape[2])


def _bias(mask: Tensor, heads: int, full: bool) -> Tensor:
    """Turn a mask of what may be seen `[R, B, S]` into a bias `[R * B * h, S, 1]`."""
    if full:
        return torch.zeros(1, 1, 1, device=mask.device)
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, BLOCKED)
    return bias.flatten(0, 1).repeat_interleave(heads, dim=0).unsqueeze(-1)
