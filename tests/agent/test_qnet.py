from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rl_fakes import C, D, config, network, observation
from torch.utils.flop_counter import FlopCounterMode

from fedglimpse.agent.attention import SpatioTemporal, entropy
from fedglimpse.agent.flops import forward_flops
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.shared_view import means_of, spreads_of

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
    with torch.no_grad():
        return network(**changes)(obs)


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
        q = net(obs)
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
    net = network()
    assert isinstance(net.mixer, SpatioTemporal)
    history = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    later = history.clone()
    later[2] += 1.0
    mask = torch.ones(2, 4, dtype=torch.bool)
    with torch.no_grad():
        before, after = (net.mixer.temporal_tokens(h, mask) for h in (history, later))
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


@pytest.mark.parametrize("rule", ["tanh", "clamp"])
def test_q_clip_bounds_q(rule: str) -> None:
    net = network(q_clip=rule, gamma=0.5)
    with torch.no_grad():
        net.heads.value_output.bias.fill_(50.0)
        assert net(observation()).max() <= 2.0
    assert q_of(observation()).equal(network()(observation()).detach())


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


def test_entropy_of_uniform_and_of_certain_attention() -> None:
    uniform = torch.full((2, 4, 3), 0.25)
    assert entropy(uniform).item() == pytest.approx(1.386294, abs=1e-5)
    certain = torch.zeros(2, 4, 3)
    certain[:, 0] = 1.0
    assert entropy(certain).item() == 0.0


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 10, 11, 23, 64])
def test_numbers_of_many_lanes_are_bit_for_bit_those_of_each(clients: int) -> None:
    draw, counts = torch.Generator().manual_seed(clients), [clients] * 5 + [clients + 2] * 12
    weights = torch.rand(17, 2, 6, clients + 4, generator=draw).softmax(dim=2)
    each = [float(entropy(own[..., :n])) for own, n in zip(weights, counts, strict=True)]
    assert list(spreads_of(weights, counts).values()) == each
    scores = torch.randn(17, clients + 4, generator=draw)
    means = [float(own[:n].mean()) for own, n in zip(scores, counts, strict=True)]
    assert list(means_of(scores, counts).values()) == means


@pytest.mark.parametrize("changes", ABLATIONS, ids=named)
def test_flops_agree_with_torchs_counter(changes: dict[str, Any]) -> None:
    net, obs = network(**changes), observation(sets=3, visible=5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(obs)
    outputs = C if changes.get("q_output") == "per_class" else 1
    counted = forward_flops(
        replace(config(), **changes), features=D, sketch_dim=D, outputs=outputs, sets=3, visible=5
    )
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.05)
