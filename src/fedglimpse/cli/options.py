"""Shared by the subcommands: their help, and how they read TOML files and key=value settings.

Help is written here because versions of typer and click disagree: typer below 0.21, which Flower
requires, loses the help of arguments beside click 8.5, and escapes brackets for Rich even where
Rich is not used.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from fedglimpse.cli.entry import importing
from fedglimpse.config.checks import check
from fedglimpse.config.loading import load
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.methods import registry
from fedglimpse.plugins import importing_no_own_code

TABLE_WIDTH = 150  # a narrower terminal wraps lines, but not inside a cell
SIMILAR_ENOUGH = 0.8  # an option is taken for a misspelt setting from this similarity on

Words = Annotated[
    list[str] | None,
    typer.Argument(help="A TOML file and key=value settings, such as data.name=digits rounds=30."),
]
WorkersOption = Annotated[
    str, typer.Option("--workers", help="Processes; auto: one for each core, on a GPU one.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import the code that the results name, such as own data."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


class PlainCommand(TyperCommand):
    """A command whose help explains every argument and option."""

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Leave arguments to `format_options`; click 8.5 would list them twice."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each with its help."""
        argument_help = _parameter_help(self.callback)
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            text = text.replace("\\[", "[")
            if param.param_type_name != "argument":
                options.append((name, text))
                continue
            lost_text = argument_help.get(str(param.name), "")
            if lost_text not in text:
                text = f"{lost_text}  {text}".strip()
            arguments.append((name, text))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class ReadingCommand(PlainCommand):
    """A command that reads results, perhaps a stranger's: it runs code that they name on --trust.

    Its function takes `trust: Trust`.
    """

    def invoke(self, ctx: Any) -> Any:
        """Call the command."""
        with importing_no_own_code(refused=not ctx.params["trust"]):
            return super().invoke(ctx)


class WordsCommand(PlainCommand):
    """A command with key=value settings, which explains them to users who write `--key value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; raises UserError for a setting that is written as an option."""
        options = {name for param in self.get_params(ctx) for name in param.opts}
        for i, word in enumerate(args):
            if word == "--":
                break
            option = word.partition("=")[0]
            if option.startswith("--") and option not in options:
                _refuse_setting(option, args[i:])
        return super().parse_args(ctx, args)


def _refuse_setting(option: str, words: Sequence[str]) -> None:
    """Raise UserError if an unknown option has the name of a setting, or nearly so."""
    settings = Config().flat()
    name = option.lstrip("-")
    similar = difflib.get_close_matches(name, settings, n=1, cutoff=SIMILAR_ENOUGH)
    if not similar:
        return
    key = similar[0]
    value = words[0].partition("=")[2]
    if not value:
        next_word = words[1] if len(words) > 1 else "-"
        is_value = not next_word.startswith("-") and "=" not in next_word
        value = next_word if is_value else "VALUE"
    if isinstance(settings[key], tuple) and not value.startswith("["):
        value = f"[{value}]"
    raise UserError(
        f"There is no option {option}: write {key}={value}, without dashes.", key=option
    )


def _parameter_help(callback: Callable[..., Any] | None) -> dict[str, str]:
    """Return the help of the parameters of a command's function."""
    if callback is None:
        return {}
    texts: dict[str, str] = {}
    hints = get_type_hints(inspect.unwrap(callback), include_extras=True)
    for name, hint in hints.items():
        for info in getattr(hint, "__metadata__", ()):
            texts[name] = getattr(info, "help", None) or ""
    return texts


def sort_words(words: Sequence[str]) -> tuple[list[Path], list[str], list[str]]:
    """Split words into TOML files, plain names and key=value settings."""
    files: list[Path] = []
    names: list[str] = []
    settings: list[str] = []
    for word in words:
        if "=" in word:
            settings.append(word)
        elif word.endswith(".toml"):
            files.append(Path(word))
        else:
            names.append(word)
    return files, names, settings


def without_names(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split words into TOML files and settings; raises UserError for a plain name."""
    files, names, settings = sort_words(words)
    if names:
        raise UserError(
            f"'{names[0]}' is neither a .toml file nor key=value: write method={names[0]}.",
            key="method",
        )
    return files, settings


def load_config(
    files: Sequence[Path], settings: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> Config:
    """Read at most one file and the settings, which override it; `defaults` come last.

    Raises:
        UserError: for whatever is wrong with them.
    """
    if len(files) > 1:
        raise UserError(
            f"There are two TOML files, {files[0]} and {files[1]}: name one.", key="FILE"
        )
    config = load(files[0] if files else None, settings, defaults)
    check(config)
    with importing():  # a user's own method, which may import torch
        registry.check_name(config.method)
    return config


def check_target(target: float | None) -> None:
    """Raise UserError if `--target` is not an accuracy."""
    if target is not None and not 0 < target <= 1:
        raise UserError(
            f"--target {target} is not an accuracy: give a share such as 0.8.", key="--target"
        )


def read_number(option: str, text: str, has_effect: bool = True) -> int | None:
    """Return the number of an option; None for auto."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise UserError(
            f"{option} {text} must be a whole number of 1 or more, or auto.", key=option
        )
    if not has_effect:
        raise UserError(
            f"{option} {text} has no effect with --engine ray: leave it out.", key=option
        )
    return int(text)
