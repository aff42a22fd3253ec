"""Where the command begins: what must hold before torch is imported, which takes a second."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from fedglimpse.version import VERSION

STOPPED = "Stopped.\n"
CTRL_C = 130  # the exit code that shells know it by
SIMILAR = {"−": "-", "–": "-", "±": "+-", "≤": "<=", "≥": ">="}  # a lost sign would mislead


def main() -> None:
    """Run the command line; the version is told without waiting for it."""
    show_what_can_be_shown()
    if sys.argv[1:] == ["--version"]:
        print(f"fedglimpse {VERSION}")
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # it may be ignored, as under nohup
        signal.signal(signal.SIGINT, stop_at_once)
    from fedglimpse.cli.main import main as run_command_line

    signal.signal(signal.SIGINT, before)
    try:
        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write(STOPPED)
        sys.exit(CTRL_C)


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """End the process on Ctrl-C; while it imports there is nothing to clean up.

    A KeyboardInterrupt would not do: NumPy and torch catch it in the middle of their imports, and
    end in errors of their own.
    """
    with suppress(OSError):
        os.write(2, STOPPED.encode())
    os._exit(CTRL_C)


def show_what_can_be_shown() -> None:
    """Print something similar, or ?, for a character that the terminal's encoding does not have."""
    codecs.register_error("similar", similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # there may be none, or one of a caller's
            stream.reconfigure(errors="similar")


def similar(error: UnicodeError) -> tuple[str, int]:
    """Return what stands for characters that cannot be encoded, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(SIMILAR.get(character, "?") for character in text), error.end
