"""Forward passes of J clients on `[J, B, H, W, C]`, as pure functions that compile well.

The same arithmetic as `simulation/trainers/stacked.py`, laid out for a GPU: clients outermost,
channels innermost, statistics of real examples only, and BatchNorm's new buffers returned instead
of written. A convolution with ReLU, BatchNorm and perhaps max-pooling behind it runs as one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.federation.devices import Precision
from fedglimpse.simulation.cuda.conv import channels_of_kernel, conv3x3, conv3x3_moments
from fedglimpse.simulation.cuda.dense_step import NO_OFFSETS, dense_with_offset
from fedglimpse.simulation.cuda.first_layer import first_layer, supported
from fedglimpse.simulation.cuda.relu_norm import relu_frozen_norm, relu_norm
from fedglimpse.simulation.trainers.stacked import BATCH_NORMS, POINTWISE, BatchNorm, chain

Layers = list[tuple[str, nn.Module]]  # of `trainers.stacked.chain`


class ForwardPass(NamedTuple):
    """Results of a forward pass."""

    logits: Tensor  # [J, B, C]
    buffers: dict[str, Tensor]  # new running statistics, name -> [J, C]
    dense_inputs: dict[str, Tensor]  # of the layers with an offset, name -> [J, B, F]


def fits(model: nn.Module) -> bool:
    """True where every layer of a model that can be stacked has a fast form here, and trains."""
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return False
    return all(_layer_fits(layer) for _, layer in chain(model))


def _layer_fits(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        is_3x3 = layer.kernel_size == (3, 3)
        is_padded_evenly = layer.padding in ((0, 0), (1, 1))
        is_dense = layer.stride == (1, 1) and layer.dilation == (1, 1)
        return is_3x3 and is_padded_evenly and is_dense and layer.groups == 1
    if isinstance(layer, nn.MaxPool2d):
        is_2x2 = layer.kernel_size == 2 and layer.stride == 2 and layer.padding == 0
        return is_2x2 and layer.dilation == 1 and not layer.ceil_mode
    if isinstance(layer, BATCH_NORMS):
        return layer.affine and layer.track_running_stats and layer.momentum is not None
    return isinstance(layer, (nn.Linear, nn.Flatten, *POINTWISE))


def forward(
    layers: Layers,
    state: Mapping[str, Tensor],
    x: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    training: bool = True,
    offsets: Mapping[str, Tensor] = NO_OFFSETS,
) -> ForwardPass:
    """Run a chain of layers.

    Args:
        layers: of `trainers.stacked.chain`, all of which `fits`.
        state: name -> stacked tensors in the layout of torch.  # [J, *shape]
        x: inputs, channels last for images.  # [J, B, H, W, C] or [J, B, F]
        counts: real examples of each client; the rest of a batch is padding.  # [J]
        dtype: of the activations.
        training: BatchNorm by batch statistics; False: by running ones.
        offsets: dense layer -> zeros added to its outputs, see `dense_step.py`.  # [J, B, O]
    """
    buffers: dict[str, Tensor] = {}
    dense_inputs: dict[str, Tensor] = {}
    x = x.to(dtype)
    position = 0
    while position < len(layers):
        name, layer = layers[position]
        params = {key: state[f"{name}.{key}"] for key, _ in layer.named_parameters()}
        block_length = _conv_block_length(layers, position, x)
        if block_length:
            norm_name, norm = layers[position + 2]
            x, new_buffers = _conv_block(
                x,
                params,
                conv=cast(nn.Conv2d, layer),
                norm=cast(nn.BatchNorm2d, norm),
                tensors=_norm_tensors(state, norm_name),
                counts=counts,
                pool=block_length == 4,
                training=training,
            )
            buffers |= _prefixed(norm_name, new_buffers)
            position += block_length
            continue
        if isinstance(layer, nn.Linear) and name in offsets:
            x = _padded_features(x, params["weight"])
            dense_inputs[name] = x
            x = dense_with_offset(x, params, offsets[name])
        elif isinstance(layer, BATCH_NORMS):
            tensors = _norm_tensors(state, name)
            x, new_buffers = _batch_norm(layer, x, tensors, counts, training)
            buffers |= _prefixed(name, new_buffers)
        else:
            x = _apply(layer, params, x)
        position += 1
    return ForwardPass(x, buffers, dense_inputs)


def _apply(layer: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Run a layer that has no statistics."""
    if isinstance(layer, nn.Linear):
        return _linear(x, params)
    if isinstance(layer, nn.Conv2d):
        pad = cast(int, layer.padding[0])
        x = convolved(x, params["weight"], pad)
        if "bias" not in params:
            return x
        bias = params["bias"].to(x.dtype)
        return x + bias[:, None, None, None]
    if isinstance(layer, nn.MaxPool2d):
        return _max_pool(x)
    if isinstance(layer, nn.Flatten):
        if x.dim() == 5:
            x = x.permute(0, 1, 4, 2, 3)
        return x.flatten(2)
    return cast(Tensor, layer(x))


