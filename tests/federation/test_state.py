from __future__ import annotations

import torch
from torch import nn

from fedglimpse.federation.state import Layout


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3, bias=False)
    )


def test_parameters_come_first_and_entries_are_contiguous() -> None:
    layout = Layout.of(model())
    names = [e.name for e in layout.entries]
    assert names[-2:] == ["1.running_mean", "1.running_var"]
    assert layout.num_params == 18 + 2 + 2 + 2 + 24
    assert layout.size == layout.num_params + 4
    assert layout.params + layout.buffers == layout.entries
    at = 0
    for entry in layout.entries:
        assert entry.start == at
        at = entry.stop
        assert entry.stop - entry.start == torch.Size(entry.shape).numel()
    assert at == layout.size


def test_integer_counters_are_left_out() -> None:
    net = model()
    assert "1.num_batches_tracked" in dict(net.named_buffers())
    assert all("num_batches" not in e.name for e in Layout.of(net).entries)


def test_pack_inverts_unpack_for_any_leading_shape() -> None:
    layout = Layout.of(model())
    for lead in ((), (3,), (2, 3)):
        flat = torch.arange(float(layout.size)).expand(*lead, -1).contiguous()
        named = layout.unpack(flat)
        assert named["0.weight"].shape == (*lead, 2, 1, 3, 3)
        assert torch.equal(layout.pack(named), flat)


def test_unpack_gives_views() -> None:
    layout = Layout.of(model())
    flat = torch.zeros(layout.size)
    layout.unpack(flat)["0.bias"].fill_(7)
    assert flat.sum() == 14


def test_write_then_read_restores_the_state() -> None:
    first = model()
    second = model()
    first(torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(0)))  # moves statistics
    layout = Layout.of(first)
    state = layout.read(first)
    layout.write(state, second)
    assert torch.equal(layout.read(second), state)
    x = torch.ones(1, 1, 4, 4)
    assert torch.equal(first.eval()(x), second.eval()(x))


def test_read_is_a_copy() -> None:
    net = model()
    layout = Layout.of(net)
    state = layout.read(net)
    before = state.clone()
    layout.write(torch.zeros(layout.size), net)
    assert torch.equal(state, before)
    assert not state.requires_grad
