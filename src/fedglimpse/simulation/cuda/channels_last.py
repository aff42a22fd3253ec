"""Forward passes of J clients on `[J, B, H, W, C]`, as pure functions that compile well.

The same arithmetic as `simulation/trainers/stacked.py`, laid out for a GPU: clients outermost,
channels innermost,
statistics of real examples only, BatchNorm's new buffers returned instead of written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.simulation.cuda import first_layer
from fedglimpse.simulation.cuda.conv import channels_of_kernel, conv3x3, conv3x3_moments
from fedglimpse.simulation.cuda.descent import NO_SLOPES, sloped
from fedglimpse.simulation.cuda.relu_norm import relu_frozen_norm, relu_norm
from fedglimpse.simulation.trainers.stacked import chain

_POINTWISE = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Identity)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class Passed(NamedTuple):
    """What a forward pass gives."""

    logits: Tensor  # [J, B, C]
    buffers: dict[str, Tensor]  # new running statistics, name -> [J, C]
    inputs: dict[str, Tensor]  # of the layers with a slope, name -> [J, B, F]


def fits(model: nn.Module) -> bool:
    """True where every layer of a model that can be stacked has a fast form here, and trains."""
    trains = all(p.requires_grad for p in model.parameters())
    return trains and all(_fits(layer) for _, layer in chain(model))


def _fits(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        plain = layer.kernel_size == (3, 3) and layer.stride == (1, 1) and layer.groups == 1
        return plain and layer.dilation == (1, 1) and layer.padding in ((0, 0), (1, 1))
    if isinstance(layer, nn.MaxPool2d):
        halves = layer.kernel_size == 2 and layer.stride == 2 and layer.padding == 0
        return halves and layer.dilation == 1 and not layer.ceil_mode
    if isinstance(layer, _NORMS):
        return layer.affine and layer.track_running_stats and layer.momentum is not None
    return isinstance(layer, (nn.Linear, nn.Flatten, *_POINTWISE))


def forward(
    layers: list[tuple[str, nn.Module]],
    state: Mapping[str, Tensor],
    x: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    training: bool = True,
    slopes: Mapping[str, Tensor] = NO_SLOPES,
) -> Passed:
    """Run a chain of layers.

    Args:
        layers: of `trainers.stacked.chain`, all of which `fits`.
        state: name -> stacked tensors in the layout of torch.  # [J, *shape]
        x: inputs, channels last for images.  # [J, B, H, W, C] or [J, B, F]
        counts: real examples of each client; the rest of a batch is padding.  # [J]
        dtype: of the activations.
        training: BatchNorm by batch statistics; False: by running ones.
        slopes: dense layer -> zeros that are added to its outputs, see `descent.py`.  # [J, B, O]
    """
    buffers: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    x, at = x.to(dtype), 0
    while at < len(layers):
        name, layer = layers[at]
        own = {k: state[f"{name}.{k}"] for k, _ in layer.named_parameters()}
        if block := _block(layers, at, x):
            norm_name, norm = layers[at + 2]
            tensors = _tensors(state, norm_name)
            x, new = _conv_block(x, own, layer, norm, tensors, counts, block == 4, training)
            buffers |= {f"{norm_name}.{k}": v for k, v in new.items()}
            at += block
            continue
        if isinstance(layer, nn.Linear) and name in slopes:
            room = own["weight"].shape[2] - x.shape[2]  # beside every row of weights
            inputs[name] = x = F.pad(x, (0, room)) if room else x
            x = sloped(x, own, slopes[name])
        elif isinstance(layer, nn.Linear):
            x = _linear(x, own)
        elif isinstance(layer, nn.Conv2d):
            x = convolved(x, own["weight"], cast(int, layer.padding[0]))
            x = x + own["bias"].to(x.dtype)[:, None, None, None] if "bias" in own else x
        elif isinstance(layer, _NORMS):
            x, new = _batch_norm(layer, x, _tensors(state, name), counts, training)
            buffers |= {f"{name}.{k}": v for k, v in new.items()}
        elif isinstance(layer, nn.MaxPool2d):
            x = _max_pool(x)
        elif isinstance(layer, nn.Flatten):
            x = x.permute(0, 1, 4, 2, 3).flatten(2) if x.dim() == 5 else x.flatten(2)
        else:
            x = layer(x)
        at += 1
    return Passed(x, buffers, inputs)


def _tensors(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the four tensors of a BatchNorm layer."""
    keys = ("weight", "bias", "running_mean", "running_var")
    return {k: state[f"{name}.{k}"] for k in keys}


def _block(layers: list[tuple[str, nn.Module]], at: int, x: Tensor) -> int:
    """Return how many layers from `at` on run as one: convolution, ReLU, BatchNorm, perhaps pool.

    0 where they do not follow each other like this, or their shapes do not fit the kernels.
    """
    kinds = [type(layer) for _, layer in layers[at : at + 4]]
    if kinds[:3] != [nn.Conv2d, nn.ReLU, nn.BatchNorm2d]:
        return 0
    conv = cast(nn.Conv2d, layers[at][1])
    if conv.bias is None or channels_of_kernel(conv.out_channels) != conv.out_channels:
        return 0
    grown = 2 * cast(int, conv.padding[0]) - 2
    even = (x.shape[2] + grown) % 2 == 0 and (x.shape[3] + grown) % 2 == 0
    return 4 if len(kinds) == 4 and kinds[3] is nn.MaxPool2d and even else 3


