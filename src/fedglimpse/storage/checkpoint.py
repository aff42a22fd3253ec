"""The checkpoint of a run, and how runs that share a world keep to the same round.

A checkpoint is replaced in one step, so there is a complete one at every moment. Runs of one pack
do it in two: first each writes its coming checkpoint beside the current one, then all replace
theirs. A process that is killed in between leaves every run with a checkpoint of the same round,
which `settle` finds: all resume together as if nothing had happened. Either step is on the disk
before the next begins, so a power loss does no more harm than a kill.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedglimpse.errors import UserError, require
from fedglimpse.storage import store
from fedglimpse.version import VERSION

FORMAT = 4  # raised when older checkpoints can no longer be read
NAME = "checkpoint.pt"
COMING = "checkpoint.coming.pt"
RESTART = "delete it to start this run again from round 0"


class Checkpoint:
    """The files of one run's checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Name the files; nothing is read or written."""
        self.path = folder / NAME
        self.coming = folder / COMING
        self._was_readable = False  # a state that this process wrote could be read back

    def save(self, state: Mapping[str, Any], mark: Mapping[str, Any]) -> None:
        """Replace the checkpoint of a run that shares its world with no other.

        Args:
            state: tensors and plain values; `round` is the number of finished rounds.
            mark: how much of rounds.jsonl belongs to it, see `store.GrowingFile`.
        """
        self._write({**state, **mark}, self.path)

    def prepare(self, state: Mapping[str, Any], mark: Mapping[str, Any]) -> None:
        """Write the coming checkpoint; arguments as of `save`."""
        self._write({**state, **mark}, self.coming)

    def take_over(self) -> None:
        """Replace the current checkpoint by the coming one."""
        self.coming.replace(self.path)
        store.sync_folder(self.path.parent)

    def remove(self) -> None:
        """Delete both, if they exist."""
        store.remove(self.path.parent, (NAME, COMING))

    def read(self) -> dict[str, Any] | None:
        """Return the state that was saved last, or None if there is none."""
        if not self.path.exists():
            return None
        try:
            state = dict(_load(self.path))
            stored_format = state["format"]
            if int(state["bytes"]) < 0:
                raise ValueError
        except UserError:
            raise
        except Exception as error:
            raise store.damage(self.path, type(error).__name__, RESTART, "--resume") from None
        require(
            stored_format == FORMAT,
            f"{self.path} has format {stored_format} (version {state.get('version')}), but this is "
            f"version {VERSION} with format {FORMAT}: resume with that version, or delete it to "
            "start this run again from round 0.",
            key="--resume",
        )
        return state

    def rounds(self) -> set[int]:
        """Return the rounds that the run could resume from."""
        current = self.read()
        rounds = {0 if current is None else int(current.get("round", 0))}
        with suppress(Exception):  # a coming checkpoint that is missing or damaged does not count
            rounds.add(int(_load(self.coming)["round"]))
        return rounds

    def _write(self, state: Mapping[str, Any], path: Path) -> None:
        buffer = io.BytesIO()
        torch.save({**state, "format": FORMAT, "version": VERSION}, buffer)
        content = buffer.getbuffer()
        self._check_readable(content)
        temporary = self.path.with_suffix(store.TEMPORARY)
        try:
            store.write_unnamed(temporary, content, store.seal(content))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        store.sync_folder(path.parent)

    def _check_readable(self, content: memoryview) -> None:
        """Raise UserError, once and early, for a state that could be written but not read."""
        if self._was_readable:
            return
        try:
            _unpack(content)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"The state of method or selector cannot be read back from {self.path} "
                f"({reason}): let state_dict() return tensors and plain values only.",
                key="method",
            ) from None
        self._was_readable = True


def _load(path: Path) -> Any:
    return _unpack(store.unsealed(path, RESTART, "--resume"))


def _unpack(content: memoryview) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def settle(pack: Sequence[Checkpoint]) -> None:
    """Let runs that were killed while they saved resume from the last round that all of them have.

    The coming checkpoints are taken over or deleted.
    """
    if not any(checkpoint.coming.exists() for checkpoint in pack):
        return
    rounds_of_run = [checkpoint.rounds() for checkpoint in pack]
    common_round = max(set.intersection(*rounds_of_run), default=-1)
    for checkpoint, rounds in zip(pack, rounds_of_run, strict=True):
        if len(rounds) == 2 and common_round == max(rounds):
            checkpoint.take_over()
        checkpoint.coming.unlink(missing_ok=True)
