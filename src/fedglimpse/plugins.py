"""A user's own code, named by `package.module:name`: importing it and explaining its errors.

Also which file a plug-in is made of, so that a run is not resumed with changed code; and
`ImportedOnUse`, for modules of others that are slow to import.
"""

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


# Settings that can name a plug-in.
KEYS = ("method", "model.name", "data.name", "data.partition", "visibility.kind")
OWN_CODE = "own_code"  # entry of environment.json
FAILED_CODE = "own_code_that_failed"  # likewise, of code that was fixed later

ENDS = (SystemExit, GeneratorExit)  # what ends a process and is no error

_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_user_packages: set[str] = set()  # top packages of the plug-ins that were loaded
_loaded: dict[str, tuple[object, Code]] = {}  # module -> its spec, and its code at that time


class ImportedOnUse:
    """Stands for a module that is slow to import, and imports it when something of it is used."""

    def __init__(self, name: str) -> None:
        """Name the module."""
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # found at once the next time
        return value


class UntrustedCode(UserError):
    """Stored results name a user's module, which reading them does not import."""


_imports_are_refused = False


@contextmanager
def importing_no_own_code(refused: bool = True) -> Iterator[None]:
    """Let `load_callable` refuse to import anything: the results that are read may be anybody's.

    Args:
        refused: False changes nothing.
    """
    global _imports_are_refused
    before = _imports_are_refused
    _imports_are_refused = before or refused
    try:
        yield
    finally:
        _imports_are_refused = before


def load_callable(name: str, key: str) -> Callable[..., Any]:
    """Import `package.module:name`, looking in the working directory too.

    The result raises UserError where its arguments do not fit, or where the user's code fails.

    Args:
        name: what the user wrote.
        key: the setting that has this value, to name in errors.
    """
    module_name, _, attribute = name.partition(":")
    if _imports_are_refused:
        raise UntrustedCode(
            f"{key}={name} is code of whoever made these results, which is not imported to read "
            "them: if you trust it, add --trust.",
            key=key,
        )
    module = _import(module_name, name, key)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(
            f"{key}={name}: {module_name} has no function '{attribute}'; write it as "
            "package.module:function.",
            key=key,
        )
    _user_packages.add(_top_package(module_name))
    code_of(name)  # remember the file as it was imported: it may change later
    return _explaining_errors(function, name, key)


def code_of(name: str) -> Code | None:
    """Return the file that `package.module:name` is made of; None where it has none.

    For a module that was imported, it is the file as it was at that time. Only the packages that
    hold the module are imported.
    """
    module_name = name.partition(":")[0]
    module = sys.modules.get(module_name)
    if module is None and _imports_are_refused:
        return None  # to find a module imports the packages that hold it
    if module is None:
        with _working_directory_first(), suppress(Exception):  # `load_callable` reports errors
            spec = importlib.util.find_spec(module_name)
            return _code_in(spec.origin if spec else None)
        return None
    spec = getattr(module, "__spec__", None)  # another object when the module is imported again
    if module_name not in _loaded or _loaded[module_name][0] is not spec:
        code = _code_in(getattr(module, "__file__", None))
        if code is None:
            return None
        _loaded[module_name] = (spec, code)
    return _loaded[module_name][1]


def own_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of environment.json on plug-ins: module -> hash of its file.

    Args:
        config: every dotted key; without plug-ins there is no entry.
    """
    hashes = {module: code.sha256 for module, code in _codes(config)}
    return {OWN_CODE: hashes} if hashes else {}


def changed_code(stored: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of a plug-in's file that has changed since a run began; empty if none has.

    Args:
        stored: environment.json of the run; without an entry of code, nothing has changed.
        config: every dotted key of the run.
    """
    hashes = stored.get(OWN_CODE)
    if not isinstance(hashes, Mapping):
        return ""
    for module, code in _codes(config):
        if hashes.get(module, code.sha256) != code.sha256:
            return code.file
    return ""


def _codes(config: Mapping[str, Any]) -> Iterator[tuple[str, Code]]:
    """Yield the plug-ins of a configuration, as module and file, where they can be found."""
    for key in KEYS:
        name = str(config.get(key, ""))
        code = code_of(name) if ":" in name else None
        if code is not None:
            yield name.partition(":")[0], code


