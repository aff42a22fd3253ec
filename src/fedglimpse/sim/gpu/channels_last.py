"""Forward passes of J clients on `[J, B, H, W, C]`, as pure functions that compile well.

The same arithmetic as `sim/stacked.py`, laid out for a GPU: clients outermost, channels innermost,
statistics of real examples only, BatchNorm's new buffers returned instead of written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.sim.gpu.conv import conv3x3, supported
from fedglimpse.sim.stacked import chain

_POINTWISE = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Identity)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class Passed(NamedTuple):
    """What a forward pass gives."""

    logits: Tensor  # [J, B, C]
    buffers: dict[str, Tensor]  # new running statistics, name -> [J, C]


def fits(model: nn.Module) -> bool:
    """True where every layer has a fast form here."""
    return all(_fits(layer) for _, layer in chain(model))


def _fits(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        plain = layer.kernel_size == (3, 3) and layer.stride == (1, 1) and layer.groups == 1
        return plain and layer.dilation == (1, 1) and layer.padding in ((0, 0), (1, 1))
    if isinstance(layer, nn.MaxPool2d):
        return layer.kernel_size == 2 and layer.stride == 2 and layer.padding == 0
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
) -> Passed:
    """Run a chain of layers.

    Args:
        layers: of `sim.stacked.chain`, all of which `fits`.
        state: name -> stacked tensors in the layout of torch.  # [J, *shape]
        x: inputs, channels last for images.  # [J, B, H, W, C] or [J, B, F]
        counts: real examples of each client; the rest of a batch is padding.  # [J]
        dtype: of the activations.
        training: BatchNorm by batch statistics; False: by running ones.
    """
    buffers: dict[str, Tensor] = {}
    x = x.to(dtype)
    for name, layer in layers:
        own = {k: state[f"{name}.{k}"] for k, _ in layer.named_parameters()}
        if isinstance(layer, nn.Linear):
            x = _linear(x, own)
        elif isinstance(layer, nn.Conv2d):
            x = _conv(x, own, cast(int, layer.padding[0]))
        elif isinstance(layer, _NORMS):
            running = {k: state[f"{name}.{k}"] for k in ("running_mean", "running_var")}
            x, new = _batch_norm(layer, x, own, running, counts, training)
            buffers |= {f"{name}.{k}": v for k, v in new.items()}
        elif isinstance(layer, nn.MaxPool2d):
            x = _max_pool(x)
        elif isinstance(layer, nn.Flatten):
            x = x.permute(0, 1, 4, 2, 3).flatten(2) if x.dim() == 5 else x.flatten(2)
        else:
            x = layer(x)
    return Passed(x, buffers)


def _linear(x: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    weight = own["weight"].to(x.dtype).transpose(1, 2)  # [J, F_in, F_out]
    if "bias" not in own:
        return torch.bmm(x, weight)
    return torch.baddbmm(own["bias"].to(x.dtype)[:, None], x, weight)


def _conv(x: Tensor, own: Mapping[str, Tensor], pad: int) -> Tensor:
    weight = own["weight"].to(x.dtype)  # [J, CO, CI, 3, 3]
    jobs, outputs, inputs = weight.shape[:3]
    taps = weight.permute(0, 3, 4, 2, 1).reshape(jobs, 9, inputs, outputs)
    if supported(inputs, outputs):
        out = conv3x3(x.contiguous(), taps.contiguous(), pad)
    else:
        out = _conv_by_patches(x, taps, pad)
    return out + own["bias"].to(x.dtype)[:, None, None, None] if "bias" in own else out


def _conv_by_patches(x: Tensor, taps: Tensor, pad: int) -> Tensor:
    """Convolve few input channels: gather the 9 neighbours of every pixel, then multiply."""
    jobs, batch, high, wide, inputs = x.shape
    out_high, out_wide = high + 2 * pad - 2, wide + 2 * pad - 2
    padded = F.pad(x, (0, 0, pad, pad, pad, pad))
    near = [padded[:, :, h : h + out_high, w : w + out_wide] for h in range(3) for w in range(3)]
    fill = -9 * inputs % 16  # matrix units want a multiple of 16
    patches = F.pad(torch.cat(near, dim=-1), (0, fill)).view(jobs, -1, 9 * inputs + fill)
    weights = F.pad(taps.reshape(jobs, 9 * inputs, -1), (0, 0, 0, fill))
    return torch.bmm(patches, weights).view(jobs, batch, out_high, out_wide, -1)


def _max_pool(x: Tensor) -> Tensor:
    """2x2 pooling; an odd last row or column is dropped, as `nn.MaxPool2d` does."""
    jobs, batch, high, wide, channels = x.shape
    x = x[:, :, : high // 2 * 2, : wide // 2 * 2]
    return x.reshape(jobs, batch, high // 2, 2, wide // 2, 2, channels).amax((3, 5))


def _batch_norm(
    layer: nn.BatchNorm1d | nn.BatchNorm2d,
    x: Tensor,
    own: Mapping[str, Tensor],
    running: Mapping[str, Tensor],
    counts: Tensor,
    training: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    jobs, batch, channels = x.shape[0], x.shape[1], x.shape[-1]
    shape = (jobs, *[1] * (x.dim() - 2), channels)
    scale, shift = own["weight"], own["bias"]
    if not training:
        scale = scale * torch.rsqrt(running["running_var"] + layer.eps)
        out = x.float() * scale.view(shape)
        shift = shift - running["running_mean"] * scale
        return (out + shift.view(shape)).to(x.dtype), {}
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
    momentum = cast(float, layer.momentum) * (counts > 0).float()[:, None]
    unbiased = var.detach() * (count / (count - 1).clamp(min=1))
    new = {"running_mean": mean.detach(), "running_var": unbiased}
    return out, {k: torch.lerp(running[k], v, momentum) for k, v in new.items()}
