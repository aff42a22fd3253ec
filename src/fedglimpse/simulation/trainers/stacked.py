"""Many copies of one model as a single model: forward passes of J clients at once.

Dense layers become batched matrix products on `[J, B, F]`; convolutions become grouped ones on
`[B, J*C, H, W]`, where client j owns channels j*C to (j+1)*C; a norm layer sees J*C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.errors import UserError

_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
POINTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.Identity,
)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)

Tensors = Mapping[str, Tensor]
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def chain(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the layers of nested `nn.Sequential`s in order, with their names.

    A layer that is used twice comes twice; a subclass of `Sequential` is one layer, for its
    forward pass may differ.
    """
    if type(model) is not nn.Sequential:
        return [(prefix, model)]
    layers: list[tuple[str, nn.Module]] = []
    for name, layer in model._modules.items():  # named_children leaves repetitions out
        full_name = f"{prefix}.{name}" if prefix else name
        layers += chain(layer, full_name)
    return layers


def unstackable(model: nn.Module, shape: Sequence[int] | None = None) -> str:
    """Say what cannot be stacked, or return an empty string.

    Args:
        model: whose copies are to be one model.
        shape: of one example; stacked copies are then compared with the model itself.
    """
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return "a model with forward hooks"
    state_names = {name for name, _ in model.named_parameters()}
    state_names |= {name for name, _ in model.named_buffers()}
    for name, layer in chain(model):
        kind = type(layer).__name__
        layer_names = set(_tensor_names(name, layer).values())
        if not layer_names <= state_names:  # shared tensors are named once, by their first layer
            return f"{name} ({kind}), whose weights another layer has too"
        if not _is_supported(layer):
            return f"{name or 'the model'} ({kind})"
    if shape is not None and not _scores_agree(model, shape):
        return f"these layers on examples of shape {tuple(shape)}"
    return ""


def _is_supported(layer: nn.Module) -> bool:
    """True where `StackedModel` has the arithmetic of a layer with these options."""
    if type(layer) not in (*_ARITHMETIC, *_POOLS, *POINTWISE):
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    if isinstance(layer, BATCH_NORMS):
        return layer.affine and layer.track_running_stats and layer.momentum is not None
    if isinstance(layer, nn.GroupNorm):
        return layer.affine
    return True


@torch.no_grad()
def _scores_agree(model: nn.Module, shape: Sequence[int]) -> bool:
    """True where stacked copies score two examples as the model itself does, in evaluation."""
    device = next(model.parameters()).device
    was_training = model.training
    num_values = 2 * math.prod(shape)
    values = torch.arange(num_values, device=device).sin()
    x = values.view(2, *shape)
    expected = model.eval()(x)  # [2, C]
    model.train(was_training)
    stacked = StackedModel(model)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        state[name] = torch.stack([value, value])
    inputs = torch.stack([x, x])
    try:
        scores = stacked.forward(inputs, state, frozen=stacked.names)
    except (RuntimeError, ValueError, IndexError):
        return False
    if scores.shape != (2, *expected.shape):
        return False
    expected = expected.expand_as(scores)
    tolerance = 1e-2 * float(expected.abs().max())
    return torch.allclose(scores, expected, rtol=1e-2, atol=tolerance)


class InPlaceStep(NamedTuple):
    """A plain gradient step that dense layers take in their own backward pass."""

    lr: float
    token: Tensor  # requires a gradient, so that the first layer's backward pass is called too


class StackedLayer(NamedTuple):
    """A layer of the model, and how J copies of it run at once."""

    name: str
    module: nn.Module
    tensor_names: dict[str, str]  # name in the layer -> name in the state
    arithmetic: Arithmetic | None  # None: the module itself, for it treats all numbers alike
    can_step_in_place: bool


