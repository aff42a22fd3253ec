"""`fedglimpse compare`: several methods on the same federations, and one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedglimpse.cli.options import Quiet, Words, load_config, sort_words
from fedglimpse.cli.run import NEW_RUN, Resume, holds_run, run_until_signal
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.methods import registry
from fedglimpse.methods.describe import describe
from fedglimpse.runs.experiment import Result
from fedglimpse.runs.folder import RunFolder, write_atomically, writing
from fedglimpse.runs.preflight import Readiness
from fedglimpse.runs.progress import listener
from fedglimpse.studies.compare import comparison_table
from fedglimpse.studies.report.analysis import check_target

ALLOW_ORACLE = "options.allow_oracle=true"


def compare(
    words: Words = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path(
        "runs/compare"
    ),
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy to reach, 0 to 1; default: 90 % of the best method's."),
    ] = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods: fedglimpse compare fedavg fedavg-window [key=value ...] --out DIR.

    `all` stands for every method; options.allow_oracle=true adds the oracles.
    """
    files, methods, settings = sort_words(words or [])
    if methods == ["all"]:
        methods = every_method(ALLOW_ORACLE in settings)
    check_methods(methods, settings)
    check_target(target)
    configs = [load_config(files, settings_of(name, settings)) for name in methods]
    folders = [out / name.replace(":", "_") for name in methods]
    check_runs(configs, folders, resume)
    if resume and not any(holds_run(folder) for folder in folders):
        typer.echo(f"{out}: {NEW_RUN}", err=True)
    resume_words = ["compare", *(words or []), "--out", str(out)]
    if target is not None:
        resume_words += ["--target", str(target)]
    if quiet:
        resume_words.append("--quiet")
    resume_words.append("--resume")
    results: list[Result] = []
    for config, folder in zip(configs, folders, strict=True):
        progress = listener(quiet)
        results.append(run_until_signal(config, folder, resume, progress, resume_words))
    table = comparison_table(results, target)
    with writing(out / "comparison.md"):
        write_atomically(out / "comparison.md", table + "\n")
    typer.echo(table)
    typer.echo(f"results: {out}")


def every_method(with_oracles: bool) -> list[str]:
    """Return the names of all methods; oracles only on request."""
    names: list[str] = []
    for name in registry.MODULES:
        if with_oracles or not describe(registry.info(name)).oracle:
            names.append(name)
    return names


def settings_of(name: str, settings: Sequence[str]) -> list[str]:
    """Return a method's settings; only an oracle gets the permission for oracles."""
    keeps_permission = ALLOW_ORACLE in settings and registry.is_oracle(name)
    overrides = [word for word in settings if keeps_permission or word != ALLOW_ORACLE]
    return [*overrides, f"method={name}"]


def check_methods(methods: Sequence[str], settings: Sequence[str]) -> None:
    """Raise UserError unless at least two methods are named, as words and not as a setting."""
    if len(methods) < 2:
        raise UserError(
            f"compare was given {len(methods)} methods: name at least two, such as "
            "fedglimpse compare fedavg fedavg-window.",
            key="method",
        )
    for word in settings:
        if word.startswith("method="):
            raise UserError(
                f"compare has {word} beside {', '.join(methods)}: name methods as words.",
                key="method",
            )


def check_runs(configs: Sequence[Config], folders: Sequence[Path], resume: bool) -> None:
    """Raise UserError for a repeated method, or a run that could not start; nothing is run yet."""
    names = [config.method for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"compare was given '{name}' twice: name each method once.", key="method"
            )
    readiness = Readiness()
    for config in configs:
        readiness.check(config)
    for config, folder in zip(configs, folders, strict=True):
        RunFolder(folder).check(config, resume)
