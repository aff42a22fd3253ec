"""A run folder: what is written while a run goes on, and how it survives being killed.

    config.toml       resolved, enough to repeat the run
    environment.json  what it is played with: code, versions, machine, the user's own code
    rounds.jsonl      one line for each lane and round
    checkpoint.pt     everything needed to continue; see `fedglimpse.storage.checkpoint`
    summary.json      written at the end
    clients.json      only of a run on devices: who is client 0, 1, ...

`rounds.jsonl` may run ahead of the checkpoint. Resuming cuts it back to the checkpoint, so that
each round appears once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedglimpse.config import retired
from fedglimpse.config.loading import build, read_stored, read_toml
from fedglimpse.config.presets import VALUES_ALONE
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.plugins import FAILED_CODE, OWN_CODE, changed_code, own_code
from fedglimpse.runs.provenance import changed_input, earlier_sources, environment, inputs_of
from fedglimpse.storage.checkpoint import Checkpoint, settle
from fedglimpse.storage.lock import SUFFIX as LOCK
from fedglimpse.storage.lock import locked
from fedglimpse.version import VERSION

FREE_TO_CHANGE = ("engine.", "checkpoint.", "log.", "agent.save")  # may differ on resuming
CLIENTS = "clients.json"  # who is client 0, 1, ...; only a run on devices has it
OURS = (".part", LOCK)  # files that may lie in a new folder


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is touched."""
        self.path = path
        self.rounds, self.checkpoint = path / "rounds.jsonl", Checkpoint(path)
        self.config, self.summary = path / "config.toml", path / "summary.json"
        self.environment, self.clients = path / "environment.json", path / CLIENTS

    def check(self, config: Config, resume: bool) -> None:
        """Raise UserError where the folder holds something else; nothing is changed."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file: name a folder.")
        if self.config.exists():
            self._check_same(config)
            self.check_code(config)
            if not resume:
                raise UserError(
                    f"{self.path} already holds this run: add --resume to continue it, or name "
                    "another --out."
                )
        elif self.path.exists() and any(p.suffix not in OURS for p in self.path.iterdir()):
            raise UserError(f"{self.path} holds other files: name a new or empty folder as --out.")

    def check_simulated(self) -> None:
        """Raise UserError where the folder holds a run on devices; nothing is changed."""
        if self.clients.exists():
            raise UserError(
                f"{self.path} holds a run on devices: continue it with its Flower app, or name "
                "another --out."
            )

    def check_code(self, config: Config) -> None:
        """Raise UserError where code or data are not what the rounds there were played with."""
        saved = (self.summary, self.checkpoint.path, self.checkpoint.coming)
        if any(path.exists() for path in saved):  # else the run begins again
            there = stored_environment(self.path)
            if file := changed_code(there, config.flat()):
                raise UserError(
                    f"{file} has changed since this run began: name another --out, or bring the "
                    "file back as it was."
                )
            if key := changed_input(there, config.flat()):
                raise UserError(
                    f"{key} leads to something else than when this run began: name another --out, "
                    "or bring it back as it was."
                )
            begun = there.get("fedglimpse", VERSION)
            if begun != VERSION and not self.summary.exists():
                raise UserError(
                    f"{self.path} was begun by version {begun} and this is {VERSION}: continue it "
                    "with that version, or name another --out."
                )

    def let_mend(self) -> None:
        """Let the user's own code be changed, since it failed; what it was stays on record."""
        there = stored_environment(self.path)
        if OWN_CODE in there:
            there[FAILED_CODE] = there.pop(OWN_CODE)
            with writing(self.path):
                write_atomically(self.environment, json.dumps(there, indent=1))

    def open(self, config: Config, resume: bool) -> dict[str, Any] | None:
        """Make the folder ready; returns the checkpoint to continue from, if there is one.

        Raises UserError where the folder holds another run, before anything is changed.
        """
        self.check(config, resume)
        with writing(self.path):
            settle([self.checkpoint])
        state = self.checkpoint.read()
        self._check_whole(state["bytes"] if state else 0)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.config.exists():
                write_atomically(self.config, config.to_toml())
            if state is None or not self.summary.exists():  # else there is nothing left to play
                there = stored_environment(self.path)
                found = environment() | own_code(config.flat()) | inputs_of(config.flat())
                found |= {FAILED_CODE: there[FAILED_CODE]} if FAILED_CODE in there else {}
                found |= earlier_sources(there) if state is not None else {}
                write_atomically(self.environment, json.dumps(found, indent=1))
            self.rounds.touch()
            os.truncate(self.rounds, state["bytes"] if state else 0)
        return state

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes out of the folder, which is made if there is none."""
        if self.path.exists() and not self.path.is_dir():
            yield  # `open` says so
            return
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path, "run"):
            yield

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Add one line for each record; a number that is not finite is null, as JSON has it."""
        text = "".join(as_json(record) + "\n" for record in records)
        with writing(self.path), self.rounds.open("a", encoding="utf-8") as file:
            file.write(text)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Write the coming checkpoint, marking how much of rounds.jsonl belongs to it."""
        with writing(self.path), self.rounds.open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())
            self.checkpoint.prepare(state, os.fstat(file.fileno()).st_size)

    def take_over(self) -> None:
        """Let the coming checkpoint replace the one there is."""
        with writing(self.path):
            self.checkpoint.take_over()

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        self.prepare(state)
        self.take_over()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        with writing(self.path):
            write_atomically(self.summary, json.dumps(summary, indent=1))

    def read(self) -> list[dict[str, Any]]:
        """Return all complete records; a line cut short by a crash is left out."""
        content = self.rounds.read_bytes() if self.rounds.exists() else b""
        lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise UserError(
                f"{self.rounds} is damaged (a line is not JSON): bring it back, or name another "
                "--out."
            ) from None

    def _check_same(self, config: Config) -> None:
        there, asked = stored_config(self.path).flat(), config.flat()
        for name in {**asked, **there}:
            old, new = there.get(name), asked.get(name)
            if not name.startswith(FREE_TO_CHANGE) and old != new:
                raise UserError(
                    f"{self.path} holds another run ({name}={_said(old)}, asked for {_said(new)}): "
                    "name another --out, or repeat its settings to resume it."
                )

    def _check_whole(self, wanted: int) -> None:
        """Raise UserError where rounds that the checkpoint knows of are gone."""
        size = self.rounds.stat().st_size if self.rounds.exists() else 0
        if size < wanted:
            raise UserError(
                f"{self.rounds} has {size} bytes, but {wanted} were written up to the checkpoint: "
                "bring the file back, or delete checkpoint.pt to start this run again from round 0."
            )


def as_json(record: Mapping[str, Any]) -> str:
    """Return a record as one line that every reader of JSON takes."""
    try:
        return json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(some) for key, some in value.items()}
    return [_finite(some) for some in value] if isinstance(value, list | tuple) else value


def stored_config(path: Path, to_run: bool = True) -> Config:
    """Return the configuration of an existing run folder.

    Args:
        path: the folder.
        to_run: refuse settings that this version no longer runs; otherwise their defaults stand.
    """
    if not (path / "config.toml").exists():
        raise UserError(f"{path} holds no run to resume: there is no config.toml in it.")
    values = read_toml(path / "config.toml")
    if "method" not in values:
        raise UserError(
            f"{path / 'config.toml'} names no method, so it is not what a run wrote: bring it "
            "back, or name another --out."
        )
    return build(values) if to_run else read_stored(values).config


def stored_environment(path: Path) -> dict[str, Any]:
    """Return what environment.json of a run folder holds; nothing where it cannot be read."""
    try:
        found = json.loads((path / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _said(value: object) -> str:
    """Return a setting as a sentence has it."""
    return "nothing" if value is None else repr(value)


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file beside `path` and rename it; a name that is no text has ? in it."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one sentence; what was written before stays."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        if "inline_container" in str(reason):  # what torch.save says of a full disk
            reason = "the disk seems to be full"
        raise UserError(
            f"Could not write to {path} ({reason}): make room or mend access, then give the "
            "command again, run and compare with --resume."
        ) from error


def run_identity(config: Mapping[str, Any]) -> str:
    """Return everything that the results of a run depend on, as one string.

    Args:
        config: every dotted key; one that was not there yet when it was stored has its default.
    """
    full = {**Config().flat(), **retired.without_defaults(config)}
    return json.dumps({k: v for k, v in full.items() if matters(k, v)}, sort_keys=True)


def matters(key: str, value: Any) -> bool:
    """True where results depend on a key; they do not on a preset that only stands for values."""
    return not (key.startswith(FREE_TO_CHANGE) or (key == "preset" and value in VALUES_ALONE))