class StackedModel:
    """Runs J copies of a sequential model, each with its own parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        """Take the structure of `model`; its values are not used."""
        if reason := unstackable(model):
            raise UserError(
                f"engine.trainer=batched cannot stack {reason}: use engine.trainer=serial, or "
                "build the model from nn.Sequential with the layers listed in docs/simulator.md.",
                key="engine.trainer",
            )
        layers = chain(model)
        self.flattens_first = bool(layers) and isinstance(layers[0][1], nn.Flatten)
        if self.flattens_first:
            del layers[0]
        self.layers: list[StackedLayer] = []  # those after a first `Flatten`
        for name, module in layers:
            layer = StackedLayer(
                name=name,
                module=module,
                tensor_names=_tensor_names(name, module),
                arithmetic=_ARITHMETIC.get(type(module)),
                can_step_in_place=_is_trainable_dense(module),
            )
            self.layers.append(layer)
        self.names = frozenset(layer.name for layer in self.layers)
        self.dense = frozenset(layer.name for layer in self.layers if layer.can_step_in_place)

    def forward(
        self,
        x: Tensor,
        state: Tensors,
        valid: Tensor | None = None,
        frozen: frozenset[str] = frozenset(),
        dense_step: InPlaceStep | None = None,
    ) -> Tensor:
        """Return logits of every client in training mode; updates BatchNorm buffers in place.

        Args:
            x: inputs.  # [J, B, *shape]
            state: name -> stacked tensors.  # [J, *shape]
            valid: which examples are real; None where all are.  # [J, B] bool
            frozen: layers in evaluation mode: their BatchNorms use and keep running statistics.
            dense_step: what dense layers do to their weights while the gradient passes.

        Returns:
            Logits.  # [J, B, C]
        """
        jobs = x.shape[0]
        if x.dim() == 5:
            x = x.flatten(2) if self.flattens_first else fold(x)
        for layer in self.layers:
            tensors = {key: state[name] for key, name in layer.tensor_names.items()}
            is_frozen = layer.name in frozen
            if dense_step is not None and layer.can_step_in_place and not is_frozen:
                x = _SteppingLinear.apply(x, tensors, dense_step.lr, dense_step.token)
            elif layer.arithmetic is None:
                x = layer.module(x)
            else:
                forward_pass = Pass(jobs, valid, is_frozen)
                x = layer.arithmetic(x, tensors, layer.module, forward_pass)
        return x


def _is_trainable_dense(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Linear):
        return False
    return all(parameter.requires_grad for parameter in layer.parameters())


def _tensor_names(layer_name: str, layer: nn.Module) -> dict[str, str]:
    """Return a layer's parameters and float buffers: name in the layer -> name in the state."""
    keys = [key for key, _ in layer.named_parameters()]
    for key, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            keys.append(key)
    prefix = f"{layer_name}." if layer_name else ""
    return {key: prefix + key for key in keys}


def fold(x: Tensor) -> Tensor:
    """Clients into channels: `[J, B, C, ...]` to `[B, J*C, ...]`."""
    by_example = x.transpose(0, 1)
    return by_example.flatten(1, 2)


def unfold(x: Tensor, jobs: int) -> Tensor:
    """Channels back into clients: `[B, J*C, ...]` to `[J, B, C, ...]`."""
    by_example = x.unflatten(1, (jobs, -1))
    return by_example.transpose(0, 1)


class Pass(NamedTuple):
    """What the arithmetic of a layer has to know about a forward pass."""

    jobs: int
    valid: Tensor | None  # which examples are real; None where all are  # [J, B] bool
    is_frozen: bool  # the layer is in evaluation mode


# Takes the input of a layer, its tensors `[J, *shape]`, the layer and the pass, and returns the
# layer's output. Images are `[B, J*C, H, W]`, everything else `[J, B, ...]`.
Arithmetic = Callable[[Tensor, Tensors, Any, Pass], Tensor]


def _linear(x: Tensor, tensors: Tensors, *_: object) -> Tensor:
    """Multiply `[J, B, F_in]` with weights `[J, F_out, F_in]`."""
    transposed = tensors["weight"].transpose(1, 2)
    bias = tensors.get("bias")
    if bias is None:
        return torch.bmm(x, transposed)
    return torch.baddbmm(bias[:, None], x, transposed)


