"""Where the command begins, and how it imports torch: late, because that is slow.

`--version`, help, `fedglimpse methods` and every mistake in what was typed are answered without
torch. A command imports it inside `importing()` once nothing is wrong with its words.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from fedglimpse.version import VERSION

STOPPED = "Stopped.\n"
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C
SIMILAR = {"−": "-", "–": "-", "±": "+-", "≤": "<=", "≥": ">="}  # a lost sign would mislead


def main() -> None:
    """Run the command line; --version answers without importing anything else."""
    replace_unencodable_characters()
    if sys.argv[1:] == ["--version"]:
        print(f"fedglimpse {VERSION}")
        return
    with importing():
        from fedglimpse.cli.main import main as run_command_line
    try:
        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write(STOPPED)
        sys.exit(INTERRUPTED)


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once while the block imports something slow.

    A KeyboardInterrupt would not do: NumPy and torch catch it in the middle of their imports and
    fail with errors of their own.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if previous_handler is signal.default_int_handler:  # it may be ignored, as under nohup
        signal.signal(signal.SIGINT, stop_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """End the process with one word; there is nothing to clean up."""
    with suppress(OSError):
        os.write(2, STOPPED.encode())
    os._exit(INTERRUPTED)


def replace_unencodable_characters() -> None:
    """Let output show a similar character, or ?, for one that its encoding does not have."""
    codecs.register_error("similar", similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may be None, or replaced by a caller
            stream.reconfigure(errors="similar")


def similar(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of unencodable characters, and the position after them.

    This is the protocol of `codecs.register_error`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    replacement = "".join(SIMILAR.get(character, "?") for character in text)
    return replacement, error.end
