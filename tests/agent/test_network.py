from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rl_fakes import C, D, N, config, network, observation, one_lane
from torch.utils.flop_counter import FlopCounterMode

from fedglimpse.agent.config import AgentSizes
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.layers import Attention
from fedglimpse.agent.network import forward_flops

ABLATIONS: list[dict[str, Any]] = [
    {},
    {"identity": "none"},
    {"temporal_attention": False},
    {"spatial_attention": False},
    {"spatial_attention": False, "temporal_attention": False},
    {"advantage_context": False},
    {"q_output": "per_class"},
]


def named(changes: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in changes.items()) or "default"


def q_of(obs: Observation, **changes: Any) -> torch.Tensor:
    """Return Q `[B, V]`, or `[B, V, C]` per class."""
    with torch.no_grad():
        q, _ = network(**changes)(one_lane(obs))
    return q[0] if changes.get("q_output") == "per_class" else q[0].squeeze(2)


def pad(obs: Observation, slots: int, rounds: int = 0) -> Observation:
    """Add padded clients on the right and missing rounds on the left, filled with rubbish."""
    sets = len(obs.mask)
    clients = torch.full((sets, slots, obs.clients.shape[2]), 9.0)
    ids, gone = torch.full((sets, slots), 3), torch.zeros(sets, slots, dtype=torch.bool)
    return obs._replace(
        clients=torch.cat([obs.clients, clients], 1),
        ids=torch.cat([obs.ids, ids], 1),
        mask=torch.cat([obs.mask, gone], 1),
    )