def _code_in(file: str | None) -> Code | None:
    if file is None or not Path(file).is_file():
        return None
    return Code(Path(file).name, hashlib.sha256(Path(file).read_bytes()).hexdigest())


@contextmanager
def _working_directory_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def not_ended_by_own_code() -> Iterator[None]:
    """Turn `sys.exit` in a user's code into a UserError: a run that it ended has no result."""
    try:
        yield
    except ENDS as error:
        fault = users_fault(error)
        if fault is None:
            raise
        raise UserError(
            f"Your own code ended the run: {fault}; let it raise an error instead."
        ) from None


def has_values(tensor: Any) -> bool:
    """Say whether a tensor is an ordinary one: neither sparse nor on the device "meta"."""
    return not tensor.is_meta and str(tensor.layout) == "torch.strided"


def users_fault(error: BaseException) -> str | None:
    """Return what a user's own code raised and where; None for an error that is not theirs.

    Theirs is also an error inside this package when their code calls it, such as a helper with a
    wrong argument: the innermost frame of theirs is named. But a script that calls this package,
    and is not called by it, is not at fault for errors inside the package.
    """
    outermost_first = list(traceback.walk_tb(error.__traceback__))
    frames = [frame for frame, _ in outermost_first]
    for i in reversed(range(len(frames))):
        if _package_of(frames[i]) in _user_packages:
            raised_inside_ours = any(_package_of(frame) == _PACKAGE for frame in frames[i + 1 :])
            called_by_ours = any(_package_of(frame) == _PACKAGE for frame in frames[:i])
            if raised_inside_ours and not called_by_ours:
                return None
            line = outermost_first[i][1]
            return _sentence(error, frames[i].f_code.co_filename, line)
    return None


def _package_of(frame: FrameType) -> str:
    return _top_package(str(frame.f_globals.get("__name__", "")))


def _top_package(module_name: str) -> str:
    return module_name.partition(".")[0]


def _import(module_name: str, name: str, key: str) -> Any:
    try:
        if module_name.startswith("."):
            raise ValueError("a name that begins with a dot")
        with _working_directory_first():
            return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        problem = f"{key}={name} cannot be imported"
        not_found = isinstance(error, ModuleNotFoundError | ValueError)
        if not_found and not _locations_of_import(error):
            problem += f" ({error}): run from the folder that holds it, or install it."
        else:
            problem += f": {_import_error(error)}; fix it."
    raise UserError(problem, key=key)


def _explaining_errors(function: Callable[..., Any], name: str, key: str) -> Callable[..., Any]:
    """Return a user's function, raising UserError where it cannot be called or fails."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(function, args, kwargs, name, key)
        try:
            return function(*args, **kwargs)
        except UserError:
            raise
        except (Exception, *ENDS) as error:
            fault = users_fault(error)
            if fault is None:
                raise
            raise UserError(f"{key}={name} failed: {fault}; fix it.", key=key) from None

    return call


def _check_arguments(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    key: str,
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        types = [type(argument).__name__ for argument in args]
        arguments = ", ".join([*types, *kwargs]) or "no arguments"
        raise UserError(
            f"{key}={name} takes {signature}, but is called with {arguments} ({error}): change its "
            "parameters.",
            key=key,
        ) from None


def _locations_of_import(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line in every module that was being imported, outermost first."""
    locations: list[tuple[str, int]] = []
    for frame in traceback.extract_tb(error.__traceback__):
        machinery = frame.filename in (__file__, importlib.__file__)
        if not machinery and not frame.filename.startswith("<frozen"):
            locations.append((frame.filename, frame.lineno or 0))
    return locations


def _import_error(error: BaseException) -> str:
    """Return what went wrong in an import and where, in the user's own files if possible."""
    if isinstance(error, SyntaxError) and error.filename:
        return _sentence(error, error.filename, error.lineno or 0, error.msg)
    locations = _locations_of_import(error)
    outside_libraries = [
        location for location in locations if not location[0].startswith(_LIBRARIES)
    ]
    file, line = (outside_libraries or locations or [("", 0)])[-1]
    return _sentence(error, file, line)


def _sentence(error: BaseException, file: str, line: int, message: str | None = None) -> str:
    text = type(error).__name__
    words = (str(error) if message is None else message).split()
    if words:
        text += ": " + " ".join(words).rstrip(".")
    if file:
        text += f" ({Path(file).name}:{line})"
    return text
