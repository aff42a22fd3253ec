"""What a configuration may not say, in sentences a user can act on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, nearest
from fedglimpse.federation.visibility import Overlapping

CHOICES: dict[str, tuple[str, ...]] = {
    "data.partition": ("dirichlet", "label_skew", "iid", "subject"),
    "data.proxy_source": ("heldout", "leaky_train"),
    "model.norm": ("batch", "group"),
    "visibility.kind": ("mobile", "cyclic", "overlapping", "random", "markov", "trace", "full"),
    "local.optimizer": ("sgd", "adam"),
    "aggregate.source": ("raw", "smoothed"),
    "sketch.kind": ("gaussian", "count"),
    "sketch.parameters": ("head", "all"),
    "sketch.scale": ("sqrt", "mean"),
    "reward.metric": ("f1", "accuracy"),
    "engine.precision": ("fp32", "tf32", "bf16"),
    "engine.trainer": ("auto", "serial", "batched", "graphed"),
}

AT_LEAST: dict[str, int] = {
    "rounds": 1,
    "selection.k": 1,
    "data.clients": 0,
    "data.classes_per_client": 1,
    "data.min_size": 1,
    "data.samples": 0,
    "data.proxy": -1,
    "visibility.cluster_size": 1,
    "visibility.overlap": 0,
    "visibility.min_visible": 1,
    "local.batch_size": 2,
    "local.epochs": 1,
    "aggregate.window": 1,
    "sketch.size": 1,
    "evaluate.every": 1,
    "checkpoint.every": 1,
    "checkpoint.keep_models": 0,
}

AT_MOST: dict[str, int] = {"data.clients": 10**9}

Rule = tuple[str, Callable[[float], bool], str]
NUMBERS: Sequence[Rule] = (
    ("data.alpha", lambda v: v > 0, "greater than 0, such as 0.1"),
    ("visibility.p", lambda v: 0 < v <= 1, "in (0, 1], such as 0.1"),
    ("visibility.p_on", lambda v: 0 < v <= 1, "in (0, 1], such as 0.05"),
    ("visibility.p_off", lambda v: 0 <= v <= 1, "in [0, 1], such as 0.45"),
    ("visibility.round_seconds", lambda v: v > 0, "greater than 0, such as 600"),
    ("local.lr", lambda v: v > 0, "greater than 0, such as 0.01"),
    ("local.momentum", lambda v: 0 <= v < 1, "in [0, 1), such as 0.9"),
    ("local.weight_decay", lambda v: v >= 0, "0 or more, such as 0.0001"),
    ("local.proximal_mu", lambda v: v >= 0, "0 or more, such as 0.01"),
    ("reward.smoothing", lambda v: 0 < v <= 1, "in (0, 1], such as 0.95"),
)


def check(config: Config) -> None:
    """Raise UserError for the first value that cannot work; touches nothing."""
    flat = config.flat()
    for name, allowed in CHOICES.items():
        if flat[name] not in allowed:
            hint = nearest(str(flat[name]), allowed)
            raise UserError(f"{name}={flat[name]!r} is unknown.{hint} Use {', '.join(allowed)}.")
    for name, least in AT_LEAST.items():
        if flat[name] < least:
            raise UserError(f"{name}={flat[name]} is too small: use {least} or more.")
    for name, largest in AT_MOST.items():
        if flat[name] > largest:
            raise UserError(f"{name}={flat[name]} is too large: use {largest} or less.")
    for name, fine, wanted in NUMBERS:
        if not math.isfinite(flat[name]) or not fine(flat[name]):
            raise UserError(f"{name}={flat[name]} must be a finite number {wanted}.")
    most = config.engine.max_jobs
    if most != "auto" and (isinstance(most, str) or most < 1):
        raise UserError(
            f"engine.max_jobs={most} is not a number of clients: use auto, or 1 or more."
        )
    if config.local.momentum and config.local.optimizer == "adam":
        raise UserError(
            f"local.momentum={config.local.momentum} has no effect with local.optimizer=adam: "
            "leave it out, or use local.optimizer=sgd."
        )
    for name in ("visibility.trace", "visibility.trace_devices"):
        if flat[name] and config.visibility.kind != "trace":
            raise UserError(
                f"{name}={flat[name]} has no effect with visibility.kind={config.visibility.kind}: "
                "add visibility.kind=trace, or leave it out."
            )
    if not config.seeds:
        raise UserError("seeds=[] is empty: give at least one seed, such as seeds=[0].")
    if len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"seeds={list(config.seeds)} repeats a seed: give each one once.")
    if config.data.clients == 0 and config.data.partition != "subject":
        raise UserError(
            f"data.clients=0 needs data.partition=subject, but it is {config.data.partition}: "
            "give the number of clients, such as data.clients=100."
        )
    if config.data.clients:
        check_counts(config, config.data.clients)


def check_counts(config: Config, num_clients: int) -> None:
    """Check what depends on N, the number of clients."""
    if config.selection.k > num_clients:
        raise UserError(
            f"selection.k={config.selection.k} is more than the {num_clients} clients there are: "
            f"use at most {num_clients}."
        )
    clustered = config.visibility.kind in ("mobile", "cyclic", "overlapping")
    if clustered and config.visibility.cluster_size > num_clients:
        raise UserError(
            f"visibility.cluster_size={config.visibility.cluster_size} is more than the "
            f"{num_clients} clients there are: use at most {num_clients}."
        )
    most = num_clients
    if clustered:
        overlap = config.visibility.overlap if config.visibility.kind == "overlapping" else 0
        most = Overlapping(num_clients, config.visibility.cluster_size, overlap).largest
    if config.visibility.min_visible > most:
        raise UserError(
            f"visibility.min_visible={config.visibility.min_visible} can never be met, since at "
            f"most {most} clients are visible: use at most {most}."
        )


def pick_device(name: str) -> torch.device:
    """Return the device of `engine.device`, or raise UserError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"engine.device={name!r} is unknown: use auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"engine.device={name} but PyTorch sees no GPU here: use cpu or auto.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"engine.device={name} but there are {torch.cuda.device_count()} GPUs: use cuda:0."
        )
    return device
