"""A sweep's folder: what is to be run, and the state of every cell.

    sweep.json        the plan: title, claim, control, targets, cells; and which share a pack
    cells/<id>/       a run folder of one seed; summary.json once it is done
    cells/<id>/failed.json   why it could not be run

Nothing in it depends on a machine or a path: it may be copied and resumed elsewhere. A plan that
was lost is written again; a cell is done once its folder's manifest says so.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.runs.folder import RunFolder, check_same_draws, writing
from fedglimpse.storage import store
from fedglimpse.storage.checkpoint import Checkpoint
from fedglimpse.storage.lock import SUFFIX as LOCK
from fedglimpse.storage.lock import check_unlocked, locked
from fedglimpse.studies.sweep.plan import Cell, Plan
from fedglimpse.studies.sweep.shard import Shard
from fedglimpse.version import VERSION

FORMAT = 1  # of sweep.json
OPENING = f"sweep-opening{LOCK}"
OPENING_SECONDS = 60.0  # that another shard may take for it
CellStatus = Literal["done", "failed", "begun", "new"]


class SweepFolder:
    """The files of one sweep."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is read or written."""
        self.path = path
        self.plan = path / "sweep.json"
        self._done: set[str] = set()  # ids of cells, which stay done

    def check(self, plan: Plan) -> None:
        """Raise UserError if the folder holds something else; nothing is changed."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file: name a folder.", key="--out")
        stored = self._read_plan()
        if stored is None:
            self._check_no_other(plan)
            return
        if stored.get("format") != FORMAT or stored.get("version") != VERSION:
            raise UserError(
                f"{self.path} was written by version {stored.get('version')} (format "
                f"{stored.get('format')}), but this is version {VERSION} (format {FORMAT}): "
                "resume it with that version, or name another --out.",
                key="--out",
            )
        planned_cells = [asdict(cell) for cell in plan.cells]
        difference = _difference(stored["cells"], planned_cells)
        if difference:
            raise UserError(
                f"{self.path} holds another sweep ({difference}): name another --out, or restore "
                "the sweep file.",
                key="--out",
            )

    def check_code(self, cells: Sequence[Cell], configs: Mapping[str, Config]) -> None:
        """Raise UserError if the user's own code or our random draws differ from cells before."""
        for cell in cells:
            try:
                RunFolder(self.of(cell)).check_code(configs[cell.id])
            except UserError as error:
                raise UserError(f"Cell {cell.id}: {error}", key=error.key) from None
        check_same_draws(map(self.of, cells))

    def opening(self) -> AbstractContextManager[None]:
        """Keep other shards from opening the folder at the same moment; wait for them."""
        return locked(self.path, "sweep opening", wait=OPENING_SECONDS)

    def alone(self, shard: Shard) -> AbstractContextManager[None]:
        """Return the lock of a shard; call it while `opening`.

        Raises:
            UserError: where another process runs cells of this shard.
        """
        for path in self.path.glob(f"sweep*{LOCK}"):
            is_other_shard = path.name.endswith(f"-of-{shard.count}{LOCK}")
            if path.name != OPENING and not is_other_shard:
                check_unlocked(path, "sweep")
        return locked(self.path, shard.lock)

    def stored_packs(self) -> list[list[str]]:
        """Return the packs that were stored, as ids of cells; older folders have none."""
        plan = self._read_plan()
        return [] if plan is None else plan.get("packs", [])

    def open(self, plan: Plan, packs: Sequence[Sequence[Cell]]) -> None:
        """Write the plan, and packs beside those that are stored; call `check` before."""
        ids = self.stored_packs()
        packed = {name for pack in ids for name in pack}
        for pack in packs:
            if pack[0].id not in packed:
                ids.append([cell.id for cell in pack])
        content = {"format": FORMAT, "version": VERSION, **asdict(plan), "packs": ids}
        text = json.dumps(content, indent=1).encode()
        with writing(self.path):
            store.make_folder(self.path / "cells")
            if not store.is_committed(self.plan) or self.plan.read_bytes() != text:
                store.commit(self.path, {self.plan.name: text})

    def of(self, cell: Cell) -> Path:
        """Return the run folder of a cell."""
        return self.path / "cells" / cell.id

    def state(self, cell: Cell) -> CellStatus:
        """Return the state of a cell."""
        path = self.of(cell)
        if cell.id in self._done or store.is_committed(path / "summary.json"):
            self._done.add(cell.id)
            return "done"
        if (path / "failed.json").exists():
            return "failed"
        return "begun" if Checkpoint(path).path.exists() else "new"

    def left(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return those that are neither done nor failed."""
        return [cell for cell in cells if self.state(cell) in ("begun", "new")]

    def tidy(self, cell: Cell) -> None:
        """Compress the records of a finished cell and drop its checkpoint; safe to interrupt."""
        path = self.of(cell)
        records = path / "rounds.jsonl"
        with writing(path):
            if records.exists():
                packed = gzip.compress(store.read(records, self._run_again(cell)), mtime=0)
                store.commit(
                    path,
                    {"rounds.jsonl.gz": packed},
                    cover=["config.toml", "environment.json", "summary.json"],
                )
                store.remove(path, [records.name])
            Checkpoint(path).remove()
            (path / f"run{LOCK}").unlink(missing_ok=True)  # of a process that was killed

    def check_finished(self, cells: Iterable[Cell]) -> None:
        """Raise UserError if a cell that is done has lost or damaged files."""
        for cell in cells:
            if self.state(cell) == "done":
                path = self.of(cell)
                fix = self._run_again(cell)
                listed = store.check_folder(path, fix, key="--out")
                records = ("rounds.jsonl", "rounds.jsonl.gz")
                if listed and not any((path / name).exists() for name in records):
                    raise store.damage(path, "its records are missing", fix, "--out")

    def tidy_finished(self, cells: Iterable[Cell]) -> None:
        """Tidy those of the cells that are done."""
        for cell in cells:
            if self.state(cell) == "done":
                self.tidy(cell)

    def fail(self, cell: Cell, reason: str) -> None:
        """Record why a cell cannot be run; its records stay."""
        path = self.of(cell)
        with writing(path):
            store.make_folder(path)
            store.commit(path, {"failed.json": json.dumps({"reason": reason}).encode()})

    def reason(self, cell: Cell) -> str:
        """Return why a cell failed."""
        try:
            content = json.loads(store.read(self.of(cell) / "failed.json"))
            return str(content["reason"])
        except (ValueError, KeyError, TypeError):
            return "the reason was lost"

    def forgive(self, cell: Cell) -> None:
        """Forget a failure, so that the cell is tried again from its last checkpoint."""
        (self.of(cell) / "failed.json").unlink(missing_ok=True)

    def split_failed_pack(self, pack: Sequence[Cell], reason: str) -> list[list[Cell]]:
        """Return two halves of a failed pack to try again, or record the failure of its only cell.

        Halving finds the cell that fails in a few steps, and also helps if memory was short.
        """
        cells = self.left(pack)
        if not cells:
            return []
        if len(cells) == 1:
            self.fail(cells[0], reason)
            return []
        middle = len(cells) // 2
        return [cells[:middle], cells[middle:]]

    def rounds_run(self, cell: Cell) -> int:
        """Return how many rounds of an unfinished cell are recorded."""
        records = self.of(cell) / "rounds.jsonl"
        if not records.exists():
            return 0
        return records.read_bytes().count(b"\n")

    def _run_again(self, cell: Cell) -> str:
        return f"{store.RESTORE}, or delete the folder {self.of(cell)} to run this cell again"

    def _check_no_other(self, plan: Plan) -> None:
        """Raise UserError if a folder without a plan holds anything but cells of this one."""
        if not self.path.exists():
            return
        ids = {cell.id for cell in plan.cells}
        for path in [*self.path.iterdir(), *self.path.glob("cells/*")]:
            is_ours = path.name in ("cells", self.plan.name, store.MANIFEST)
            is_cell = path.parent.name == "cells" and path.name in ids
            if not is_ours and not is_cell and not path.name.endswith((LOCK, store.TEMPORARY)):
                raise UserError(
                    f"{self.path} holds other files: name a new or empty folder as --out.",
                    key="--out",
                )

    def _read_plan(self) -> dict[str, Any] | None:
        """Return the stored plan; None if there is none, or one that was cut short."""
        fix = f"{store.RESTORE}, or delete it and rerun the command with the same sweep file"
        try:
            stored: object = json.loads(self.plan.read_bytes())
        except (ValueError, OSError):
            return None
        store.check(self.plan, fix, "--out")
        if not isinstance(stored, dict) or not isinstance(stored.get("cells"), list):
            raise store.damage(self.plan, "it does not list cells", fix, "--out")
        return stored


def _difference(
    stored: Sequence[Mapping[str, Any]],
    planned: Sequence[Mapping[str, Any]],
) -> str:
    """Return the first difference between two plans; empty if there is none."""
    stored_overrides = _overrides_by_id(stored)
    new_overrides = _overrides_by_id(planned)
    for name in [*stored_overrides, *new_overrides]:
        if name not in new_overrides:
            return f"the file no longer has its cell {name}"
        if name not in stored_overrides:
            return f"the file has a new cell {name}"
        old = stored_overrides[name]
        new = new_overrides[name]
        for key in [*old, *new]:
            if old.get(key) != new.get(key):
                return f"cell {name} had {key}={old.get(key)!r}, now {new.get(key)!r}"
    return ""


def _overrides_by_id(cells: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    overrides: dict[str, Mapping[str, Any]] = {}
    for cell in cells:
        overrides[cell["id"]] = cell["overrides"]
    return overrides
