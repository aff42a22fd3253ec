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
_KNOWN = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.Flatten, *_BATCH_NORMS, *_POOLS, *_POINTWISE)


def chain(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the layers of nested `nn.Sequential`s in order, with their names.

    A layer that is used twice comes twice; a `Sequential` with a way of its own is one layer.
    """
    if type(model) is not nn.Sequential:
        return [(prefix, model)]
    named = model._modules  # named_children leaves repetitions out
    parts = [chain(m, f"{prefix}.{n}" if prefix else n) for n, m in named.items()]
    return [layer for part in parts for layer in part]


def unstackable(model: nn.Module, shape: Sequence[int] | None = None) -> str:
    """Say what cannot be stacked, or return an empty string.

    Args:
        model: whose copies are to be one model.
        shape: of one example; stacked copies are then tried out beside the model itself.
    """
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a model with forward hooks"
    known = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
    for name, layer in chain(model):
        prefix = f"{name}." if name else ""
        if any(prefix + own not in known for own in _tensors_of(layer)):
            return f"{name} ({type(layer).__name__}), whose weights another layer has too"
        odd = (
            type(layer) not in _KNOWN
            or (
                isinstance(layer, nn.Conv2d) and (layer.groups > 1 or layer.padding_mode != "zeros")
            )
            or (isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1))
            or (isinstance(layer, _BATCH_NORMS) and not _plain_batch_norm(layer))
            or (isinstance(layer, nn.GroupNorm) and not layer.affine)
        )
        if odd:
            return f"{name or 'the model'} ({type(layer).__name__})"
    if shape is not None and not _agrees(model, shape):
        return f"these layers on examples of shape {tuple(shape)}"
    return ""


@torch.no_grad()
def _agrees(model: nn.Module, shape: Sequence[int]) -> bool:
    """True where stacked copies score examples as the model itself does, in evaluation mode."""
    device, training = next(model.parameters()).device, model.training
    x = torch.arange(2 * math.prod(shape), device=device).sin().view(2, *shape)
    own = model.eval()(x)
    model.train(training)
    state = {n: torch.stack([v, v]) for n, v in model.state_dict().items()}
    stacked = StackedModel(model)
    try:
        both = stacked.forward(torch.stack([x, x]), state, None, frozen=stacked.names)
    except (RuntimeError, ValueError, IndexError):
        return False
    return both.shape == (2, *own.shape) and bool(
        torch.allclose(both, own.expand_as(both), rtol=1e-2, atol=1e-2 * float(own.abs().max()))
    )


def _plain_batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d) -> bool:
    return layer.affine and layer.track_running_stats and layer.momentum is not None


class StackedModel:
    """Runs J copies of a sequential model, each with its own parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        """Take the structure of `model`; its values are not used."""
        if odd := unstackable(model):
            raise UserError(
                f"engine.trainer=batched cannot stack {odd}: use engine.trainer=serial, or build "
                "the model from nn.Sequential with the layers listed in docs/simulator.md."
            )
        self.layers = chain(model)
        self.names = frozenset(name for name, _ in self.layers)
        self.dense = frozenset(  # may step by themselves
            name
            for name, m in self.layers
            if isinstance(m, nn.Linear) and all(p.requires_grad for p in m.parameters())
        )

    def forward(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        valid: Tensor | None,
        frozen: frozenset[str] = frozenset(),
        learn: Descent | None = None,
    ) -> Tensor:
        """Return logits of every client in training mode; updates BatchNorm buffers in place.

        Args:
            x: inputs.  # [J, B, *shape]
            state: name -> stacked tensors.  # [J, *shape]
            valid: which examples are real; None where all are.  # [J, B] bool
            frozen: layers in evaluation mode: their BatchNorms use and keep running statistics.
            learn: let dense layers take their own gradient step while the gradient passes.

        Returns:
            Logits.  # [J, B, C]
        """
        jobs = x.shape[0]
        if x.dim() == 5:
            x = fold(x)
        for name, layer in self.layers:
            prefix = f"{name}." if name else ""
            own = {k: state[prefix + k] for k in _tensors_of(layer)}
            if learn is not None and name in self.dense and name not in frozen:
                x = _DescendingLinear.apply(
                    x, own["weight"], own.get("bias"), learn.lr, learn.token
                )
            else:
                x = self._apply(layer, own, x, jobs, valid, name in frozen)
        return x

    def _apply(
        self,
        layer: nn.Module,
        own: dict[str, Tensor],
        x: Tensor,
        jobs: int,
        valid: Tensor | None,
        frozen: bool,
    ) -> Tensor:
        if isinstance(layer, nn.Linear):
            return _linear(x, own)
        if isinstance(layer, nn.Conv2d):
            weight, bias = own["weight"].flatten(0, 1), own.get("bias")
            bias = None if bias is None else bias.flatten()
            return F.conv2d(
                x, weight, bias, layer.stride, cast("str", layer.padding), layer.dilation, jobs
            )
        if isinstance(layer, _BATCH_NORMS):
            return _batch_norm(layer, own, x, jobs, valid, frozen)
        if isinstance(layer, nn.GroupNorm):
            folded = x if x.dim() == 4 else fold(x)
            weight, bias = own["weight"].flatten(), own["bias"].flatten()
            out = F.group_norm(folded, jobs * layer.num_groups, weight, bias, layer.eps)
            return out if x.dim() == 4 else unfold(out, jobs)
        if isinstance(layer, nn.Flatten):
            return unfold(x, jobs).flatten(2) if x.dim() == 4 else x.flatten(2)
        return layer(x)


class Descent(NamedTuple):
    """A plain gradient step that layers take by themselves."""

    lr: float
    token: Tensor  # requires a gradient, so that the first layer's backward pass is called too

    @staticmethod
    def at(lr: float) -> Descent:
        """Return a step of size `lr`."""
        return Descent(lr, torch.zeros((), requires_grad=True))


class _DescendingLinear(torch.autograd.Function):
    """A dense layer whose weights step downhill inside the product that gives their gradient.

    Gradients of the weights, as large as the weights of all clients together, are never stored:
    on a CPU the memory they cost is a third of a small model's step.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lr: float, token: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.lr = weight, bias, lr
        return _linear(x, {"weight": weight} if bias is None else {"weight": weight, "bias": bias})

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        below = torch.bmm(grad, ctx.weight) if ctx.needs_input_grad[0] else None
        ctx.weight.baddbmm_(grad.transpose(1, 2), x, alpha=-ctx.lr)
        if ctx.bias is not None:
            ctx.bias.sub_(grad.sum(1), alpha=ctx.lr)
        return below, None, None, None, None


def fold(x: Tensor) -> Tensor:
    """Clients into channels: `[J, B, C, ...]` to `[B, J*C, ...]`."""
    return x.transpose(0, 1).flatten(1, 2)


def unfold(x: Tensor, jobs: int) -> Tensor:
    """Channels back into clients: `[B, J*C, ...]` to `[J, B, C, ...]`."""
    return x.unflatten(1, (jobs, -1)).transpose(0, 1)


def _tensors_of(layer: nn.Module) -> list[str]:
    buffers = [n for n, b in layer.named_buffers() if b.is_floating_point()]
    return [n for n, _ in layer.named_parameters()] + buffers


def _linear(x: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    weight = own["weight"].transpose(1, 2)  # [J, F_in, F_out]
    if "bias" not in own:
        return torch.bmm(x, weight)
    return torch.baddbmm(own["bias"][:, None], x, weight)


def _batch_norm(
    layer: nn.BatchNorm1d | nn.BatchNorm2d,
    own: Mapping[str, Tensor],
    x: Tensor,
    jobs: int,
    valid: Tensor | None,
    frozen: bool,
) -> Tensor:
    if valid is not None and not frozen:
        return _masked_batch_norm(layer, own, x, jobs, valid)
    folded = x if x.dim() == 4 else fold(x)
    mean, var = own["running_mean"], own["running_var"]
    out = F.batch_norm(
        folded,
        mean.flatten() if frozen else mean.view(-1),  # views: updated in place
        var.flatten() if frozen else var.view(-1),
        own["weight"].flatten(),
        own["bias"].flatten(),
        training=not frozen,
        momentum=cast(float, layer.momentum),
        eps=layer.eps,
    )
    return out if x.dim() == 4 else unfold(out, jobs)


def _masked_batch_norm(
    layer: nn.BatchNorm1d | nn.BatchNorm2d,
    own: Mapping[str, Tensor],
    x: Tensor,
    jobs: int,
    valid: Tensor,
) -> Tensor:
    """BatchNorm whose statistics come from real examples only."""
    split = unfold(x, jobs) if x.dim() == 4 else x  # [J, B, C, ...]
    rest = split.dim() - 3
    over = (1, *range(3, split.dim()))
    mask = valid.view(*valid.shape, 1, *[1] * rest).to(split.dtype)
    count = valid.sum(1).clamp(min=1).to(split.dtype) * split[0, 0, 0].numel()  # [J]
    shape = (jobs, 1, split.shape[2], *[1] * rest)
    mean = (split * mask).sum(over) / count[:, None]  # [J, C]
    centred = (split - mean.view(shape)) * mask
    var = (centred * centred).sum(over) / count[:, None]
    with torch.no_grad():
        unbiased = var * (count / (count - 1).clamp(min=1))[:, None]
        momentum = cast(float, layer.momentum)
        own["running_mean"].lerp_(mean.detach().to(own["running_mean"].dtype), momentum)
        own["running_var"].lerp_(unbiased.detach().to(own["running_var"].dtype), momentum)
    scale = (own["weight"] * torch.rsqrt(var + layer.eps)).view(shape)
    out = (split - mean.view(shape)) * scale + own["bias"].view(shape)
    return fold(out) if x.dim() == 4 else out
