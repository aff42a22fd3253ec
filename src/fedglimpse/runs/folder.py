"""A run folder: what a run writes while it goes on, and how it survives being killed.

    config.toml       the resolved configuration, enough to repeat the run
    environment.json  what the run uses: code, versions, machine, the user's own code
    rounds.jsonl      one line for each lane and round
    checkpoint.pt     everything needed to continue; see `fedglimpse.storage.checkpoint`
    summary.json      written at the end
    clients.json      only of a run on devices: which device is client 0, 1, ...

`rounds.jsonl` may be ahead of the checkpoint. Resuming cuts it back to the checkpoint, so that
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
from fedglimpse.errors import UserError, require
from fedglimpse.plugins import FAILED_CODE, OWN_CODE, changed_code, own_code
from fedglimpse.runs.provenance import changed_input, earlier_sources, environment, inputs_of
from fedglimpse.storage.checkpoint import Checkpoint, settle
from fedglimpse.storage.lock import SUFFIX as LOCK
from fedglimpse.storage.lock import locked
from fedglimpse.version import VERSION

FREE_TO_CHANGE = ("engine.", "checkpoint.", "log.", "agent.save")  # may differ on resuming
CLIENTS = "clients.json"
ALLOWED_IN_NEW = (".part", LOCK)  # files that do not make a folder somebody else's


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        """Name the files; nothing is read or written."""
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.rounds = path / "rounds.jsonl"
        self.checkpoint = Checkpoint(path)
        self.summary = path / "summary.json"
        self.clients = path / CLIENTS

    def check(self, config: Config, resume: bool) -> None:
        """Raise UserError if the folder holds something else; nothing is changed."""
        if not self.path.exists():
            return
        require(self.path.is_dir(), f"--out {self.path} is a file: name a folder.", key="--out")
        if self.config.exists():
            self._check_same_run(config)
            self.check_code(config)
            require(
                resume,
                f"{self.path} already holds this run: add --resume to continue it, or choose "
                "another --out.",
                key="--resume",
            )
            return
        for file in self.path.iterdir():
            require(
                file.suffix in ALLOWED_IN_NEW,
                f"{self.path} is not empty and holds no run: choose a new or empty folder as "
                "--out.",
                key="--out",
            )

    def check_simulated(self) -> None:
        """Raise UserError if the folder holds a run on devices; nothing is changed."""
        require(
            not self.clients.exists(),
            f"{self.path} holds a run on devices: resume it with its Flower app, or choose another "
            "--out.",
            key="--out",
        )

    def check_code(self, config: Config) -> None:
        """Raise UserError if code or data have changed since the saved rounds were run."""
        saved = (self.summary, self.checkpoint.path, self.checkpoint.coming)
        if not any(path.exists() for path in saved):
            return  # nothing is saved, so the run starts again from round 0
        stored = stored_environment(self.path)
        values = config.flat()
        file = changed_code(stored, values)
        require(
            not file,
            f"{file} has changed since this run began: choose another --out, or restore the file.",
            key="--out",
        )
        key = changed_input(stored, values)
        require(
            not key,
            f"The file or data behind {key}={values.get(key)} has changed since this run began: "
            "choose another --out, or restore it.",
            key=key,
        )
        version = stored.get("fedglimpse", VERSION)
        require(
            version == VERSION or self.summary.exists(),
            f"{self.path} was started with version {version}, but this is {VERSION}: resume it "
            "with that version, or choose another --out.",
            key="--out",
        )

    def allow_code_change(self) -> None:
        """Accept other user code on resuming, because this one failed; its hash stays on record."""
        stored = stored_environment(self.path)
        if OWN_CODE not in stored:
            return
        stored[FAILED_CODE] = stored.pop(OWN_CODE)
        with writing(self.path):
            write_atomically(self.environment, json.dumps(stored, indent=1))

    def open(self, config: Config, resume: bool) -> dict[str, Any] | None:
        """Make the folder ready and return the checkpoint to resume from, if there is one.

        Raises UserError if the folder holds another run, before anything is changed.
        """
        self.check(config, resume)
        with writing(self.path):
            settle([self.checkpoint])
        state = self.checkpoint.read()
        size = 0 if state is None else int(state["bytes"])
        self._check_length(size)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.config.exists():
                write_atomically(self.config, config.to_toml())
            finished = state is not None and self.summary.exists()
            if not finished:
                self._write_environment(config, resumed=state is not None)
            self.rounds.touch()
            os.truncate(self.rounds, size)
        return state

    def _write_environment(self, config: Config, resumed: bool) -> None:
        stored = stored_environment(self.path)
        current = environment() | own_code(config.flat()) | inputs_of(config.flat())
        if FAILED_CODE in stored:
            current[FAILED_CODE] = stored[FAILED_CODE]
        if resumed:
            current |= earlier_sources(stored)
        write_atomically(self.environment, json.dumps(current, indent=1))

    @contextmanager
    def alone(self, wait: float = 0.0) -> Iterator[None]:
        """Lock the folder against other processes; it is created if necessary.

        Args:
            wait: seconds, for a process that is about to end.
        """
        if self.path.exists() and not self.path.is_dir():
            yield  # `open` reports it
            return
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path, "run", wait=wait):
            yield

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Add one line for each record; a number that is not finite becomes null."""
        text = "".join(as_json(record) + "\n" for record in records)
        with writing(self.path), self.rounds.open("a", encoding="utf-8") as file:
            file.write(text)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Write the coming checkpoint, noting how much of rounds.jsonl belongs to it."""
        with writing(self.path), self.rounds.open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())
            self.checkpoint.prepare(state, os.fstat(file.fileno()).st_size)

    def take_over(self) -> None:
        """Replace the checkpoint by the coming one."""
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
        if not self.rounds.exists():
            return []
        content = self.rounds.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        try:
            return [json.loads(line) for line in complete.split(b"\n")[:-1]]
        except ValueError:
            raise UserError(
                f"{self.rounds} is damaged (a line is not JSON): restore it, or choose another "
                "--out.",
                key="--out",
            ) from None

    def _check_same_run(self, config: Config) -> None:
        stored_values = stored_config(self.path).flat()
        values = config.flat()
        for key in {**values, **stored_values}:
            stored = stored_values.get(key)
            value = values.get(key)
            require(
                stored == value or key.startswith(FREE_TO_CHANGE),
                f"{self.path} holds another run, with {key}={_shown(stored)} instead of "
                f"{_shown(value)}: choose another --out, or use the same settings to resume it.",
                key=key,
            )

    def _check_length(self, size: int) -> None:
        """Raise UserError if records of the checkpoint's rounds are missing."""
        actual = self.rounds.stat().st_size if self.rounds.exists() else 0
        require(
            actual >= size,
            f"{self.rounds} is damaged ({actual} bytes instead of at least {size}): restore it, or "
            "delete checkpoint.pt to start this run again from round 0.",
            key="--out",
        )


