"""The checkpoint of a run, and how runs that are played together keep to the same round.

A checkpoint is replaced in one step, so that there is a whole one at every moment. Runs of one
pack do it in two: first each writes its coming checkpoint beside the one it has, then all take
theirs over. A process that is killed in between leaves every run with a checkpoint of the same
round, and `settle` finds it: all go on in the same company as if nothing had happened.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedglimpse.errors import UserError
from fedglimpse.version import VERSION

FORMAT = 4  # raised when an old one can no longer be read
NAME, COMING = "checkpoint.pt", "checkpoint.coming.pt"


class Checkpoint:
    """The files of one run's checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Name the files; nothing is touched."""
        self.path, self.coming = folder / NAME, folder / COMING
        self._readable = False  # one that this process wrote could be read back

    def prepare(self, state: Mapping[str, Any], size: int) -> None:
        """Write the coming checkpoint.

        Args:
            state: tensors and plain values; `round` says how many rounds were played.
            size: bytes of rounds.jsonl that belong to it.
        """
        part = self.coming.with_suffix(".part")
        try:
            with part.open("wb") as file:
                torch.save({**state, "format": FORMAT, "version": VERSION, "bytes": size}, file)
                file.flush()
                os.fsync(file.fileno())
            self._check_readable(part)
            part.replace(self.coming)
        finally:
            part.unlink(missing_ok=True)

    def take_over(self) -> None:
        """Let the coming checkpoint replace the one there is."""
        self.coming.replace(self.path)

    def remove(self) -> None:
        """Delete both, if they are there."""
        self.path.unlink(missing_ok=True)
        self.coming.unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        """Return what was saved last, or None where nothing was."""
        if not self.path.exists():
            return None
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            found = state["format"]
        except Exception as error:
            raise UserError(
                f"{self.path} cannot be read ({type(error).__name__}): delete it to start "
                "this run again from round 0."
            ) from None
        if found != FORMAT:
            raise UserError(
                f"{self.path} has format {found} (version {state.get('version')}), but this "
                f"is version {VERSION} with format {FORMAT}: resume with that version or delete it."
            )
        return dict(state)

    def rounds(self) -> set[int]:
        """Return the rounds that the run could go on from."""
        here = self.read()
        found = {0 if here is None else int(here.get("round", 0))}
        with suppress(Exception):  # it is not there, or was damaged: then it does not count
            found.add(int(torch.load(self.coming, map_location="cpu", weights_only=True)["round"]))
        return found

    def _check_readable(self, path: Path) -> None:
        """Raise UserError, once and early, for a state that could be written but not read."""
        if self._readable:
            return
        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            what = str(error).splitlines()[0]
            raise UserError(
                f"The state of method or selector cannot be read back from {self.path} "
                f"({what}): let state_dict() return tensors and plain values only."
            ) from None
        self._readable = True


def settle(pack: Sequence[Checkpoint]) -> None:
    """Let runs that were cut while they saved go on from the last round that all of them have."""
    if not any(checkpoint.coming.exists() for checkpoint in pack):
        return
    rounds = [checkpoint.rounds() for checkpoint in pack]
    common = max(set.intersection(*rounds), default=-1)
    for checkpoint, found in zip(pack, rounds, strict=True):
        if len(found) == 2 and common == max(found):
            checkpoint.take_over()
        checkpoint.coming.unlink(missing_ok=True)
