"""Names of operators follow the code: what torch has compiled of another version must not run."""

from __future__ import annotations

import re
from pathlib import Path

from fedglimpse.simulation.cuda.operator_names import code_digest, versioned_name


def test_a_name_carries_the_digest_of_the_code() -> None:
    assert re.fullmatch(r"fedglimpse::conv_[0-9a-f]{8}", versioned_name("conv"))
    assert versioned_name("conv") == versioned_name("conv")


def folder_with(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_digest_follows_any_change(tmp_path: Path) -> None:
    original = folder_with(tmp_path / "original", {"one.py": "a", "two.py": ""})
    copy = folder_with(tmp_path / "copy", {"one.py": "a", "two.py": ""})
    edited = folder_with(tmp_path / "edited", {"one.py": "b", "two.py": ""})
    renamed = folder_with(tmp_path / "renamed", {"one.py": "a", "other.py": ""})
    assert code_digest(original) == code_digest(copy)
    assert len({code_digest(original), code_digest(edited), code_digest(renamed)}) == 3