@pytest.mark.parametrize("changes", ABLATIONS, ids=named)
def test_permuting_clients_permutes_q(changes: dict[str, Any]) -> None:
    obs = observation(visible=7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    moved = obs._replace(clients=obs.clients[:, order], ids=obs.ids[:, order])
    torch.testing.assert_close(
        q_of(moved, **changes), q_of(obs, **changes)[:, order], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("changes", ABLATIONS, ids=named)
def test_padded_slots_leave_q_unchanged(changes: dict[str, Any]) -> None:
    obs = observation(visible=4)
    padded = q_of(pad(obs, 5), **changes)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:, :4], q_of(obs, **changes), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", ABLATIONS, ids=named)
def test_dueling_identity_mean_q_is_the_value(changes: dict[str, Any]) -> None:
    net, obs = network(**changes), pad(observation(visible=4), 3)
    caught: list[torch.Tensor] = []
    net.heads.value_output.register_forward_hook(lambda _m, _i, out: caught.append(out))
    with torch.no_grad():
        q = net(one_lane(obs))[0][0]
    mean = q[:, :4].mean(dim=1)
    torch.testing.assert_close(mean.view(caught[0].shape), caught[0], atol=1e-5, rtol=1e-5)


def test_missing_history_is_masked_whatever_it_holds() -> None:
    obs = observation()
    gone = obs.history_mask.clone()
    gone[:, :2] = False
    rubbish = obs.history.clone()
    rubbish[:, :2] = 1e3
    some = obs._replace(history_mask=gone)
    torch.testing.assert_close(q_of(some._replace(history=rubbish)), q_of(some))
    assert not torch.allclose(q_of(some), q_of(obs))


def test_every_history_position_changes_q() -> None:
    obs = observation(length=4)
    before = q_of(obs)
    for position in range(4):
        history = obs.history.clone()
        history[:, position] += 1.0
        assert (q_of(obs._replace(history=history)) - before).abs().max() > 1e-4, position


def test_order_of_the_history_matters() -> None:
    obs = observation()
    assert not torch.allclose(q_of(obs._replace(history=obs.history.flip(1))), q_of(obs))


def test_client_features_change_own_q_and_that_of_others() -> None:
    obs = observation(sets=1)
    moved = obs.clients.clone()
    moved[0, 0] += 1.0
    change = (q_of(obs._replace(clients=moved)) - q_of(obs))[0].abs()
    assert change[0] > 1e-3
    assert (change[1:] > 1e-6).all()


def test_identity_changes_q() -> None:
    obs = observation(sets=1)
    other = obs.ids.clone()
    other[0, 0] = 31
    change = (q_of(obs._replace(ids=other)) - q_of(obs)).abs()
    assert change.max() > 1e-3


def test_causal_mask_holds() -> None:
    """A later model changes what the network makes of itself and newer ones, not of older ones."""
    net = network()
    seen: list[torch.Tensor] = []
    net.mixer.temporal.register_forward_hook(lambda _m, _i, out: seen.append(out))  # type: ignore[union-attr]
    obs = observation()
    history = obs.history.clone()
    history[:, 2] += 1.0
    with torch.no_grad():
        net(one_lane(obs))
        net(one_lane(obs._replace(history=history)))
    before, after = (tokens.view(2, 4, -1).transpose(0, 1) for tokens in seen)  # [T, B, d]
    torch.testing.assert_close(before[:2], after[:2], rtol=0, atol=0)
    assert (before[2:] - after[2:]).abs().amax(dim=(1, 2)).min() > 1e-4


def test_one_visible_client_and_nothing_but_padding_are_finite() -> None:
    assert q_of(observation(visible=1)).shape == (2, 1)
    empty = observation(visible=3)._replace(mask=torch.zeros(2, 3, dtype=torch.bool))
    assert q_of(empty).isfinite().all()


@pytest.mark.parametrize("length", [1, 2, 8, 16])
def test_any_history_length(length: int) -> None:
    assert q_of(observation(length=length + 1), history=length).shape == (2, 5)


def test_scalar_input_and_per_class_output() -> None:
    q = q_of(observation(features=3), input="scalar", q_output="per_class")
    assert q.shape == (2, 5, C)


@pytest.mark.parametrize("changes", ABLATIONS[1:], ids=named)
def test_every_switch_changes_the_network(changes: dict[str, Any]) -> None:
    shapes = [
        sorted((n, tuple(p.shape)) for n, p in network(**c).named_parameters())
        for c in ({}, changes)
    ]
    assert shapes[0] != shapes[1]


def test_same_seed_same_network_and_no_global_randomness() -> None:
    state = torch.get_rng_state()
    first, second, other = network(seed=3), network(seed=3), network(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.encoder.client_input.weight, other.encoder.client_input.weight)


@pytest.mark.parametrize("changes", ABLATIONS, ids=named)
def test_flops_agree_with_torchs_counter(changes: dict[str, Any]) -> None:
    net, obs = network(**changes), observation(sets=3, visible=5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(one_lane(obs))
    sizes = AgentSizes(D, C, N)
    counted = forward_flops(replace(config(), **changes), sizes, sets=3, visible=5)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.05)


def numbers(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as everyone writes it, queries first."""
    weights = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5 + bias.transpose(1, 2)).softmax(dim=2)
    return weights @ v, weights.transpose(1, 2)


BLOCKED = torch.tensor([0.0, 0.0, -1e9], dtype=torch.float64).view(1, 3, 1)
AHEAD = torch.full((3, 3), -1e9, dtype=torch.float64).tril(-1)[None]  # keys after the query
BIASES = {
    "none": torch.zeros(1, 1, 1, dtype=torch.float64),
    "padding": BLOCKED.expand(4, -1, -1),
    "causal": AHEAD,
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=list(BIASES))
def test_tokens_that_look_at_each_other(bias: torch.Tensor) -> None:
    qkv = numbers(4, 3, 3 * 5)
    gathered, weights = Attention.apply(*qkv.chunk(3, dim=2), bias)
    expected, shares = plain(*qkv.chunk(3, dim=2), bias)
    torch.testing.assert_close(gathered, expected)
    torch.testing.assert_close(weights, shares)
    assert not weights.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(gathered.sin().sum(), qkv),
        torch.autograd.grad(expected.sin().sum(), qkv),
    )
    assert torch.autograd.gradcheck(lambda x: Attention.apply(*x.chunk(3, dim=2), bias)[0], qkv)


@pytest.mark.parametrize("bias", [BIASES["none"], BIASES["padding"]], ids=["none", "padding"])
def test_tokens_that_look_at_others(bias: torch.Tensor) -> None:
    queries, context = numbers(4, 6, 5), numbers(4, 3, 2 * 5)
    gathered, _ = Attention.apply(queries, *context.chunk(2, dim=2), bias)
    expected, _ = plain(queries, *context.chunk(2, dim=2), bias)
    torch.testing.assert_close(gathered, expected)
    assert torch.autograd.gradcheck(
        lambda x, y: Attention.apply(x, *y.chunk(2, dim=2), bias)[0], (queries, context)
    )
