"""Many copies of one model as a single model: forward passes of J clients at once.

Dense layers become batched matrix products on `[J, B, F]`; convolutions become grouped ones on
`[B, J*C, H, W]`, where client j owns channels j*C to (j+1)*C; a norm layer sees J*C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.errors import UserError

_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_POINTWISE = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Identity)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_SUPPORTED = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.Flatten, *_BATCH_NORMS, *_POOLS, *_POINTWISE)

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
        layers += chain(layer, f"{prefix}.{name}" if prefix else name)
    return layers


def unstackable(model: nn.Module, shape: Sequence[int] | None = None) -> str:
    """Say what cannot be stacked, or return an empty string.

    Args:
        model: whose copies are to be one model.
        shape: of one example; stacked copies are then compared with the model itself.
    """
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a model with forward hooks"
    state_names = set(dict(model.named_parameters())) | set(dict(model.named_buffers()))
    for name, layer in chain(model):
        prefix = f"{name}." if name else ""
        layer_names = {prefix + key for key in _tensor_names(layer)}
        if not layer_names <= state_names:  # shared tensors are named once, by their first layer
            return f"{name} ({type(layer).__name__}), whose weights another layer has too"
        if not _is_supported(layer):
            return f"{name or 'the model'} ({type(layer).__name__})"
    if shape is not None and not _scores_agree(model, shape):
        return f"these layers on examples of shape {tuple(shape)}"
    return ""


def _is_supported(layer: nn.Module) -> bool:
    """True where `StackedModel` has the arithmetic of a layer with these options."""
    if type(layer) not in _SUPPORTED:
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros"
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    if isinstance(layer, _BATCH_NORMS):
        return layer.affine and layer.track_running_stats and layer.momentum is not None
    if isinstance(layer, nn.GroupNorm):
        return layer.affine
    return True


@torch.no_grad()
def _scores_agree(model: nn.Module, shape: Sequence[int]) -> bool:
    """True where stacked copies score two examples as the model itself does, in evaluation."""
    device = next(model.parameters()).device
    was_training = model.training
    x = torch.arange(2 * math.prod(shape), device=device).sin().view(2, *shape)
    expected = model.eval()(x)  # [2, C]
    model.train(was_training)
    stacked = StackedModel(model)
    state = {name: torch.stack([value, value]) for name, value in model.state_dict().items()}
    try:
        scores = stacked.forward(torch.stack([x, x]), state, None, frozen=stacked.names)
    except (RuntimeError, ValueError, IndexError):
        return False
    if scores.shape != (2, *expected.shape):
        return False
    tolerance = 1e-2 * float(expected.abs().max())
    return torch.allclose(scores, expected.expand_as(scores), rtol=1e-2, atol=tolerance)


class InPlaceStep(NamedTuple):
    """A plain gradient step that dense layers take in their own backward pass."""

    lr: float
    token: Tensor  # requires a gradient, so that the first layer's backward pass is called too

    @staticmethod
    def of_size(lr: float) -> InPlaceStep:
        """Return a step of size `lr`."""
        return InPlaceStep(lr, torch.zeros((), requires_grad=True))


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
        self.layers = chain(model)
        self.names = frozenset(name for name, _ in self.layers)
        self.dense = frozenset(name for name, layer in self.layers if _is_trainable_dense(layer))

    def forward(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        valid: Tensor | None,
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
            x = fold(x)
        for name, layer in self.layers:
            prefix = f"{name}." if name else ""
            tensors = {key: state[prefix + key] for key in _tensor_names(layer)}
            is_frozen = name in frozen
            if dense_step is not None and name in self.dense and not is_frozen:
                x = _SteppingLinear.apply(
                    x, tensors["weight"], tensors.get("bias"), dense_step.lr, dense_step.token
                )
            else:
                x = _apply(layer, tensors, x, jobs, valid, is_frozen)
        return x


def _is_trainable_dense(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and all(p.requires_grad for p in layer.parameters())


def _tensor_names(layer: nn.Module) -> list[str]:
    """Return the names of a layer's parameters and float buffers."""
    names = [name for name, _ in layer.named_parameters()]
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            names.append(name)
    return names


def fold(x: Tensor) -> Tensor:
    """Clients into channels: `[J, B, C, ...]` to `[B, J*C, ...]`."""
    return x.transpose(0, 1).flatten(1, 2)


def unfold(x: Tensor, jobs: int) -> Tensor:
    """Channels back into clients: `[B, J*C, ...]` to `[J, B, C, ...]`."""
    return x.unflatten(1, (jobs, -1)).transpose(0, 1)


