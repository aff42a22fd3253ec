"""Run fedglimpse and send it a signal just before its N-th file operation in a folder.

    python signalled.py SIGKILL N FOLDER sweep FILE --out FOLDER ...

What a killed process leaves behind changes only at file operations, so counting these reaches
every moment that matters, and does not depend on how fast the machine is. A process that lives to
its end says how many there were, in the last line on stdout.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def command(name: str, at: int, folder: Path) -> list[str]:
    """Return what takes the place of `python -m fedglimpse`."""
    return [sys.executable, __file__, name, str(at), str(folder)]


def cuts(chance: random.Random, operations: int, number: int = 5) -> list[int]:
    """Draw after how many operations each of some runs, one after the other, is to be cut.

    Together they stay below nine tenths of what a run without a cut needs, and what is cut has to
    be begun again, so that none of them can come to its end before its signal.
    """
    ends = sorted(chance.randrange(1, operations * 9 // 10) for _ in range(number))
    return [max(1, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def main() -> None:
    name, at, folder = sys.argv[1], int(sys.argv[2]), os.path.abspath(sys.argv[3])
    count = 0

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event not in OPERATIONS or not isinstance(arguments[0], str | os.PathLike):
            return
        if os.path.abspath(arguments[0]).startswith(folder):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.Signals[name])

    sys.addaudithook(look)
    from fedglimpse.cli.main import main as fedglimpse

    sys.argv = ["fedglimpse", *sys.argv[4:]]
    try:
        fedglimpse()
    finally:
        print(count)


if __name__ == "__main__":
    main()
