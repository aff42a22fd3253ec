"""`fedglimpse run --profile`: a trace of a few rounds, for the viewers of PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from fedglimpse.errors import UserError
from fedglimpse.runs.progress import Listener

FILE = "trace.json"  # in the run folder; open it in Perfetto or chrome://tracing
_SKIPPED, _WARM_UP, _RECORDED = 1, 1, 3  # rounds


class Profiled:
    """Passes everything on to another listener and records the third to fifth round."""

    def __init__(self, inner: Listener, folder: Path, rounds: int) -> None:
        """Get ready to write `trace.json` into `folder`.

        Raises:
            UserError: for a run too short to be worth a trace.
        """
        least = _SKIPPED + _WARM_UP + 1
        if rounds < least:
            raise UserError(
                f"rounds={rounds} is too short for --profile, which skips two rounds to warm up: "
                f"use rounds={least + _RECORDED - 1} or more."
            )
        self.inner, self.path = inner, folder / FILE
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recorded = min(_RECORDED, rounds - _SKIPPED - _WARM_UP)
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=_SKIPPED, warmup=_WARM_UP, active=recorded, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(self.path)),
        )

    def begin(self, name: str, done: int, total: int) -> None:
        """Start the profiler."""
        self.inner.begin(name, done, total)
        self.profiler.start()

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Go to the profiler's next step."""
        self.inner.round(records)
        self.profiler.step()

    def end(self) -> None:
        """Stop the profiler; it has written its trace when the last recorded round was over."""
        self.profiler.stop()
        self.inner.end()
