"""The command `fedglimpse`: run, compare, methods, data, doctor; the others are in `commands/`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedglimpse.cli.bench import bench_command
from fedglimpse.cli.flower import app as flower_app
from fedglimpse.cli.info import data_app, doctor, methods
from fedglimpse.cli.notices import NEW_RUN, SaysFirst, holds_run, resumed_config, without_effect
from fedglimpse.cli.options import (
    PlainCommand,
    Quiet,
    Words,
    WordsCommand,
    load_config,
    sort_words,
    without_names,
)
from fedglimpse.cli.pretrain import teach_command
from fedglimpse.cli.report import report
from fedglimpse.cli.signals import run_with_signals
from fedglimpse.cli.sweep import sweep
from fedglimpse.cli.theory import theory
from fedglimpse.config.schema import Config
from fedglimpse.errors import TOO_LARGE, DeviceLost, UserError, lacks_memory
from fedglimpse.methods import registry
from fedglimpse.methods.describe import describe
from fedglimpse.plugins import users_fault
from fedglimpse.runs.folder import RunFolder, write_atomically, writing
from fedglimpse.runs.preflight import Readiness
from fedglimpse.runs.progress import Profiled, listener
from fedglimpse.runs.summary import Estimate
from fedglimpse.studies.compare import check_target, default_target, markdown, row_of
from fedglimpse.version import VERSION

app = typer.Typer(
    help="Federated learning when the server can only see some of its clients each round.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # it takes [key=value ...] for markup
)
app.add_typer(data_app, name="data")

ALLOW_ORACLE = "options.allow_oracle=true"

Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]


@app.command("run", cls=WordsCommand)
def run_command(
    words: Words = None,
    out: Out = None,
    resume: Resume = False,
    quiet: Quiet = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a profiler trace of rounds 3 to 5.")
    ] = False,
) -> None:
    """Run one method: fedglimpse run [FILE.toml] [key=value ...] --out DIR.

    Settings look like method=glimpse data.name=digits rounds=30; docs/settings.md lists them all,
    docs/data.md tells of data and visibility.
    """
    files, settings = without_names(words or [])
    config = load_config(files, settings)
    folder = out or default_folder(config)
    if resume and not files and not settings:
        config = resumed_config(folder, named=out is not None)
    told = listener(quiet)
    if resume and not holds_run(folder):
        told = SaysFirst(told, f"{folder}: {NEW_RUN}")
    if ignored := without_effect(config, settings):
        told = SaysFirst(told, ignored)
    if profile:
        told = Profiled(told, folder, config.rounds)
    again = ["run", "--out", str(folder), "--resume"]
    result = run_with_signals(config, folder, resume, told, again)
    final = Estimate(**result.summary["final_accuracy"])
    last = result.summary["final_over_rounds"]
    typer.echo(f"{config.method}: accuracy {final.text()} % over the last {last} rounds")
    if not any(record["selected"] for record in result.records):
        typer.echo(
            f"Nothing was learnt: no update was used in any of {config.rounds} rounds. Clients "
            "were too few (visibility.min_visible) or diverged (local.lr).",
            err=True,
        )
    typer.echo(f"results: {result.path}")


@app.command(cls=WordsCommand)
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

    `all` stands for every method; oracles come along with options.allow_oracle=true.
    """
    files, methods, settings = sort_words(words or [])
    if methods == ["all"]:
        methods = every_method(ALLOW_ORACLE in settings)
    if len(methods) < 2:
        raise UserError(
            f"compare was given {len(methods)} methods: name at least two, such as "
            "fedglimpse compare fedavg fedavg-window."
        )
    if given := next((word for word in settings if word.startswith("method=")), None):
        raise UserError(f"compare has {given} beside {', '.join(methods)}: name methods as words.")
    check_target(target)
    configs = [load_config(files, settings_of(name, settings)) for name in methods]
    folders = [out / name.replace(":", "_") for name in methods]
    check_together(configs)
    for config, folder in zip(configs, folders, strict=True):
        RunFolder(folder).check(config, resume)
    if resume and not any(holds_run(folder) for folder in folders):
        typer.echo(f"{out}: {NEW_RUN}", err=True)
    again = ["compare", *(words or []), "--out", str(out)]
    again += [] if target is None else ["--target", str(target)]
    again += ["--quiet", "--resume"] if quiet else ["--resume"]
    results = []
    for config, folder in zip(configs, folders, strict=True):
        results.append(run_with_signals(config, folder, resume, listener(quiet), again))
    goal = default_target([r.summary for r in results]) if target is None else target
    rows = [row_of(r.summary, r.records, goal) for r in results]
    table = markdown(rows, goal, results[0].summary["final_over_rounds"])
    with writing(out / "comparison.md"):
        write_atomically(out / "comparison.md", table + "\n")
    typer.echo(table)
    typer.echo(f"results: {out}")


app.command("methods", cls=PlainCommand)(methods)
app.command("doctor", cls=PlainCommand)(doctor)
app.command("sweep", cls=PlainCommand)(sweep)
app.command("report", cls=PlainCommand)(report)
app.command("teach", cls=WordsCommand)(teach_command)
app.command("theory", cls=PlainCommand)(theory)
app.command("bench", cls=PlainCommand)(bench_command)
app.add_typer(flower_app, name="flower")


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning when the server can only see some of its clients each round."""
    if version:
        typer.echo(f"fedglimpse {VERSION}")
        raise typer.Exit


def every_method(with_oracles: bool) -> list[str]:
    """Return the names of all methods, oracles only if they are asked for."""
    return [n for n in registry.MODULES if with_oracles or not describe(registry.info(n)).oracle]


def settings_of(name: str, settings: Sequence[str]) -> list[str]:
    """Return a method's settings; the permission for oracles goes to oracles only."""
    oracle = ALLOW_ORACLE in settings and registry.is_oracle(name)
    return [*(w for w in settings if oracle or w != ALLOW_ORACLE), f"method={name}"]


def default_folder(config: Config) -> Path:
    """Return where results go when --out is not given."""
    return Path("runs") / f"{config.data.name}-{config.method}".replace(":", "_")


def check_together(configs: Sequence[Config]) -> None:
    """Raise UserError for a method that comes twice or cannot be run; nothing is played."""
    names = [config.method for config in configs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"compare was given '{twice}' twice: name each method once.")
    readiness = Readiness()
    for config in configs:
        readiness.check(config)


def main() -> None:
    """Run the command line; a user's mistake, in code too, is one sentence and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"fedglimpse: {error}", file=sys.stderr, flush=True)
        if isinstance(error, DeviceLost):
            os._exit(2)
        sys.exit(2)
    except Exception as error:
        if lacks_memory(error):
            print(f"fedglimpse: {TOO_LARGE}", file=sys.stderr)
            sys.exit(2)
        fault = users_fault(error)
        if fault is None:
            raise
        print(
            f"fedglimpse: your own code failed: {fault}; mend it and give the command again, run "
            "and compare with --resume.",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