def _apply(
    layer: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    jobs: int,
    valid: Tensor | None,
    frozen: bool,
) -> Tensor:
    """Run one layer; images are `[B, J*C, H, W]`, everything else `[J, B, ...]`."""
    if isinstance(layer, nn.Linear):
        return _linear(x, tensors["weight"], tensors.get("bias"))
    if isinstance(layer, nn.Conv2d):
        return _convolution(layer, tensors, x, jobs)
    if isinstance(layer, _BATCH_NORMS):
        if valid is not None and not frozen:
            return _masked_batch_norm(layer, tensors, x, jobs, valid)
        return _batch_norm(layer, tensors, x, jobs, frozen)
    if isinstance(layer, nn.GroupNorm):
        return _group_norm(layer, tensors, x, jobs)
    if isinstance(layer, nn.Flatten):
        return unfold(x, jobs).flatten(2) if x.dim() == 4 else x.flatten(2)
    return layer(x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `[J, B, F_in]` with weights `[J, F_out, F_in]`."""
    transposed = weight.transpose(1, 2)
    if bias is None:
        return torch.bmm(x, transposed)
    return torch.baddbmm(bias[:, None], x, transposed)


class _SteppingLinear(torch.autograd.Function):
    """A dense layer whose weights step downhill inside the product that gives their gradient.

    Gradients of the weights, as large as the weights of all clients together, are never stored:
    on a CPU the memory they cost is a third of a small model's step.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lr: float, token: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.bias = bias
        ctx.lr = lr
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        grad_of_x = None
        if ctx.needs_input_grad[0]:
            grad_of_x = torch.bmm(grad, ctx.weight)  # before the weights move
        ctx.weight.baddbmm_(grad.transpose(1, 2), x, alpha=-ctx.lr)
        if ctx.bias is not None:
            ctx.bias.sub_(grad.sum(1), alpha=ctx.lr)
        return grad_of_x, None, None, None, None


def _convolution(layer: nn.Conv2d, tensors: Mapping[str, Tensor], x: Tensor, jobs: int) -> Tensor:
    """One group of channels for each client."""
    bias = tensors.get("bias")
    return F.conv2d(
        x,
        tensors["weight"].flatten(0, 1),
        None if bias is None else bias.flatten(),
        layer.stride,
        cast("str", layer.padding),
        layer.dilation,
        groups=jobs,
    )


def _group_norm(layer: nn.GroupNorm, tensors: Mapping[str, Tensor], x: Tensor, jobs: int) -> Tensor:
    is_image = x.dim() == 4
    folded = x if is_image else fold(x)
    out = F.group_norm(
        folded,
        jobs * layer.num_groups,
        tensors["weight"].flatten(),
        tensors["bias"].flatten(),
        layer.eps,
    )
    return out if is_image else unfold(out, jobs)


def _batch_norm(
    layer: BatchNorm, tensors: Mapping[str, Tensor], x: Tensor, jobs: int, frozen: bool
) -> Tensor:
    """BatchNorm where every example is real, or by running statistics where frozen."""
    is_image = x.dim() == 4
    folded = x if is_image else fold(x)
    mean = tensors["running_mean"]
    var = tensors["running_var"]
    out = F.batch_norm(
        folded,
        mean.flatten() if frozen else mean.view(-1),  # views: updated in place
        var.flatten() if frozen else var.view(-1),
        tensors["weight"].flatten(),
        tensors["bias"].flatten(),
        training=not frozen,
        momentum=cast(float, layer.momentum),
        eps=layer.eps,
    )
    return out if is_image else unfold(out, jobs)


def _masked_batch_norm(
    layer: BatchNorm, tensors: Mapping[str, Tensor], x: Tensor, jobs: int, valid: Tensor
) -> Tensor:
    """BatchNorm whose statistics come from real examples only."""
    is_image = x.dim() == 4
    split = unfold(x, jobs) if is_image else x  # [J, B, C, ...]
    pixel_dims = split.dim() - 3
    summed_dims = (1, *range(3, split.dim()))
    mask = valid.view(*valid.shape, 1, *[1] * pixel_dims).to(split.dtype)
    pixels = split[0, 0, 0].numel()
    count = valid.sum(1).clamp(min=1).to(split.dtype) * pixels  # [J]

    shape = (jobs, 1, split.shape[2], *[1] * pixel_dims)
    mean = (split * mask).sum(summed_dims) / count[:, None]  # [J, C]
    centred = (split - mean.view(shape)) * mask
    var = (centred * centred).sum(summed_dims) / count[:, None]

    with torch.no_grad():
        unbiased = var * (count / (count - 1).clamp(min=1))[:, None]
        momentum = cast(float, layer.momentum)
        running_mean = tensors["running_mean"]
        running_var = tensors["running_var"]
        running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        running_var.lerp_(unbiased.detach().to(running_var.dtype), momentum)

    scale = (tensors["weight"] * torch.rsqrt(var + layer.eps)).view(shape)
    out = (split - mean.view(shape)) * scale + tensors["bias"].view(shape)
    return fold(out) if is_image else out
