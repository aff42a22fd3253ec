"""The method's page names code for every equation; a run has to execute all of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import fedglimpse

ROOT = Path(__file__).parents[2]
PACKAGE = Path(fedglimpse.__file__).parent
RUN = {
    "method": "glimpse",
    "preset": "tuned-1",  # unlike `tuned` it has an identity for each client
    "data.name": "digits",
    "rounds": 9,
    "agent.learn_start": 2,
    "engine.device": "cpu",
}
ROW = re.compile(r"^\| [^|]+ \| `(?P<file>[\w/]+\.py)` \| (?P<functions>[^|]+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")


def named_on_the_page() -> set[tuple[str, str]]:
    """Return (file, qualified name) of every function in the tables of equations and lines."""
    page = (ROOT / "docs" / "methods" / "glimpse.md").read_text(encoding="utf-8")
    section = page.split("## From the paper to the code")[1].split("\n## ")[0]
    return {
        (row["file"], name)
        for row in ROW.finditer(section)
        for name in NAME.findall(row["functions"])
    }


def executed_by_a_run() -> set[tuple[str, str]]:
    """Return (file, qualified name) of the package's functions that a short run executes."""
    executed: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}/"):
            file = Path(path).relative_to(PACKAGE).as_posix()
            executed.add((file, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fedglimpse.run(RUN)
    finally:
        sys.setprofile(before)
    return executed


def test_a_run_executes_every_function_of_the_equation_tables() -> None:
    named = named_on_the_page()
    assert len(named) > 25  # the tables were found
    assert named - executed_by_a_run() == set()
