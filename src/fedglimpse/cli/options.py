"""How a command shows its help and reads its words, whatever versions of typer and click meet.

Typer below 0.21, which Flower asks for, loses the help of arguments beside click 8.5, and writes
backslashes before brackets where Rich is installed but not used.

The words of a command that has settings: a TOML file, names, key=value.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from fedglimpse.config.loading import load
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError


class PlainCommand(TyperCommand):
    """A command whose help tells what every argument is."""

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Leave arguments to `format_options`; click 8.5 would tell them twice."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each with its help."""
        said = _helps(self.callback)
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            text, argument = record[1].replace("\\[", "["), param.param_type_name == "argument"
            lost = said.get(str(param.name), "") if argument else ""
            text = text if lost in text else f"{lost}  {text}".strip()
            rows["Arguments" if argument else "Options"].append((record[0], text))
        for title, some in rows.items():
            if some:
                with formatter.section(title):
                    formatter.write_dl(some)


class WordsCommand(PlainCommand):
    """A command that takes `key=value` settings, and says so to who writes `--key value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words; raises UserError for a setting that is written as an option."""
        known = {name for param in self.get_params(ctx) for name in param.opts}
        for i, word in enumerate(args):
            if word == "--":
                break
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                _refuse_setting(option, args[i:])
        return super().parse_args(ctx, args)


def _refuse_setting(option: str, words: Sequence[str]) -> None:
    """Raise UserError where an unknown option has the name of a setting, or nearly so."""
    flat = Config().flat()
    close = difflib.get_close_matches(option.lstrip("-"), flat, n=1, cutoff=0.8)
    if not close:
        return
    value = words[0].partition("=")[2]
    if not value:
        after = words[1] if len(words) > 1 else "-"
        value = "VALUE" if after.startswith("-") or "=" in after else after
    if isinstance(flat[close[0]], tuple) and not value.startswith("["):
        value = f"[{value}]"
    raise UserError(f"There is no option {option}: write {close[0]}={value}, without dashes.")


def _helps(callback: Callable[..., Any] | None) -> dict[str, str]:
    """Return what the function of a command says of its parameters."""
    if callback is None:
        return {}
    hints = get_type_hints(inspect.unwrap(callback), include_extras=True)
    found = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        name: getattr(info, "help", None) or "" for name, infos in found.items() for info in infos
    }


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