class _SteppingLinear(torch.autograd.Function):
    """A dense layer whose weights step downhill inside the product that gives their gradient.

    Gradients of the weights, as large as the weights of all clients together, are never stored:
    on a CPU the memory they cost is a third of a small model's step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensors: Tensors, lr: float, token: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tensors = tensors
        ctx.lr = lr
        return _linear(x, tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.tensors["weight"]
        bias = ctx.tensors.get("bias")
        grad_of_x = None
        if ctx.needs_input_grad[0]:
            grad_of_x = torch.bmm(grad, weight)  # before the weights move
        transposed = grad.transpose(1, 2)
        weight.baddbmm_(transposed, x, alpha=-ctx.lr)
        if bias is not None:
            bias.sub_(grad.sum(1), alpha=ctx.lr)
        return grad_of_x, None, None, None


def _flatten(x: Tensor, tensors: Tensors, layer: nn.Flatten, forward_pass: Pass) -> Tensor:
    if x.dim() == 4:
        x = unfold(x, forward_pass.jobs)
    return x.flatten(2)


def _convolution(x: Tensor, tensors: Tensors, layer: nn.Conv2d, forward_pass: Pass) -> Tensor:
    """One group of channels for each client."""
    weight = tensors["weight"].flatten(0, 1)
    bias = tensors.get("bias")
    if bias is not None:
        bias = bias.flatten()
    return F.conv2d(
        x,
        weight,
        bias,
        layer.stride,
        cast("str", layer.padding),
        layer.dilation,
        groups=forward_pass.jobs,
    )


def _group_norm(x: Tensor, tensors: Tensors, layer: nn.GroupNorm, forward_pass: Pass) -> Tensor:
    jobs = forward_pass.jobs
    is_image = x.dim() == 4
    if not is_image:
        x = fold(x)
    out = F.group_norm(
        x,
        num_groups=jobs * layer.num_groups,
        weight=tensors["weight"].flatten(),
        bias=tensors["bias"].flatten(),
        eps=layer.eps,
    )
    return out if is_image else unfold(out, jobs)


def _batch_norm(x: Tensor, tensors: Tensors, layer: BatchNorm, forward_pass: Pass) -> Tensor:
    """BatchNorm by the batch's statistics, or by running ones where frozen."""
    is_frozen = forward_pass.is_frozen
    if forward_pass.valid is not None and not is_frozen:
        return _masked_batch_norm(x, tensors, layer, forward_pass.valid)
    mean = tensors["running_mean"]
    var = tensors["running_var"]
    is_image = x.dim() == 4
    if not is_image:
        x = fold(x)
    out = F.batch_norm(
        x,
        mean.flatten() if is_frozen else mean.view(-1),  # views: updated in place
        var.flatten() if is_frozen else var.view(-1),
        weight=tensors["weight"].flatten(),
        bias=tensors["bias"].flatten(),
        training=not is_frozen,
        momentum=cast(float, layer.momentum),
        eps=layer.eps,
    )
    return out if is_image else unfold(out, forward_pass.jobs)


def _masked_batch_norm(x: Tensor, tensors: Tensors, layer: BatchNorm, valid: Tensor) -> Tensor:
    """BatchNorm whose statistics come from real examples only."""
    jobs, batch = valid.shape
    is_image = x.dim() == 4
    if is_image:
        x = unfold(x, jobs)  # [J, B, C, ...]
    channels = x.shape[2]
    pixel_dims = x.dim() - 3
    ones = [1] * pixel_dims
    mask = valid.view(jobs, batch, 1, *ones)
    mask = mask.to(x.dtype)
    num_pixels = x[0, 0, 0].numel()
    num_examples = valid.sum(1).clamp(min=1)
    count = num_examples.to(x.dtype) * num_pixels  # [J]

    summed_dims = (1, *range(3, x.dim()))
    shape = (jobs, 1, channels, *ones)
    mean = (x * mask).sum(summed_dims) / count[:, None]  # [J, C]
    centred = (x - mean.view(shape)) * mask
    var = (centred * centred).sum(summed_dims) / count[:, None]
    with torch.no_grad():
        _update_running_statistics(layer, tensors, mean, var, count)

    scale = tensors["weight"] * torch.rsqrt(var + layer.eps)  # [J, C]
    shift = tensors["bias"]
    normalised = (x - mean.view(shape)) * scale.view(shape)
    out = normalised + shift.view(shape)
    return fold(out) if is_image else out


def _update_running_statistics(
    layer: BatchNorm, tensors: Tensors, mean: Tensor, var: Tensor, count: Tensor
) -> None:
    """Move the running statistics towards those of a batch.

    Args:
        layer: for its momentum.
        tensors: with the running statistics.
        mean: of the batch.  # [J, C]
        var: of the batch, biased.  # [J, C]
        count: of the numbers behind them.  # [J]
    """
    momentum = cast(float, layer.momentum)
    to_unbiased = count / (count - 1).clamp(min=1)
    unbiased = var * to_unbiased[:, None]
    running_mean = tensors["running_mean"]
    running_var = tensors["running_var"]
    running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
    running_var.lerp_(unbiased.detach().to(running_var.dtype), momentum)


_ARITHMETIC: dict[type[nn.Module], Arithmetic] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.Flatten: _flatten,
}
