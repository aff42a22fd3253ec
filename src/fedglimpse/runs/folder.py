"""A run folder: what a run writes while it goes on, and how it survives being killed.

    config.toml       the resolved configuration, enough to repeat the run
    environment.json  what the run uses: code, versions, machine, the user's own code
    rounds.jsonl      one line for each lane and round
    checkpoint.pt     everything needed to continue; see `fedglimpse.storage.checkpoint`
    summary.json      written at the end
    clients.json      only of a run on devices: which device is client 0, 1, ...
    manifest.json     checksums of the files that no longer change; see `fedglimpse.storage.store`

`rounds.jsonl` may be ahead of the checkpoint. Resuming cuts it back to the checkpoint, so that
each round appears once. The checkpoint holds the checksum of the lines that belong to it, and
another of itself.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedglimpse.config import retired
from fedglimpse.config.loading import build, read_stored, read_toml
from fedglimpse.config.presets import VALUES_ALONE
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, require
from fedglimpse.plugins import FAILED_CODE, OWN_CODE, changed_code, own_code
from fedglimpse.runs.provenance import (
    changed_input,
    draws_of,
    earlier_sources,
    environment,
    inputs_of,
)
from fedglimpse.storage import store
from fedglimpse.storage.checkpoint import Checkpoint, settle
from fedglimpse.storage.lock import SUFFIX as LOCK
from fedglimpse.storage.lock import locked
from fedglimpse.version import DRAWS, VERSION

FREE_TO_CHANGE = ("engine.", "checkpoint.", "log.", "agent.save")  # may differ on resuming
CLIENTS = "clients.json"
CHOOSE_ANOTHER = f"{store.RESTORE}, or choose another --out"
ALLOWED_IN_NEW = (store.TEMPORARY, LOCK)  # files that do not make a folder somebody else's


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        """Name the files; nothing is read or written."""
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.rounds = path / "rounds.jsonl"
        self.records = store.GrowingFile(self.rounds)
        self.checkpoint = Checkpoint(path)
        self.summary = path / "summary.json"
        self.clients = path / CLIENTS

    def check(self, config: Config, resume: bool) -> None:
        """Raise UserError if the folder holds something else; nothing is changed."""
        if not self.path.exists():
            return
        require(self.path.is_dir(), f"--out {self.path} is a file: name a folder.", key="--out")
        if self.has_begun:
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
                self._is_leftover(file),
                f"{self.path} is not empty and holds no run: choose a new or empty folder as "
                "--out.",
                key="--out",
            )

    def _is_leftover(self, file: Path) -> bool:
        """Say whether a file may be what a run left that ended before its folder was ready."""
        if file in (self.config, self.rounds):
            return file.stat().st_size == 0
        is_ours = file in (self.environment, self.path / store.MANIFEST)
        return is_ours or file.suffix in ALLOWED_IN_NEW

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
        if not self.summary.exists():
            check_draws(self.path, "resume it with the code that began it, or choose another --out")
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
            store.commit(self.path, {self.environment.name: _as_bytes(stored)})

    def open(self, config: Config, resume: bool) -> dict[str, Any] | None:
        """Make the folder ready and return the checkpoint to resume from, if there is one.

        Raises UserError if the folder holds another run, before anything is changed.
        """
        self.check(config, resume)
        with writing(self.path):
            settle([self.checkpoint])
        state = self.checkpoint.read()
        with writing(self.path):
            store.make_folder(self.path)
            self.records.open({"bytes": 0} if state is None else state)
            if state is None or not self.summary.exists():
                self._begin(config, resumed=state is not None)
        return state

    def _begin(self, config: Config, resumed: bool) -> None:
        """Write what is known before the first round; it is on the disk before the first record."""
        contents: dict[str, bytes] = {}
        if not self.has_begun:
            contents[self.config.name] = config.to_toml().encode(errors="replace")
        contents[self.environment.name] = _as_bytes(self._environment(config, resumed))
        store.commit(
            self.path,
            contents,
            cover=[self.config.name] if self.has_begun else [],
            forget=[self.rounds.name, self.summary.name],
        )

    def _environment(self, config: Config, resumed: bool) -> dict[str, Any]:
        stored = stored_environment(self.path)
        current = environment() | own_code(config.flat()) | inputs_of(config.flat())
        if FAILED_CODE in stored:
            current[FAILED_CODE] = stored[FAILED_CODE]
        if resumed:
            current |= earlier_sources(stored)
        return current

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
            store.make_folder(self.path)
        with locked(self.path, "run", wait=wait):
            yield

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Add one line for each record; a number that is not finite becomes null."""
        text = "".join(as_json(record) + "\n" for record in records)
        with writing(self.path):
            self.records.append(text.encode())

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Write the coming checkpoint, noting how much of rounds.jsonl belongs to it."""
        with writing(self.path):
            self.checkpoint.prepare(state, self.records.mark())

    def take_over(self) -> None:
        """Replace the checkpoint by the coming one."""
        with writing(self.path):
            self.checkpoint.take_over()

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint of a run that shares its world with no other."""
        with writing(self.path):
            self.checkpoint.save(state, self.records.mark())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary; from now on the records no longer change."""
        with writing(self.path):
            contents = {self.summary.name: _as_bytes(summary)}
            store.commit(self.path, contents, cover=[self.rounds.name])

    def read(self) -> list[dict[str, Any]]:
        """Return all complete records; a line cut short by a crash is left out."""
        if not self.rounds.exists():
            return []
        content = self.rounds.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        try:
            return [json.loads(line) for line in complete.split(b"\n")[:-1]]
        except ValueError:
            raise store.damage(self.rounds, "a line is not JSON", key="--out") from None

    @property
    def has_begun(self) -> bool:
        """True where a run is in the folder; an empty configuration without results is none."""
        if not self.config.exists():
            return False
        saved = (self.summary, self.checkpoint.path, self.checkpoint.coming)
        return self.config.stat().st_size > 0 or any(path.exists() for path in saved)

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
    values = stored_values(path)
    return build(values) if to_run else read_stored(values).config


def stored_values(path: Path) -> dict[str, Any]:
    """Return the dotted keys in the config.toml of a run folder."""
    file = path / "config.toml"
    store.check(file, CHOOSE_ANOTHER, "--out")
    values = read_toml(file)
    if "method" not in values:
        raise store.damage(file, "it names no method", CHOOSE_ANOTHER, "--out")
    return values


def stored_environment(path: Path) -> dict[str, Any]:
    """Return what environment.json of a run folder holds; empty if it holds nothing."""
    file = path / "environment.json"
    fix = f"{store.RESTORE}, or delete it to go on without knowing which code ran so far"
    try:
        content = json.loads(store.read(file, fix, "--out"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file that no manifest covers; what UTF-8 cannot hold becomes `?`."""
    store.write(path, text.encode(errors="replace"))


