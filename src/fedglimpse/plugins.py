"""Finding a user's own code by `package.module:name`, and telling its errors from ours."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from fedglimpse.errors import UserError


class Code(NamedTuple):
    """The file of a user's module."""

    file: str  # its name, without the folder
    sha256: str


MAY_BE_OWN = ("method", "model.name", "data.name")  # keys that can name code of the user's
OWN_CODE = "own_code"  # entry of environment.json
FAILED_CODE = "own_code_that_failed"  # likewise, of what was mended later
_OURS = __name__.partition(".")[0]
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_users: set[str] = set()  # top packages of what users named
_loaded: dict[str, tuple[object, Code]] = {}  # module -> its spec, and its code as it was then


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
    code_of(name)  # remember what was imported, whatever becomes of the file
    return _guarded(found, f"{key}={name}")


def code_of(name: str) -> Code | None:
    """Return what `package.module:name` is made of; None where it has no file of its own.

    Of a module that was imported, it is the file as it was first seen since. Nothing is imported,
    but for the packages it is in.
    """
    module_name = name.partition(":")[0]
    module = sys.modules.get(module_name)
    if module is None:
        with _here(), suppress(Exception):  # whoever needs the module says what is wrong with it
            found = importlib.util.find_spec(module_name)
            return _code(found.origin if found else None)
        return None
    spec = getattr(module, "__spec__", None)  # another one when it is imported again
    if module_name not in _loaded or _loaded[module_name][0] is not spec:
        code = _code(getattr(module, "__file__", None))
        if code is None:
            return None
        _loaded[module_name] = (spec, code)
    return _loaded[module_name][1]


def own_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of environment.json on the user's own code: module -> hash of its file.

    Args:
        config: every dotted key; without code of the user's there is no entry.
    """
    found = {module: code.sha256 for module, code in _codes(config)}
    return {OWN_CODE: found} if found else {}


def _codes(config: Mapping[str, Any]) -> Iterator[tuple[str, Code]]:
    """Yield the user's modules that a configuration names, where they can be found."""
    for name in (str(config.get(key, "")) for key in MAY_BE_OWN):
        code = code_of(name) if ":" in name else None
        if code is not None:
            yield name.partition(":")[0], code


def changed_code(there: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return which of the user's own files is not what it was, or nothing.

    Args:
        there: environment.json of a run; from before there were entries of code, all is as it was.
        config: every dotted key of the run.
    """
    known = there.get(OWN_CODE)
    if not isinstance(known, Mapping):
        return ""
    codes = _codes(config)
    return next((c.file for module, c in codes if known.get(module, c.sha256) != c.sha256), "")


def _code(file: str | None) -> Code | None:
    if file is None or not Path(file).is_file():
        return None
    return Code(Path(file).name, hashlib.sha256(Path(file).read_bytes()).hexdigest())


@contextmanager
def _here() -> Iterator[None]:
    """Look for modules in the working directory first."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def users_fault(error: BaseException) -> str | None:
    """Return what a user's own code raised and where; None for an error that is not theirs.

    Theirs is also what fails in ours when their code calls it, such as a helper that was given
    something else: the innermost frame of theirs is named. But a script that calls us, and is not
    called by us, has no part in what fails in ours.
    """
    walked = reversed(list(traceback.walk_tb(error.__traceback__)))
    frames = [(frame, line, _package(frame)) for frame, line in walked]
    for i, (frame, line, package) in enumerate(frames):
        if package in _users:
            inside = any(inner == _OURS for _, _, inner in frames[:i])
            called_by_us = any(outer == _OURS for _, _, outer in frames[i + 1 :])
            if inside and not called_by_us:
                return None
            return _sentence(error, frame.f_code.co_filename, line)
    return None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _import(module_name: str, asked: str) -> Any:
    try:
        if module_name.startswith("."):
            raise ValueError("a name that begins with a dot")
        with _here():
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
