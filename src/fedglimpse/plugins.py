"""Finding a user's own code by `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError


def load_callable(name: str, key: str) -> Callable[..., Any]:
    """Import `package.module:name`, looking in the working directory too.

    Args:
        name: what the user wrote.
        key: the configuration key it was written for, to name in errors.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        raise UserError(
            f"{key}={name} cannot be imported ({error}): run from the folder that holds it, or "
            "install it."
        ) from None
    finally:
        sys.path.remove(here)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UserError(
            f"{key}={name}: {module_name} has no function '{attribute}'; write it as "
            "package.module:function."
        )
    return found