def _prefixed(layer: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's tensors by their names in the state."""
    return {f"{layer}.{key}": value for key, value in tensors.items()}


def _norm_tensors(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the four tensors of a BatchNorm layer."""
    keys = ("weight", "bias", "running_mean", "running_var")
    return {key: state[f"{name}.{key}"] for key in keys}


def _conv_block_length(layers: Layers, position: int, x: Tensor) -> int:
    """Return how many layers from here on run as one: convolution, ReLU, BatchNorm, perhaps pool.

    0 where they do not follow each other like this, or their shapes do not fit the kernels.
    """
    kinds = [type(layer) for _, layer in layers[position : position + 4]]
    if kinds[:3] != [nn.Conv2d, nn.ReLU, nn.BatchNorm2d]:
        return 0
    conv = cast(nn.Conv2d, layers[position][1])
    if conv.bias is None:
        return 0
    if channels_of_kernel(conv.out_channels) != conv.out_channels:
        return 0
    pad = cast(int, conv.padding[0])
    height, width = _output_size(x, pad)
    can_pool = height % 2 == 0 and width % 2 == 0
    has_pool = kinds[3:] == [nn.MaxPool2d]
    return 4 if has_pool and can_pool else 3


def _output_size(x: Tensor, pad: int) -> tuple[int, int]:
    """Return height and width of a 3x3 convolution's result."""
    height, width = x.shape[2:4]
    return height + 2 * pad - 2, width + 2 * pad - 2


def _conv_block(
    x: Tensor,
    params: Mapping[str, Tensor],
    conv: nn.Conv2d,
    norm: nn.BatchNorm2d,
    tensors: Mapping[str, Tensor],
    counts: Tensor,
    pool: bool,
    training: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run convolution, ReLU, BatchNorm and, where `pool`, max-pooling; also new buffers."""
    pad = cast(int, conv.padding[0])
    weight = params["weight"]
    bias = params["bias"]
    gamma = tensors["weight"]
    beta = tensors["bias"]
    if not training:
        z = convolved(x, weight, pad)
        mean = tensors["running_mean"]
        var = tensors["running_var"]
        return relu_frozen_norm(z, bias, gamma, beta, counts, mean, var, norm.eps, pool), {}
    height, width = _output_size(x, pad)
    if supported(x, conv.out_channels, pad):
        y, mean, var = first_layer(x, weight, bias, gamma, beta, counts, norm.eps, pad, pool)
    else:
        images, taps = _for_kernel(x, weight)
        z, sums = conv3x3_moments(images, taps, bias, counts, pad)
        y, mean, var = relu_norm(z, bias, gamma, beta, counts, sums, norm.eps, pool)
    return y, _new_buffers(norm, tensors, mean, var, counts, height * width)


def _new_buffers(
    norm: BatchNorm,
    tensors: Mapping[str, Tensor],
    mean: Tensor,
    var: Tensor,
    counts: Tensor,
    pixels: int,
) -> dict[str, Tensor]:
    """Return a norm's new running statistics; those of idle clients stay.

    Args:
        norm: for its momentum.
        tensors: its running statistics so far.  # [J, C]
        mean: of the batch.  # [J, C]
        var: of the batch, biased.  # [J, C]
        counts: real examples of each client.  # [J]
        pixels: of an example.
    """
    momentum = cast(float, norm.momentum)
    num_values = (counts.float() * pixels).clamp(min=1)[:, None]
    is_active = (counts > 0).float()[:, None]
    weight = momentum * is_active
    to_unbiased = num_values / (num_values - 1).clamp(min=1)
    unbiased = var.detach() * to_unbiased
    return {
        "running_mean": torch.lerp(tensors["running_mean"], mean.detach(), weight),
        "running_var": torch.lerp(tensors["running_var"], unbiased, weight),
    }


def _padded_features(x: Tensor, weight: Tensor) -> Tensor:
    """Add zero features `[J, B, F]` up to the padded rows of weights `[J, O, F']`."""
    padding = weight.shape[2] - x.shape[2]
    return F.pad(x, (0, padding)) if padding else x


def _linear(x: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Multiply weights with inputs, not inputs with weights: so their gradient has their layout."""
    weight = params["weight"].to(x.dtype)  # [J, O, F']
    columns = x.transpose(1, 2)  # [J, F, B]
    if padding := weight.shape[2] - x.shape[2]:
        columns = F.pad(columns, (0, 0, 0, padding))
    if "bias" not in params:
        return torch.bmm(weight, columns).transpose(1, 2)
    bias = params["bias"].to(x.dtype)[:, :, None]
    return torch.baddbmm(bias, weight, columns).transpose(1, 2)


def convolved(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Convolve without bias; `weight` as torch keeps it, `[J, CO, CI, 3, 3]`."""
    outputs = weight.shape[1]
    images, taps = _for_kernel(x, weight)
    convolution = conv3x3(images, taps, None, pad)
    return convolution[..., :outputs]


def _for_kernel(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return images and taps `[J, 9, CO, CI]` as the kernels take them, zeros beside channels."""
    jobs, outputs, inputs = weight.shape[:3]
    taps = weight.to(x.dtype).permute(0, 3, 4, 1, 2)
    taps = taps.reshape(jobs, 9, outputs, inputs)
    input_padding = channels_of_kernel(inputs) - inputs
    output_padding = channels_of_kernel(outputs) - outputs
    if input_padding or output_padding:
        x = F.pad(x, (0, input_padding))
        taps = F.pad(taps, (0, input_padding, 0, output_padding))
    return x.contiguous(), taps.contiguous()


def _max_pool(x: Tensor) -> Tensor:
    """2x2 pooling; an odd last row or column is dropped, as `nn.MaxPool2d` does."""
    jobs, batch, height, width, channels = x.shape
    rows = height // 2
    columns = width // 2
    x = x[:, :, : rows * 2, : columns * 2]
    squares = x.reshape(jobs, batch, rows, 2, columns, 2, channels)
    return squares.amax((3, 5))


def _batch_norm(
    norm: BatchNorm,
    x: Tensor,
    tensors: Mapping[str, Tensor],
    counts: Tensor,
    training: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a BatchNorm that is not part of a block; also its new buffers."""
    jobs = x.shape[0]
    batch = x.shape[1]
    channels = x.shape[-1]
    ones = [1] * (x.dim() - 3)  # one for each dimension of pixels
    shape = (jobs, 1, *ones, channels)
    scale = tensors["weight"]
    shift = tensors["bias"]
    if not training:
        scale = scale * torch.rsqrt(tensors["running_var"] + norm.eps)
        shift = shift - tensors["running_mean"] * scale
        out = torch.addcmul(shift.view(shape), x.float(), scale.view(shape))
        return out.to(x.dtype), {}
    positions = torch.arange(batch, device=x.device)
    is_real = (positions < counts[:, None]).float()  # [J, B]
    is_real = is_real.view(jobs, batch, *ones, 1)
    summed_dims = tuple(range(1, x.dim() - 1))
    pixels = x[0, 0].numel() // channels
    num_values = (counts.float() * pixels).clamp(min=1)[:, None]  # [J, 1]
    values = x.float()
    mean = (values * is_real).sum(summed_dims) / num_values  # [J, C]
    centred = values - mean.view(shape)
    var = (centred.square() * is_real).sum(summed_dims) / num_values
    factor = torch.rsqrt(var + norm.eps) * scale
    out = centred * factor.view(shape) + shift.view(shape)
    new_buffers = _new_buffers(norm, tensors, mean, var, counts, pixels)
    return out.to(x.dtype), new_buffers


class ChannelsLastMany:
    """Passes of `channels_last.forward` with running statistics."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        """Take the structure of `model`, which must be of layers that `fits`."""
        self.layers = chain(model)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def __call__(self, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return logits `[S, B, C]`."""
        if x.dim() == 5:
            x = x.permute(0, 1, 3, 4, 2)
        counts = torch.full((len(x),), x.shape[1], device=x.device)
        result = forward(self.layers, state, x, counts, self.dtype, training=False)
        return result.logits.float()
