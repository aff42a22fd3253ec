"""A run that Ctrl-C and termination signals end after a whole round."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from fedglimpse.config.schema import Config
from fedglimpse.runs.experiment import Result, Stopped, run
from fedglimpse.runs.progress import Listener


def run_with_signals(
    config: Config, out: Path, resume: bool, told: Listener, again: Sequence[str]
) -> Result:
    """Run, ending after the current round on Ctrl-C or a termination signal.

    `again` are the words of the command that goes on then.
    """
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before: dict[int, Any] = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        should_stop: Callable[[], bool] = lambda: bool(asked)  # noqa: E731
        return run(config, out, resume=resume, listener=told, should_stop=should_stop)
    except (Stopped, KeyboardInterrupt):
        typer.echo(f"Stopped. Continue with: fedglimpse {shlex.join(again)}", err=True)
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
