"""Names of operators follow the code: what torch has compiled of another version must not run."""

from __future__ import annotations

import re
from pathlib import Path

from fedglimpse.simulation.cuda.operators import digest, named


def test_a_name_carries_the_digest_of_the_code() -> None:
    assert re.fullmatch(r"fedglimpse::conv_[0-9a-f]{8}", named("conv"))
    assert named("conv") == named("conv")


def test_the_digest_follows_any_change(tmp_path: Path) -> None:
    seen = set()
    for number, text in enumerate(["a", "b", "b"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "one.py").write_text(text)
        (folder / ("two.py" if number < 2 else "other.py")).write_text("")
        seen.add(digest(folder))
    assert len(seen) == 3
