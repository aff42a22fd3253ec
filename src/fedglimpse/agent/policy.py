"""A trained policy as an artefact: what travels from one run to another.

A policy is the online network with its settings. It holds no replay store and no optimizer state,
so it is small and says nothing about single rounds.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedglimpse.agent.config import ARCHITECTURE, AgentConfig, AgentSizes
from fedglimpse.errors import UserError
from fedglimpse.storage import store

_TABLE = "identity.weight"
_AUXILIARY = "histogram_head."
# Settings that were removed, with the only values whose policies still fit.
_RETIRED = {"encoder": "attention", "history_input": "models"}


def pack(weights: dict[str, Tensor], config: AgentConfig, sizes: AgentSizes) -> dict[str, Any]:
    """Describe a policy with tensors and plain values only.

    Args:
        weights: of the online network, by name.
        config: what it was built with.
        sizes: the other numbers it was built with.
    """
    return {
        "agent": asdict(config),
        "sketch_dim": sizes.sketch_dim,
        "num_classes": sizes.num_classes,
        "known_ids": sizes.num_clients,
        "network": weights,
    }


def check_fit(policy: dict[str, Any], config: AgentConfig, sizes: AgentSizes) -> None:
    """Raise UserError where the policy does not fit an agent built from `config` and `sizes`."""
    settings = {**asdict(AgentConfig()), **_RETIRED, **policy["agent"]}  # older ones lack keys
    for key, only_value in _RETIRED.items():
        _check_same(f"agent.{key}", settings[key], only_value)
    for key in ARCHITECTURE:
        _check_same(f"agent.{key}", settings[key], getattr(config, key))
    _check_same("sketch.size", policy["sketch_dim"], sizes.sketch_dim)
    classes = policy["num_classes"]
    if config.q_output == "per_class" and classes != sizes.num_classes:
        raise UserError(
            f"The policy has a Q for each of {classes} classes, this run has "
            f"{sizes.num_classes}: load another policy."
        )


def check_lessons(policy: dict[str, Any], config: AgentConfig) -> None:
    """Raise UserError where an agent would continue to learn from rewards of another kind."""
    reward = policy["agent"].get("reward", AgentConfig.reward)  # older policies lack the key
    _check_same("agent.reward", reward, config.reward)


def check_sketch(policy: dict[str, Any], sketch: Mapping[str, Any]) -> None:
    """Raise UserError where a policy has learnt from other sketches; older ones do not say."""
    for key, value in policy.get("sketch", {}).items():
        _check_same(f"sketch.{key}", value, sketch[key])


def _check_same(key: str, of_policy: Any, of_run: Any) -> None:
    if of_policy != of_run:
        raise UserError(
            f"The policy was trained with {key}={of_policy}, this run has {key}={of_run}: "
            f"set {key}={of_policy} or load another policy.",
            key=key,
        )


def fitted(policy: dict[str, Any], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a policy's weights in the sizes of a new network.

    Clients that the policy does not know keep their fresh identities, and the auxiliary head, which
    only helps training, is taken over where both have one of the same size.

    Args:
        policy: as `pack` made it, perhaps by an older version.
        fresh: first weights of the network that takes it over.
    """
    weights: dict[str, Tensor] = {}
    for name, fresh_weight in fresh.items():
        saved = policy["network"].get(name)
        if name == _TABLE:
            table = fresh_weight.clone()
            shared_rows = min(len(table), len(saved))
            table[:shared_rows] = saved[:shared_rows]
            weights[name] = table
        elif name.startswith(_AUXILIARY) and (saved is None or saved.shape != fresh_weight.shape):
            weights[name] = fresh_weight
        else:
            weights[name] = saved
    return weights


def read_policy(path: str) -> dict[str, Any]:
    """Read a policy that `agent.save` wrote."""
    try:
        content = store.unsealed(Path(path), "give another copy of it", "agent.load")
        policy = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not {"agent", "network", "known_ids"} <= policy.keys():
            raise KeyError
    except UserError:
        raise
    except FileNotFoundError:
        of_seeds = sorted(Path(path).parent.glob(f"{Path(path).stem}-*{Path(path).suffix}"))
        hint = "a run with agent.save=FILE writes one"
        if of_seeds:
            hint = f"there is {of_seeds[0]}, of one of several seeds"
        raise UserError(f"agent.load={path}: there is no such file; {hint}.") from None
    except Exception as error:
        raise UserError(
            f"agent.load={path} is not a policy ({type(error).__name__}): give a file that "
            "agent.save wrote."
        ) from None
    return dict(policy)


def check_use(save: str, load: str, method: str, selector: object) -> None:
    """Raise UserError for a method without policies, or a path that cannot be written."""
    for key, path in (("save", save), ("load", load)):
        if path and not hasattr(selector, "policy"):
            raise UserError(
                f"agent.{key}={path}, but method={method} learns no policy: use method=glimpse or "
                f"leave agent.{key} out."
            )
    if save:
        check_place(save)


def check_place(path: str, key: str = "agent.save") -> None:
    """Raise UserError where a policy could not be written, before anything is learnt."""
    target = Path(path).absolute()
    existing = next(folder for folder in target.parents if folder.exists())
    if target.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"{key}={path} cannot be written: name a file in a folder where you may write."
        )


def write_policy(policy: dict[str, Any], path: str, seed: int = 0, seeds: int = 1) -> Path:
    """Write a policy; where a run has several seeds, each file name ends in its seed."""
    target = Path(path)
    if seeds > 1:
        target = target.with_name(f"{target.stem}-{seed}{target.suffix}")
    buffer = io.BytesIO()
    torch.save(policy, buffer)
    content = buffer.getbuffer()
    try:
        store.make_folder(target.parent)
        store.write(target, content, store.seal(content))
    except OSError as error:
        raise UserError(f"The policy {path} cannot be written ({error}): name another.") from None
    return target
