"""Client selection under partial visibility as a Gymnasium environment (extra `[gym]`).

Importing this package registers `fedglimpse/ClientSelection-v0`, also by the name
`gymnasium.make("fedglimpse.env:fedglimpse/ClientSelection-v0")`. `fedglimpse.env.stepper` works
without gymnasium.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fedglimpse.errors import UserError

ID = "fedglimpse/ClientSelection-v0"
_HOMES = {
    "ClientSelection": "single",
    "ClientSelectionVector": "vector",
    "FlatBox": "wrappers",
    "FlatBoxVector": "wrappers",
    "ScalarReward": "wrappers",
    "LanesForSB3": "sb3",
    "SelectorPolicy": "policies",
}
_PACKAGES = {"policies": (), "sb3": ("gymnasium", "stable_baselines3")}

__all__ = ["ID", "register", *_HOMES]


def register() -> None:
    """Tell gymnasium about the environment and its vector form."""
    from gymnasium.envs import registration

    if ID not in registration.registry:
        registration.register(
            id=ID,
            entry_point="fedglimpse.env.single:ClientSelection",
            vector_entry_point="fedglimpse.env.vector:ClientSelectionVector",
        )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedglimpse.env' has no attribute '{name}'")
    for package in _PACKAGES.get(_HOMES[name], ("gymnasium",)):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"fedglimpse.env.{name} needs {package}, which is not installed: "
                "pip install 'fedglimpse[gym]'."
            )
    return getattr(importlib.import_module(f"fedglimpse.env.{_HOMES[name]}"), name)


if importlib.util.find_spec("gymnasium") is not None:
    register()
