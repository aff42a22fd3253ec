"""Run fedglimpse and send it a signal just before its N-th file operation in a folder.

    python signalled.py SIGKILL N FOLDER sweep FILE --out FOLDER ...

The files that a killed process leaves behind change only at file operations, so counting these
reaches every moment that matters on any machine. A process that is not killed prints how many
there were, in the last line on stdout.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def command(name: str, operation: int, folder: Path) -> list[str]:
    """Return the words that replace `python -m fedglimpse`."""
    return [sys.executable, __file__, name, str(operation), str(folder)]


def cuts(generator: random.Random, operations: int, number: int = 5) -> list[int]:
    """Draw after how many operations each of several consecutive processes is killed.

    Together they stay below nine tenths of the operations of an undisturbed run, and interrupted
    work has to be repeated, so no process can finish before its signal.
    """
    ends = sorted(generator.randrange(1, operations * 9 // 10) for _ in range(number))
    return [max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def main() -> None:
    name = sys.argv[1]
    last_operation = int(sys.argv[2])
    folder = os.path.abspath(sys.argv[3])
    count = 0

    def count_operation(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event not in OPERATIONS or not isinstance(arguments[0], str | os.PathLike):
            return
        if os.path.abspath(arguments[0]).startswith(folder):
            count += 1
            if count == last_operation:
                os.kill(os.getpid(), signal.Signals[name])

    sys.addaudithook(count_operation)
    from fedglimpse.cli.main import main as fedglimpse

    sys.argv = ["fedglimpse", *sys.argv[4:]]
    try:
        fedglimpse()
    finally:
        print(count)


if __name__ == "__main__":
    main()
