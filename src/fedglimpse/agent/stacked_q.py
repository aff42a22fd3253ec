"""The Q-networks of R agents in one pass: `agent/network.py` with a dimension for lanes in front.

The same arithmetic in fewer and larger operations: tokens travel as `[R, B * T, d]`, and every
Linear is one batched product over lanes. `qnet.py` is the readable twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.attend import attend
from fedglimpse.agent.attention import BLOCKED, SpatioTemporal
from fedglimpse.agent.identity import NoIdentity
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.network import QNetwork

Parameters = Mapping[str, Tensor]  # name in QNetwork -> [R, *shape]


class Seen(NamedTuple):
    """B rounds of each of R lanes, with what every layer needs to know of them."""

    obs: Observation  # [R, B, ...]
    share: Tensor  # [R, B, 1, V] weights of a mean over real clients
    client_bias: Tensor  # [R, B, h, V, 1] very low where a client is padding; or one zero
    past_bias: Tensor  # [R, B, h, T, 1] very low where a round does not exist; or one zero

    def part(self, rows: slice) -> Seen:
        """Return some of the rounds of every lane."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor if tensor.numel() == 1 else tensor[:, rows]

        return Seen(Observation(*map(cut, self.obs)), *map(cut, self[1:]))


def arrange(obs: Observation, heads: int, full: bool) -> Seen:
    """Work out what is the same for every layer.

    Args:
        obs: rounds of all lanes.  # [R, B, ...]
        heads: of the attention layers.
        full: nothing is padded, so that no mask is needed.
    """
    return Seen(
        obs,
        share=_shares(obs.mask),
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
    cluster, history = _encode(net, p, seen.obs)
    cluster, weights = _mix(net.mixer, p, cluster, history, seen)
    q = _dueling(net, p, cluster, seen)  # [R, B, V, outputs]
    return (q if net.per_class else q.squeeze(-1)), weights


def histogram(net: QNetwork, p: Parameters, seen: Seen) -> Tensor:
    """Predict the class histogram of the current global model from its token `[R, B, C]`."""
    name = "encoder.client_input" if net.encoder.global_input is None else "encoder.global_input"
    tokens = _norm(p, "encoder.norm", F.gelu(_linear(p, name, seen.obs.history[:, :, -1])))
    return _linear(p, "histogram_head", tokens).softmax(dim=-1)


def _encode(net: QNetwork, p: Parameters, obs: Observation) -> tuple[Tensor, Tensor]:
    """Return client tokens `[R, B * V, d]` and global tokens `[R, B * T, d]`."""
    clients, history = obs.clients.flatten(1, 2), obs.history.flatten(1, 2)
    if net.encoder.global_input is None:
        both = _linear(p, "encoder.client_input", torch.cat([clients, history], dim=1))
    else:
        own = _linear(p, "encoder.client_input", clients)
        both = torch.cat([own, _linear(p, "encoder.global_input", history)], dim=1)
    tokens = _norm(p, "encoder.norm", F.gelu(both))
    cluster, past = tokens.split([clients.shape[1], history.shape[1]], dim=1)
    return cluster, past


def _mix(
    mixer: SpatioTemporal, p: Parameters, cluster: Tensor, history: Tensor, seen: Seen
) -> tuple[Tensor, Tensor | None]:
    """Let client tokens take in each other and the history: Eq. (attnlayers)."""
    heads, sets = mixer.heads, seen.obs.mask[..., 0].numel()  # R * B
    if mixer.spatial is not None:
        own = _heads(_linear(p, "mixer.spatial.qkv", cluster), sets, heads)
        gathered, _ = attend(own, None, seen.client_bias.flatten(0, 2))
        cluster = cluster + _tokens(gathered, cluster.shape, heads)
    if mixer.cross is None:
        return cluster, None
    shape, length = history.shape, seen.obs.history.shape[2]
    positions = p["mixer.positions"].transpose(1, 2)  # [R, 1, T, d]
    history = (history.view(len(history), -1, *positions.shape[2:]) + positions).view(shape)
    own = _heads(_linear(p, "mixer.temporal.qkv", history), sets, heads)
    ahead = mixer.causal[:length, :length]  # [S, T]
    gathered, _ = attend(own, None, (seen.past_bias + ahead).flatten(0, 2))
    history = history + _tokens(gathered, shape, heads)
    queries = _heads(_linear(p, "mixer.cross.query", cluster), sets, heads)
    past = _heads(_linear(p, "mixer.cross.key_value", history), sets, heads)
    gathered, weights = attend(queries, past, seen.past_bias.flatten(0, 2))
    return cluster + _tokens(gathered, cluster.shape, heads), weights


def _heads(tokens: Tensor, sets: int, heads: int) -> Tensor:
    """Put every head of a set by itself: `[R, B * T, h * n]` -> `[R * B * h, T, n]`."""
    if heads == 1:
        return tokens.view(sets, -1, tokens.shape[-1])
    return tokens.view(sets, -1, heads, tokens.shape[-1] // heads).transpose(1, 2).flatten(0, 1)


def _tokens(gathered: Tensor, shape: torch.Size, heads: int) -> Tensor:
    """Put what heads gathered `[R * B * h, T, w]` side by side again `[R, B * T, d]`."""
    if heads > 1:
        gathered = gathered.view(-1, heads, *gathered.shape[1:]).transpose(1, 2)
    return gathered.reshape(shape)


def _dueling(net: QNetwork, p: Parameters, xi: Tensor, seen: Seen) -> Tensor:
    """Return Q `[R, B, V, outputs]`: value of the round plus centred advantages of clients."""
    cluster = _pooled(xi, seen.share)  # [R, B, d]
    value = _linear(p, "heads.value_input", cluster)
    advantage = _linear(p, "heads.advantage_input", xi)  # [R, B * V, hidden]
    if not isinstance(net.identity, NoIdentity):
        identity = _identity(net, p, seen.obs.ids.flatten(1))
        value = _linear(p, "heads.value_identity", _pooled(identity, seen.share), value)
        advantage = _linear(p, "heads.advantage_identity", identity, advantage)
    shape = seen.obs.mask.shape  # [R, B, V]
    if net.heads.advantage_context is not None:
        context = _linear(p, "heads.advantage_context", cluster)  # [R, B, hidden]
        advantage = (advantage.view(*shape, -1) + context.unsqueeze(2)).flatten(1, 2)
    value = _linear(p, "heads.value_output", F.gelu(value))  # [R, B, outputs]
    advantage = _linear(p, "heads.advantage_output", F.gelu(advantage))
    level = value - _pooled(advantage, seen.share)
    return advantage.view(*shape, -1) + level.unsqueeze(2)


def _identity(net: QNetwork, p: Parameters, ids: Tensor) -> Tensor:
    """Embed ids `[R, n]` -> `[R, n, d_emb]`, each lane by its own table."""
    table = p["identity.weight"]  # [R, rows, d_emb]
    lanes, rows, dim = table.shape
    first = torch.arange(lanes, device=ids.device).view(lanes, 1) * rows
    found = F.embedding(ids + first, table.reshape(lanes * rows, dim))
    return _norm(p, "identity.norm", found)


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
    """Apply every lane's own LayerNorm to `[R, n, d]`; on a CPU lane by lane, one kernel each."""
    scale, shift, shape = p[f"{name}.weight"], p[f"{name}.bias"], x.shape[-1:]
    if x.device.type != "cpu":
        return torch.addcmul(shift[:, None], F.layer_norm(x, shape), scale[:, None])
    if len(x) == 1:
        return F.layer_norm(x, shape, scale.squeeze(0), shift.squeeze(0))
    lanes = zip(x.unbind(), scale.unbind(), shift.unbind(), strict=True)
    return torch.stack([F.layer_norm(tokens, shape, w, b) for tokens, w, b in lanes])


def _pooled(tokens: Tensor, share: Tensor) -> Tensor:
    """Average `[R, B * T, d]` over T with the weights `[R, B, 1, T]` -> `[R, B, d]`."""
    lanes, sets, _, length = share.shape
    by_set = tokens.reshape(lanes * sets, length, -1)
    return torch.bmm(share.flatten(0, 1), by_set).view(lanes, sets, -1)


def _shares(mask: Tensor) -> Tensor:
    return (mask / mask.sum(dim=2, keepdim=True).clamp_min(1)).unsqueeze(2)


def _bias(mask: Tensor, heads: int, full: bool) -> Tensor:
    """Turn a mask of what may be seen `[R, B, S]` into a bias `[R, B, h, S, 1]`."""
    if full:
        return torch.zeros(1, 1, 1, 1, 1, device=mask.device)
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, BLOCKED)
    return bias[:, :, None, :, None].expand(-1, -1, heads, -1, -1)
