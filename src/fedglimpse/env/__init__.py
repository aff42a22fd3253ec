"""Client selection under partial visibility as a Gymnasium environment (extra `[gym]`).

Importing this package registers `fedglimpse/ClientSelection-v0`, also by the name
`gymnasium.make("fedglimpse.env:fedglimpse/ClientSelection-v0")`. Begin with `single`, the
environment; `vector` is many of them trained in one call, `wrappers` and `sb3` fit them to agents,
`policies` drives them by the library's own selectors. All are built on `stepper`, which runs rounds
of the simulator and, like `settings` and `arrays`, works without gymnasium. The room may import
`runs`, `simulation`, `methods`, `agent` and what they stand on; nothing in the library imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fedglimpse.errors import UserError

ID = "fedglimpse/ClientSelection-v0"
_MODULES = {  # public name -> module that defines it, imported at first use
    "ClientSelection": "single",
    "ClientSelectionVector": "vector",
    "FlatBox": "wrappers",
    "FlatBoxVector": "wrappers",
    "ScalarReward": "wrappers",
    "LanesForSB3": "sb3",
    "SelectorPolicy": "policies",
}
_PACKAGES = {  # module -> what has to be installed for it
    "single": ("gymnasium",),
    "vector": ("gymnasium",),
    "wrappers": ("gymnasium",),
    "sb3": ("gymnasium", "stable_baselines3"),
    "policies": (),
}

__all__ = ["ID", "register", *_MODULES]


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
    if name not in _MODULES:
        raise AttributeError(f"module 'fedglimpse.env' has no attribute '{name}'")
    module = _MODULES[name]
    for package in _PACKAGES[module]:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"fedglimpse.env.{name} needs {package}, which is not installed: "
                "pip install 'fedglimpse[gym]'."
            )
    return getattr(importlib.import_module(f"fedglimpse.env.{module}"), name)


if importlib.util.find_spec("gymnasium") is not None:
    register()
