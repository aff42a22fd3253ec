"""Client models: plain `nn.Sequential`, so that the copies of many clients can be stacked.

The networks are those of the paper's release: convolution, ReLU and then normalisation, and two
dense layers without an activation between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from fedglimpse.errors import UserError, nearest, require
from fedglimpse.federation.state import Entry, Layout
from fedglimpse.plugins import has_values, load_callable, users_fault

Norm = Literal["batch", "group"]
Shape = tuple[int, ...]
_GROUPS = 8


def cifar_cnn(norm: Norm = "batch", num_classes: int = 10) -> nn.Sequential:
    """Six 3x3 convolutions and two dense layers for 3x32x32 images; 552,362 floats of state."""
    return nn.Sequential(
        *_conv(3, 32, norm),
        *_conv(32, 32, norm),
        nn.MaxPool2d(2),
        *_conv(32, 64, norm),
        *_conv(64, 64, norm),
        nn.MaxPool2d(2),
        *_conv(64, 128, norm),
        *_conv(128, 128, norm),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.Linear(128, num_classes),
    )


def fashion_cnn(norm: Norm = "batch", num_classes: int = 10) -> nn.Sequential:
    """Two 3x3 convolutions and two dense layers for 1x28x28 images; 315,530 floats of state."""
    return nn.Sequential(
        *_conv(1, 32, norm),
        nn.MaxPool2d(2),
        *_conv(32, 64, norm, padding=0),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2304, 128),
        nn.Linear(128, num_classes),
    )


def har_mlp(norm: Norm = "batch", num_classes: int = 6) -> nn.Sequential:
    """Three dense layers for 561 features of motion sensors; 179,078 floats of state."""
    return nn.Sequential(
        *_dense(561, 256, norm), *_dense(256, 128, norm), nn.Linear(128, num_classes)
    )


def digits_mlp(norm: Norm = "batch", num_classes: int = 10) -> nn.Sequential:
    """Two dense layers for 8x8 digits: small enough for tests and first steps."""
    return nn.Sequential(nn.Flatten(), *_dense(64, 64, norm), nn.Linear(64, num_classes))


def synthetic_mlp(features: int, num_classes: int, norm: Norm = "batch") -> nn.Sequential:
    """Two dense layers for flat features of any number."""
    return nn.Sequential(nn.Flatten(), *_dense(features, 32, norm), nn.Linear(32, num_classes))


_NETWORKS: dict[str, Callable[[Norm, int], nn.Sequential]] = {
    "cifar10": cifar_cnn,
    "fashion": fashion_cnn,
    "har": har_mlp,
    "hapt": har_mlp,
    "digits": digits_mlp,
}
MODELS = (*_NETWORKS, "synthetic")


def build_model(name: str, norm: Norm, input_shape: Shape, num_classes: int) -> nn.Module:
    """Build the model of a dataset, or a user's own, and check that it takes the data.

    Weights come from torch's default generator: call within `rng.isolated`.

    Args:
        name: a dataset of `MODELS`, or "pkg.mod:factory", a callable without arguments.
        norm: "batch" or "group"; a user's own model has its own.
        input_shape: of one example, without the batch.
        num_classes: C.

    Raises:
        UserError: for an unknown name, or a model that does not fit the data.
    """
    model: nn.Module
    if ":" in name:
        model = _load(name)
    elif name == "synthetic":
        model = synthetic_mlp(math.prod(input_shape), num_classes, norm)
    elif name in _NETWORKS:
        model = _NETWORKS[name](norm, num_classes)
    else:
        raise UserError(
            f"Model '{name}' is unknown.{nearest(name, MODELS)} Known: {', '.join(MODELS)}, "
            "or your own as 'pkg.mod:factory'.",
            key="model.name",
        )
    _check_fit(name, model, input_shape, num_classes)
    return model


def head_entries(layout: Layout) -> tuple[Entry, ...]:
    """Return the model's head: the dense layers after the last convolution.

    A model without convolutions is all head; one that ends in a convolution has that as its head.
    """
    convolutions = [entry for entry in layout.params if len(entry.shape) > 2]
    if not convolutions:
        return layout.params
    last = convolutions[-1]
    following = [entry for entry in layout.params if entry.start >= last.stop]
    head_layers = {_layer_of(entry) for entry in following if len(entry.shape) == 2}
    if not head_layers:
        head_layers = {_layer_of(last)}
    return tuple(entry for entry in (last, *following) if _layer_of(entry) in head_layers)


def _layer_of(entry: Entry) -> str:
    """Return the name of the layer that a tensor belongs to."""
    return entry.name.rpartition(".")[0]


def _norm(norm: Norm, width: int, conv: bool) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(math.gcd(_GROUPS, width), width)
    return nn.BatchNorm2d(width) if conv else nn.BatchNorm1d(width)


def _conv(inputs: int, width: int, norm: Norm, padding: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, 3, padding=padding), nn.ReLU(), _norm(norm, width, True)]


def _dense(inputs: int, width: int, norm: Norm) -> list[nn.Module]:
    return [nn.Linear(inputs, width), nn.ReLU(), _norm(norm, width, False)]


def _load(name: str) -> nn.Module:
    """Call the user's factory "pkg.mod:factory"."""
    factory = load_callable(name, "model.name")
    model = factory()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"Model '{name}' returned {type(model).__name__}, not a torch nn.Module: return the "
            "model.",
            key="model.name",
        )
    require(
        any(parameter.requires_grad for parameter in model.parameters()),
        f"Model '{name}' has no parameters to train: give it a layer such as nn.Linear.",
        key="model.name",
    )
    for entry, tensor in model.state_dict().items():
        require(
            has_values(tensor),
            f"Model '{name}' has {entry} that is sparse or on the device 'meta': build it of "
            "ordinary tensors.",
            key="model.name",
        )
        require(
            bool(tensor.isfinite().all()),
            f"Model '{name}' begins with numbers in {entry} that are not finite: initialise it "
            "with others.",
            key="model.name",
        )
    return model


def _check_fit(name: str, model: nn.Module, input_shape: Shape, num_classes: int) -> None:
    """Raise UserError unless one example of the data gives one score for each class."""
    was_training = model.training
    try:
        with torch.enable_grad():
            scores = model.eval()(torch.zeros(1, *input_shape))
    except Exception as error:
        fault = users_fault(error)
        if fault is None and not isinstance(error, RuntimeError | ValueError):
            raise
        reason = fault or " ".join(str(error).splitlines()[:1])
        raise UserError(
            f"Model '{name}' does not take examples of shape {input_shape}: {reason}",
            key="model.name",
        ) from None
    model.train(was_training)
    require(
        isinstance(scores, torch.Tensor),
        f"Model '{name}' gives a {type(scores).__name__}, not a tensor of scores: return the "
        f"scores of {num_classes} classes alone.",
        key="model.name",
    )
    shape = tuple(scores.shape)
    require(
        shape == (1, num_classes),
        f"Model '{name}' gives scores of shape {shape[1:]} for {num_classes} classes: end it with "
        f"a layer of width {num_classes}.",
        key="model.name",
    )
    require(
        scores.requires_grad,
        f"Model '{name}' gives scores without a gradient: leave out torch.no_grad() and detach() "
        "in forward().",
        key="model.name",
    )
