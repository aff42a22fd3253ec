"""The Triton kernels against PyTorch in double precision, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.federation.devices import Precision, numerics

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from fedglimpse.simulation.cuda.channels_last import convolved  # noqa: E402
from fedglimpse.simulation.cuda.conv import conv3x3, conv3x3_moments  # noqa: E402
from fedglimpse.simulation.cuda.relu_norm import relu_frozen_norm, relu_norm  # noqa: E402

DEVICE = torch.device("cuda")
CLOSE: dict[Precision, float] = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def all_close(found: Sequence[Tensor], wanted: Sequence[Tensor], most: float) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert float((got.double() - want).norm() / want.norm()) < most


def plain_convolution(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Convolve client by client; weights `[J, 9, CO, CI]`."""
    kernels = weight.view(len(weight), 3, 3, *weight.shape[2:]).permute(0, 3, 4, 1, 2)
    return torch.stack([
        F.conv2d(images.permute(0, 3, 1, 2), kernel, padding=pad).permute(0, 2, 3, 1)
        for images, kernel in zip(x, kernels, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize(
    ("side", "inputs", "outputs", "pad"),
    [
        *[(32, 32, 32, 1), (16, 32, 64, 1), (16, 64, 32, 1), (16, 64, 64, 1), (8, 64, 128, 1)],
        *[(14, 32, 64, 0), (8, 128, 128, 1), (7, 64, 16, 1), (5, 16, 32, 2)],
    ],
)
def test_convolutions(side: int, inputs: int, outputs: int, pad: int, precision: Precision) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = normal(3, 6, side, side, inputs).to(dtype).requires_grad_()
    weight = (normal(3, 9, outputs, inputs, seed=1) / 17).to(dtype).requires_grad_()
    with numerics(DEVICE, "fp32" if precision == "fp32" else "tf32"):
        y = conv3x3(x, weight, None, pad)
        grad = normal(*y.shape, seed=2).to(dtype)
        found = torch.autograd.grad(y, (x, weight), grad)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = plain_convolution(exact[0], exact[1], pad)
    all_close([y], [want], CLOSE[precision])
    all_close(found, torch.autograd.grad(want, exact, grad.double()), CLOSE[precision])


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize(
    ("side", "inputs", "outputs", "pad"),
    [(32, 32, 32, 1), (16, 64, 64, 1), (8, 128, 128, 1), (14, 32, 64, 0), (7, 64, 16, 1)],
)
def test_padding_is_not_read(
    side: int, inputs: int, outputs: int, pad: int, precision: Precision
) -> None:
    """Whatever stands there, and its gradient is zero; real images are as they are without it."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, real = normal(3, 33, side, side, inputs).to(dtype), [33, 9, 0]
    weight = (normal(3, 9, outputs, inputs, seed=1) / 17).to(dtype).requires_grad_()
    counts = torch.tensor(real, device=DEVICE)
    there = torch.arange(33, device=DEVICE) < counts[:, None]
    spoilt = torch.where(there[..., None, None, None], x, float("nan")).requires_grad_()
    x = (x * there[..., None, None, None]).requires_grad_()
    with numerics(DEVICE, "fp32" if precision == "fp32" else "tf32"):
        wanted, found = conv3x3(x, weight, None, pad), conv3x3(spoilt, weight, counts, pad)
        grad = normal(*found.shape, seed=2).to(dtype)
        bad = torch.where(there[..., None, None, None], grad, float("nan"))
        grad = grad * there[..., None, None, None]
        want = torch.autograd.grad(wanted, (x, weight), grad)
        got = torch.autograd.grad(found, (spoilt, weight), bad)
    assert torch.equal(found, wanted)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 32), (1, 16), (6, 20), (32, 100)])
def test_channels_that_are_no_power_of_two(inputs: int, outputs: int, precision: Precision) -> None:
    """Zeros are put beside them, and nothing of that is seen outside."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = normal(2, 5, 9, 9, inputs).to(dtype)
    weight = (normal(2, outputs, inputs, 3, 3, seed=1) / 17).to(dtype).requires_grad_()
    with numerics(DEVICE, "fp32" if precision == "fp32" else "tf32"):
        y = convolved(x, weight, 1)
        grad = normal(*y.shape, seed=2).to(dtype)
        found = torch.autograd.grad(y, weight, grad)
    exact = weight.detach().double().requires_grad_()
    want = plain_convolution(x.double(), exact.permute(0, 3, 4, 1, 2).flatten(1, 2), 1)
    all_close([y], [want], CLOSE[precision])
    all_close(found, torch.autograd.grad(want, exact, grad.double()), CLOSE[precision])


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize(
    ("side", "inputs", "outputs", "pad"),
    [(32, 32, 32, 1), (16, 32, 64, 1), (8, 128, 128, 1), (14, 32, 64, 0), (7, 64, 16, 1)],
)
def test_sums_of_a_convolution(
    side: int, inputs: int, outputs: int, pad: int, precision: Precision
) -> None:
    """Of the real images alone, and of what was written; the result is that without them."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, real = normal(3, 7, side, side, inputs).to(dtype), [7, 4, 0]
    weight = (normal(3, 9, outputs, inputs, seed=1) / 17).to(dtype)
    bias, counts = normal(3, outputs, seed=2), torch.tensor(real, device=DEVICE)
    with numerics(DEVICE, "fp32" if precision == "fp32" else "tf32"):
        z, sums = conv3x3_moments(x, weight, bias, counts, pad)
        whole = conv3x3(x, weight, None, pad)
        assert torch.equal(z, conv3x3(x, weight, counts, pad))
    for j, count in enumerate(real):
        assert torch.equal(z[j, :count], whole[j, :count])
        assert not z[j, count:].any()
    want = sums_of(z.double(), bias.double(), counts)
    torch.testing.assert_close(sums.sum(1).double(), want.sum(1), rtol=1e-5, atol=1e-3)
    assert float(sums[2].abs().max()) == 0.0


def sums_of(z: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Return the sums of r and r^2, r = ReLU(z + bias), over real images `[J, 1, 2, C]`."""
    real = torch.arange(z.shape[1], device=z.device) < counts[:, None]
    r = F.relu(z + bias[:, None, None, None]) * real[:, :, None, None, None]
    return torch.stack([r.sum((1, 2, 3)), r.square().sum((1, 2, 3))], dim=1)[:, None]


def plain_norm(z: Tensor, bias: Tensor, weight: Tensor, beta: Tensor, pool: bool) -> Tensor:
    """Run ReLU, BatchNorm and pooling of one client."""
    r = F.relu(z + bias)
    mean, var = r.mean((0, 1, 2)), r.var((0, 1, 2), correction=0)
    y = (r - mean) * torch.rsqrt(var + 1e-5) * weight + beta
    return F.max_pool2d(y.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1) if pool else y


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("side", "channels"), [(16, 32), (8, 128), (6, 16)])
def test_norms(side: int, channels: int, pool: bool, precision: Precision) -> None:
    """Scales of both signs, a part of a batch, and a client that is idle."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    z = normal(3, 40, side, side, channels).to(dtype).requires_grad_()
    params = [normal(3, channels, seed=s).requires_grad_() for s in (1, 2, 3)]
    real = [40, 9, 0]
    counts = torch.tensor(real, device=DEVICE)
    sums = sums_of(z.detach().float(), params[0].detach(), counts)
    y, _, _ = relu_norm(z, *params, counts, sums, 1e-5, pool)
    grad = normal(*y.shape, seed=4).to(dtype)
    found = torch.autograd.grad(y, (z, *params), grad)
    assert float(found[0][2].abs().max()) == 0.0
    for j, count in enumerate(real[:2]):
        exact = [t[j].detach().double() for t in (z, *params)]
        exact[0] = exact[0][:count]
        exact = [t.requires_grad_() for t in exact]
        want = plain_norm(exact[0], exact[1], exact[2], exact[3], pool)
        wanted = torch.autograd.grad(want, exact, grad[j, :count].double())
        own = [g[j] for g in found]
        assert not y[j, count:].any()
        assert not own[0][count:].any()
        all_close([y[j, :count]], [want], CLOSE[precision])
        all_close([own[0][:count], *own[1:]], wanted, CLOSE[precision])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("side", "channels"), [(16, 32), (8, 128), (6, 16)])
def test_frozen_norms(side: int, channels: int, pool: bool, precision: Precision) -> None:
    """Scales of both signs, and statistics that lie apart in memory."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    z = normal(3, 7, side, side, channels).to(dtype).requires_grad_()
    params = [normal(3, channels, seed=s).requires_grad_() for s in (1, 2, 3)]
    mean, var = normal(3, 2, channels, seed=4).abs().unbind(1)
    counts = torch.full((3,), 7, device=DEVICE)
    y = relu_frozen_norm(z, *params, counts, mean, var, 1e-5, pool)
    grad = normal(*y.shape, seed=5).to(dtype)
    found = torch.autograd.grad(y, (z, *params), grad)
    exact = [t.detach().double().requires_grad_() for t in (z, *params)]
    bias, weight, beta = (t[:, None, None, None] for t in exact[1:])
    centre, spread = (t.double()[:, None, None, None] for t in (mean, var))
    want = (F.relu(exact[0] + bias) - centre) * torch.rsqrt(spread + 1e-5) * weight + beta
    if pool:
        images = want.flatten(0, 1).permute(0, 3, 1, 2)
        want = F.max_pool2d(images, 2).permute(0, 2, 3, 1).unflatten(0, (3, 7))
    all_close([y], [want], CLOSE[precision])
    all_close(found, torch.autograd.grad(want, exact, grad.double()), CLOSE[precision])