def _as_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


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


def check_draws(path: Path, otherwise: str) -> None:
    """Raise UserError if this code would not give a run's clients the same data and choices.

    Args:
        path: the run folder.
        otherwise: what the user can do instead.
    """
    draws = draws_of(stored_environment(path))
    require(
        draws == DRAWS,
        f"{path} was run with version {draws} of the random draws, and this code has version "
        f"{DRAWS}: {otherwise}.",
        key="--out",
    )


def check_same_draws(paths: Iterable[Path]) -> None:
    """Raise UserError where runs to be compared with finished ones would not have their draws.

    Args:
        paths: run folders of one comparison; those without a summary are still to be run.
    """
    finished: list[Path] = []
    unfinished: list[Path] = []
    for path in paths:
        with_summary = (path / "summary.json").exists()
        (finished if with_summary else unfinished).append(path)
    if unfinished:
        for path in finished:
            check_draws(path, "other runs would not share its partition, so choose another --out")


def run_identity(config: Mapping[str, Any], draws: int = DRAWS) -> str:
    """Return all settings that the results of a run depend on, as one string.

    Args:
        config: every dotted key; keys that older files do not have take their defaults.
        draws: with which draws it was run (`provenance.draws_of`).
    """
    full = {**Config().flat(), **retired.without_defaults(config)}
    relevant = {key: value for key, value in full.items() if affects_results(key, value)}
    return json.dumps([relevant, draws], sort_keys=True)


def affects_results(key: str, value: Any) -> bool:
    """True for keys that results depend on. The name of a preset that only sets values is none."""
    if key == "preset" and value in VALUES_ALONE:
        return False
    return not key.startswith(FREE_TO_CHANGE)
