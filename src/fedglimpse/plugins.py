"""Finding a user's own code by `package.module:name`, and telling its errors from ours."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError

_OURS = __name__.partition(".")[0]
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_users: set[str] = set()  # top packages of what users named


def load_callable(name: str, key: str) -> Callable[..., Any]:
    """Import `package.module:name`, looking in the working directory too.

    What is returned raises UserError where it cannot be called so, or where its own code fails.

    Args:
        name: what the user wrote.
        key: the configuration key it was written for, to name in errors.
    """
    module_name, _, attribute = name.partition(":")
    found = getattr(_import(module_name, f"{key}={name}"), attribute, None)
    if not callable(found):
        raise UserError(
            f"{key}={name}: {module_name} has no function '{attribute}'; write it as "
            "package.module:function."
        )
    _users.add(module_name.partition(".")[0])
    return _guarded(found, f"{key}={name}")


def users_fault(error: BaseException) -> str | None:
    """Return what a user's own code raised and where; None for an error that is not theirs.

    The innermost frame decides, but for those of other libraries, which either may have called.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == _OURS:
            return None
        if package in _users:
            return _sentence(error, frame.f_code.co_filename, line)
    return None


def _import(module_name: str, asked: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        if module_name.startswith("."):
            raise ValueError("a name that begins with a dot")
        return importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        if not _within(error):
            raise UserError(
                f"{asked} cannot be imported ({error}): run from the folder that holds it, or "
                "install it."
            ) from None
        raise UserError(f"{asked} cannot be imported: {_told(error)}; mend it.") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{asked} cannot be imported: {_told(error)}; mend it.") from None
    finally:
        sys.path.remove(here)


def _guarded(found: Callable[..., Any], asked: str) -> Callable[..., Any]:
    @functools.wraps(found, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(found, asked, args, kwargs)
        try:
            return found(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            fault = users_fault(error)
            if fault is None:
                raise
            raise UserError(f"{asked} failed: {fault}; mend it.") from None

    return call


def _check_arguments(
    found: Callable[..., Any], asked: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some built-in callables do not tell theirs
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(a).__name__ for a in args), *kwargs]) or "no arguments"
        raise UserError(
            f"{asked} takes {signature}, but is called with {given} ({error}): change what it "
            "takes."
        ) from None


def _within(error: BaseException) -> list[tuple[str, int]]:
    """Return the places in modules that were being imported, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [(f.filename, f.lineno or 0) for f in frames if not f.filename.startswith("<frozen")]
    return [place for place in found if place[0] not in (__file__, importlib.__file__)]


def _told(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return _sentence(error, error.filename, error.lineno or 0, error.msg)
    places = _within(error)
    own = [place for place in places if not place[0].startswith(_LIBRARIES)]
    places = own or places
    return _sentence(error, *places[-1]) if places else _sentence(error, "", 0)


def _sentence(error: BaseException, file: str, line: int, text: str | None = None) -> str:
    said = " ".join((str(error) if text is None else text).split()).rstrip(".")
    place = f" ({Path(file).name}:{line})" if file else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{place}"