def _conv_block(
    x: Tensor,
    own: Mapping[str, Tensor],
    conv: nn.Module,
    norm: nn.Module,
    tensors: Mapping[str, Tensor],
    counts: Tensor,
    pool: bool,
    training: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run convolution, ReLU, BatchNorm and, where `pool`, max-pooling."""
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    pad = cast(int, conv.padding[0])
    places = (x.shape[2] + 2 * pad - 2) * (x.shape[3] + 2 * pad - 2)
    if training and first_layer.supported(x, conv.out_channels, pad):
        y, mean, var = first_layer.first_layer(
            x, own["weight"], own["bias"], tensors["weight"], tensors["bias"], counts,
            norm.eps, pad, pool,
        )  # fmt: skip
        return y, _running(norm, tensors, mean, var, counts, places)
    given = (own["bias"], tensors["weight"], tensors["bias"], counts)
    if not training:
        still = tensors["running_mean"], tensors["running_var"]
        z = convolved(x, own["weight"], pad)
        return relu_frozen_norm(z, *given, *still, norm.eps, pool), {}
    z, sums = conv3x3_moments(*_for_kernel(x, own["weight"]), own["bias"], counts, pad)
    y, mean, var = relu_norm(z, *given, sums, norm.eps, pool)
    return y, _running(norm, tensors, mean, var, counts, places)


def _running(
    layer: nn.Module,
    tensors: Mapping[str, Tensor],
    mean: Tensor,
    var: Tensor,
    counts: Tensor,
    places: int,
) -> dict[str, Tensor]:
    """Return a norm's new running statistics; those of idle clients stay."""
    count = (counts.float() * places).clamp(min=1)[:, None]
    share = cast(float, layer.momentum) * (counts > 0).float()[:, None]
    unbiased = var.detach() * (count / (count - 1).clamp(min=1))
    return {
        "running_mean": torch.lerp(tensors["running_mean"], mean.detach(), share),
        "running_var": torch.lerp(tensors["running_var"], unbiased, share),
    }


def _linear(x: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    """Multiply weights with inputs, not inputs with weights: so their gradient has their layout."""
    weight, columns = own["weight"].to(x.dtype), x.transpose(1, 2)  # [J, F_out, F_in], [J, F_in, B]
    if room := weight.shape[2] - x.shape[2]:  # beside every row of weights
        columns = F.pad(columns, (0, 0, 0, room))
    if "bias" not in own:
        return torch.bmm(weight, columns).transpose(1, 2)
    bias = own["bias"].to(x.dtype)[:, :, None]
    return torch.baddbmm(bias, weight, columns).transpose(1, 2)


def convolved(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Convolve without bias; `weight` as torch keeps it, `[J, CO, CI, 3, 3]`."""
    return conv3x3(*_for_kernel(x, weight), None, pad)[..., : weight.shape[1]]


def _for_kernel(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return images and taps `[J, 9, CO, CI]` as the kernels take them, zeros beside channels."""
    jobs, outputs, inputs = weight.shape[:3]
    taps = weight.to(x.dtype).permute(0, 3, 4, 1, 2).reshape(jobs, 9, outputs, inputs)
    more_in, more_out = (channels_of_kernel(c) - c for c in (inputs, outputs))
    if more_in or more_out:
        x, taps = F.pad(x, (0, more_in)), F.pad(taps, (0, more_in, 0, more_out))
    return x.contiguous(), taps.contiguous()


def _max_pool(x: Tensor) -> Tensor:
    """2x2 pooling; an odd last row or column is dropped, as `nn.MaxPool2d` does."""
    jobs, batch, high, wide, channels = x.shape
    x = x[:, :, : high // 2 * 2, : wide // 2 * 2]
    return x.reshape(jobs, batch, high // 2, 2, wide // 2, 2, channels).amax((3, 5))


def _batch_norm(
    layer: nn.BatchNorm1d | nn.BatchNorm2d,
    x: Tensor,
    tensors: Mapping[str, Tensor],
    counts: Tensor,
    training: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    jobs, batch, channels = x.shape[0], x.shape[1], x.shape[-1]
    shape = (jobs, *[1] * (x.dim() - 2), channels)
    scale, shift = tensors["weight"], tensors["bias"]
    if not training:
        scale = scale * torch.rsqrt(tensors["running_var"] + layer.eps)
        shift = shift - tensors["running_mean"] * scale
        return torch.addcmul(shift.view(shape), x.float(), scale.view(shape)).to(x.dtype), {}
    real = (torch.arange(batch, device=x.device) < counts[:, None]).float()  # [J, B]
    real = real.view(jobs, batch, *[1] * (x.dim() - 2))
    over = tuple(range(1, x.dim() - 1))
    places = x[0, 0].numel() // channels
    count = (counts.float() * places).clamp(min=1)[:, None]  # [J, 1]
    wide = x.float()
    mean = (wide * real).sum(over) / count  # [J, C]
    centred = wide - mean.view(shape)
    var = (centred.square() * real).sum(over) / count
    factor = torch.rsqrt(var + layer.eps) * scale
    out = (centred * factor.view(shape) + shift.view(shape)).to(x.dtype)
    return out, _running(layer, tensors, mean, var, counts, places)


class ChannelsLastMany:
    """Passes of `channels_last.forward` with running statistics."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        """Take the structure of `model`, which must be of layers that `fits`."""
        self.layers = chain(model)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.flags: Precision = "fp32" if precision == "fp32" else "tf32"

    def __call__(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits `[S, B, C]`."""
        if x.dim() == 5:
            x = x.permute(0, 1, 3, 4, 2)
        counts = torch.full((len(x),), x.shape[1], device=x.device)
        with numerics(x.device, self.flags):  # bf16 is written into the pass itself
            passed = forward(self.layers, state, x, counts, self.dtype, training=False)
        return passed.logits.float()
