"""Attention with a gradient of its own: against the plain formula, and against differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedglimpse.agent.attend import attend


def numbers(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
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
def test_tokens_that_look_at_each_other(bias: Tensor) -> None:
    own = numbers(4, 3, 3 * 5)
    gathered, weights = attend(own, None, bias)
    expected, shares = plain(*own.chunk(3, dim=2), bias)
    torch.testing.assert_close(gathered, expected)
    torch.testing.assert_close(weights, shares)
    assert not weights.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(gathered.sin().sum(), own),
        torch.autograd.grad(expected.sin().sum(), own),
    )
    assert torch.autograd.gradcheck(lambda x: attend(x, None, bias)[0], own)


@pytest.mark.parametrize("bias", [BIASES["none"], BIASES["padding"]], ids=["none", "padding"])
def test_tokens_that_look_at_others(bias: Tensor) -> None:
    own, others = numbers(4, 6, 5), numbers(4, 3, 2 * 5)
    gathered, _ = attend(own, others, bias)
    expected, _ = plain(own, *others.chunk(2, dim=2), bias)
    torch.testing.assert_close(gathered, expected)
    assert torch.autograd.gradcheck(lambda x, y: attend(x, y, bias)[0], (own, others))