def as_json(record: Mapping[str, Any]) -> str:
    """Return a record as one line of strict JSON."""
    try:
        return json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def stored_config(path: Path, to_run: bool = True) -> Config:
    """Return the configuration of an existing run folder.

    Args:
        path: the folder.
        to_run: refuse settings that this version no longer runs; otherwise their defaults stand.
    """
    file = path / "config.toml"
    require(
        file.exists(),
        f"{path} holds no run to resume: there is no config.toml in it.",
        key="--out",
    )
    values = read_toml(file)
    require(
        "method" in values,
        f"{file} is damaged (it names no method): restore it, or choose another --out.",
        key="--out",
    )
    return build(values) if to_run else read_stored(values).config


def stored_environment(path: Path) -> dict[str, Any]:
    """Return what environment.json of a run folder holds; empty if it cannot be read."""
    try:
        content = json.loads((path / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file beside `path` and rename it; what UTF-8 cannot hold becomes `?`."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one sentence; files written before stay as they are."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)
        elif "inline_container" in reason:  # torch.save on a full disk
            reason = "the disk seems to be full"
        raise UserError(
            f"Could not write to {path} ({reason}): free some space or fix the permissions, then "
            "rerun the command (run and compare with --resume).",
            key="--out",
        ) from error


def run_identity(config: Mapping[str, Any]) -> str:
    """Return all settings that the results of a run depend on, as one string.

    Args:
        config: every dotted key; keys that older files do not have take their defaults.
    """
    full = {**Config().flat(), **retired.without_defaults(config)}
    relevant = {key: value for key, value in full.items() if affects_results(key, value)}
    return json.dumps(relevant, sort_keys=True)


def affects_results(key: str, value: Any) -> bool:
    """True for keys that results depend on. The name of a preset that only sets values is none."""
    if key == "preset" and value in VALUES_ALONE:
        return False
    return not key.startswith(FREE_TO_CHANGE)
