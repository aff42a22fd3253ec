"""The words of a command that has settings: a TOML file, names, key=value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedglimpse.config import Config
from fedglimpse.configure import load
from fedglimpse.errors import UserError

Words = Annotated[
    list[str] | None,
    typer.Argument(help="A TOML file and key=value settings, such as data.name=digits rounds=30."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


def sort_words(words: Sequence[str]) -> tuple[list[Path], list[str], list[str]]:
    """Split words into TOML files, plain names and key=value settings."""
    settings = [w for w in words if "=" in w]
    files = [Path(w) for w in words if "=" not in w and w.endswith(".toml")]
    names = [w for w in words if "=" not in w and not w.endswith(".toml")]
    return files, names, settings


def without_names(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split words into TOML files and settings; raises UserError for a plain name."""
    files, names, settings = sort_words(words)
    if names:
        raise UserError(
            f"'{names[0]}' is neither a .toml file nor key=value: write method={names[0]}."
        )
    return files, settings


def load_config(
    files: Sequence[Path], settings: Sequence[str], otherwise: Mapping[str, Any] | None = None
) -> Config:
    """Read at most one file and the settings after it; `otherwise` is for what they do not say."""
    if len(files) > 1:
        raise UserError(f"Two files were given, {files[0]} and {files[1]}: name one.")
    return load(files[0] if files else None, settings, otherwise)
