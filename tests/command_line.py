"""The command `fedglimpse` inside the test's own process, which saves importing torch again."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from fedglimpse.cli.main import main


@dataclass(frozen=True)
class Finished:
    """What a command left behind, as `subprocess.CompletedProcess` names it."""

    returncode: int
    stdout: str
    stderr: str


def fedglimpse(*words: str, cwd: Path | None = None) -> Finished:
    """Run the command in a folder; modules there are read from their files, as a process would."""
    folder = (cwd or Path.cwd()).resolve()
    forget_modules_of(folder)
    stdout = io.StringIO()
    stderr = io.StringIO()
    returncode = 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        mock.patch.object(sys, "argv", ["fedglimpse", *words]),
        mock.patch.object(sys, "dont_write_bytecode", True),  # a test may rewrite its modules
    ):
        try:
            main()
        except SystemExit as ended:
            returncode = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:  # Python would print its traceback
            traceback.print_exc()
            returncode = 1
    forget_modules_of(folder)
    return Finished(returncode, stdout.getvalue(), stderr.getvalue())


def forget_modules_of(folder: Path) -> None:
    """Let the next import of a module in this folder read its file again."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().parent == folder:
            del sys.modules[name]
    importlib.invalidate_caches()
