"""A sweep's folder: what is to be done, and what has become of every cell.

    sweep.json        the plan: title, claim, control, targets, cells
    cells/<id>/       a run folder of one seed; summary.json once it is done
    cells/<id>/failed.json   why it could not be run

Nothing in it is bound to a machine or a place: it may be copied and continued elsewhere.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.runs.folder import RunFolder, write_atomically, writing
from fedglimpse.storage.checkpoint import Checkpoint
from fedglimpse.storage.lock import SUFFIX as LOCK
from fedglimpse.studies.sweep.plan import Cell, Plan
from fedglimpse.version import VERSION

FORMAT = 1  # of sweep.json
State = Literal["done", "failed", "begun", "new"]


class SweepFolder:
    """The files of one sweep."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is touched."""
        self.path, self.plan = path, path / "sweep.json"

    def check(self, plan: Plan) -> None:
        """Raise UserError where the folder holds something else; nothing is changed."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file: name a folder.")
        if not self.plan.exists():
            others = [p.name for p in self.path.iterdir()] if self.path.exists() else []
            if any(not name.endswith((LOCK, ".part")) for name in others):
                raise UserError(
                    f"{self.path} holds other files: name a new or empty folder as --out."
                )
            return
        there = self._read_plan()
        if there.get("format") != FORMAT or there.get("version") != VERSION:
            raise UserError(
                f"{self.path} was written by version {there.get('version')} (format "
                f"{there.get('format')}), but this is version {VERSION} (format {FORMAT}): "
                "continue with that version, or name another --out."
            )
        difference = _difference(there["cells"], [asdict(c) for c in plan.cells])
        if difference:
            raise UserError(
                f"{self.path} holds another sweep ({difference}): name another --out, or give the "
                "file as it was."
            )

    def check_code(self, cells: Iterable[Cell], configs: Mapping[str, Config]) -> None:
        """Raise UserError where the user's own code is not what cells were played by."""
        for cell in cells:
            try:
                RunFolder(self.of(cell)).check_code(configs[cell.id])
            except UserError as error:
                raise UserError(f"Cell {cell.id}: {error}") from None

    def open(self, plan: Plan) -> None:
        """Write the plan; call `check` before, and hold the lock."""
        content = {"format": FORMAT, "version": VERSION, **asdict(plan)}
        text = json.dumps(content, indent=1)
        with writing(self.path):
            (self.path / "cells").mkdir(exist_ok=True)
            if not self.plan.exists() or self.plan.read_text(encoding="utf-8") != text:
                write_atomically(self.plan, text)
        for cell in plan.cells:
            if self.state(cell) == "done":
                self.tidy(cell)

    def of(self, cell: Cell) -> Path:
        """Return the run folder of a cell."""
        return self.path / "cells" / cell.id

    def state(self, cell: Cell) -> State:
        """Say what has become of a cell."""
        path = self.of(cell)
        if (path / "summary.json").exists():
            return "done"
        if (path / "failed.json").exists():
            return "failed"
        return "begun" if Checkpoint(path).path.exists() else "new"

    def left(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return those that are neither done nor failed."""
        return [cell for cell in cells if self.state(cell) in ("begun", "new")]

    def tidy(self, cell: Cell) -> None:
        """Pack the records of a finished cell and drop its checkpoint; may be cut anywhere."""
        path = self.of(cell)
        rounds, packed = path / "rounds.jsonl", path / "rounds.jsonl.gz"
        with writing(path):
            if rounds.exists():
                part = path / "rounds.jsonl.gz.part"
                part.write_bytes(gzip.compress(rounds.read_bytes(), mtime=0))
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.replace(packed)
                rounds.unlink()
            Checkpoint(path).remove()

    def fail(self, cell: Cell, reason: str) -> None:
        """Record why a cell cannot be run; what it has played stays."""
        with writing(self.of(cell)):
            self.of(cell).mkdir(parents=True, exist_ok=True)
            write_atomically(self.of(cell) / "failed.json", json.dumps({"reason": reason}))

    def reason(self, cell: Cell) -> str:
        """Return why a cell failed."""
        return str(
            json.loads((self.of(cell) / "failed.json").read_text(encoding="utf-8"))["reason"]
        )

    def forgive(self, cell: Cell) -> None:
        """Forget a failure, so that the cell is tried again from where it was."""
        (self.of(cell) / "failed.json").unlink(missing_ok=True)

    def played(self, cell: Cell) -> int:
        """Return how many rounds of an unfinished cell are recorded."""
        rounds = self.of(cell) / "rounds.jsonl"
        return rounds.read_bytes().count(b"\n") if rounds.exists() else 0

    def _read_plan(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.plan.read_text(encoding="utf-8")))
        except (ValueError, OSError) as error:
            raise UserError(
                f"{self.plan} cannot be read ({type(error).__name__}): name another --out."
            ) from None


def _difference(there: list[dict[str, Any]], asked: list[dict[str, Any]]) -> str:
    """Say where two plans part, or nothing."""
    old, new = {c["id"]: c for c in there}, {c["id"]: c for c in asked}
    for name in [*old, *new]:
        if name not in new:
            return f"the file no longer has its cell {name}"
        if name not in old:
            return f"the file has a new cell {name}"
        before, now = old[name]["overrides"], new[name]["overrides"]
        for key in [*before, *now]:
            if before.get(key) != now.get(key):
                return f"cell {name} had {key}={before.get(key)!r}, now {now.get(key)!r}"
    return ""
