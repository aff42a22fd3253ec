"""What `fedglimpse run`, `compare` and `teach` do once their settings are known to be right.

`run` and `compare` stop cleanly at a signal and can be resumed from their folders.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import typer

from fedglimpse.agent.policy import check_place, write_policy
from fedglimpse.cli.entry import INTERRUPTED
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.runs.build import device_of
from fedglimpse.runs.experiment import Result, Stopped, run
from fedglimpse.runs.folder import (
    RunFolder,
    check_same_draws,
    stored_config,
    write_atomically,
    writing,
)
from fedglimpse.runs.preflight import Readiness
from fedglimpse.runs.pretrain import teach
from fedglimpse.runs.progress import Listener, Profiled, listener
from fedglimpse.runs.signals import stop_on_signals
from fedglimpse.runs.summary import Estimate
from fedglimpse.runs.threads import available_cores
from fedglimpse.studies.compare import ComparedRun, comparison_table
from fedglimpse.studies.side_by_side import run_side_by_side

NEW_RUN = "nothing there to resume: a new run begins"


def holds_run(folder: Path) -> bool:
    """True where a run has begun in a folder."""
    return (folder / "config.toml").exists()


def resumed_config(folder: Path, from_out: bool) -> Config:
    """Return the stored configuration of the run in `folder`.

    Args:
        folder: where the run should be.
        from_out: whether `folder` was given as --out; otherwise it is the default folder.

    Raises:
        UserError: where no run is there.
    """
    if holds_run(folder):
        return stored_config(folder)
    problem = "holds no run" if folder.exists() else "does not exist"
    subject = f"--out {folder}" if from_out else str(folder)
    fix = "" if from_out else " with --out"
    raise UserError(
        f"{subject} {problem}, so there is nothing to resume: name the folder of a run{fix}, or "
        "give settings to begin one.",
        key="--out",
    )


class WithNotice:
    """Prints a sentence when the run begins; passes everything on to another listener.

    A run begins after all of its settings have been checked, so a run that is refused prints its
    error alone.
    """

    def __init__(self, inner: Listener, text: str) -> None:
        self.inner = inner
        self.text = text

    def begin(self, name: str, done: int, total: int) -> None:
        """Print the sentence."""
        typer.echo(self.text, err=True)
        self.inner.begin(name, done, total)

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Pass on the records of a round."""
        self.inner.round(records)

    def end(self) -> None:
        """Pass on the end of the run."""
        self.inner.end()


def follow(
    config: Config, folder: Path, notices: Sequence[str], quiet: bool, profile: bool
) -> Listener:
    """Return what shows the progress of a run.

    Args:
        config: what is run.
        folder: the run folder, for the trace of a profiled run.
        notices: sentences to print when the run begins.
        quiet: show no progress.
        profile: write a trace of some rounds.
    """
    progress = listener(quiet)
    for text in notices:
        progress = WithNotice(progress, text)
    if profile:
        progress = Profiled(progress, folder, config.rounds)
    return progress


def run_until_signal(
    config: Config, out: Path, resume: bool, progress: Listener, resume_words: Sequence[str]
) -> Result:
    """Run; Ctrl-C or a termination signal ends the run after the current round.

    A second signal ends it at once.

    Args:
        config: what to run.
        out: the run folder.
        resume: resume the run in `out`, if there is one.
        progress: follows the run.
        resume_words: the command that resumes a stopped run, which the user is shown.

    Raises:
        typer.Exit: with exit code 130 after a signal.
    """
    stop = Event()
    try:
        with stop_on_signals(stop.set):
            return run(config, out, resume=resume, listener=progress, should_stop=stop.is_set)
    except (Stopped, KeyboardInterrupt):
        typer.echo(f"Stopped. Continue with: fedglimpse {shlex.join(resume_words)}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def show_result(config: Config, result: Result) -> None:
    """Print the final accuracy and the run folder."""
    final = Estimate(**result.summary["final_accuracy"])
    final_rounds = result.summary["final_over_rounds"]
    typer.echo(f"{config.method}: accuracy {final.text()} % over the last {final_rounds} rounds")
    if not any(record["selected"] for record in result.records):
        typer.echo(
            f"Nothing was learnt: no update was used in any of {config.rounds} rounds. Clients "
            "were too few (visibility.min_visible) or diverged (local.lr).",
            err=True,
        )
    typer.echo(f"results: {result.path}")


def run_all(
    configs: Sequence[Config],
    out: Path,
    resume: bool,
    quiet: bool,
    resume_words: Sequence[str],
    workers: int | None,
) -> list[ComparedRun]:
    """Run several configurations, each in a folder of its own below `out`.

    Args:
        configs: one for each method.
        out: the folder of the comparison.
        resume: resume the runs that are there.
        quiet: show no progress.
        resume_words: the command that resumes what was stopped.
        workers: how many at a time; None: one for each core, on a GPU one.

    Raises:
        UserError: for a run that could not start, before the first one begins.
    """
    folders = [out / config.method.replace(":", "_") for config in configs]
    readiness = Readiness()
    for config in configs:
        readiness.check(config)
    for config, folder in zip(configs, folders, strict=True):
        RunFolder(folder).check(config, resume)
    check_same_draws(folders)
    if resume and not any(holds_run(folder) for folder in folders):
        typer.echo(f"{out}: {NEW_RUN}", err=True)
    if workers is None:
        workers = available_cores() if device_of(configs[0]).type == "cpu" else 1
    if workers > 1:
        runs = list(zip(configs, folders, strict=True))
        return _run_side_by_side(runs, min(workers, len(runs)), quiet, resume_words)
    results: list[ComparedRun] = []
    for config, folder in zip(configs, folders, strict=True):
        progress = listener(quiet)
        result = run_until_signal(config, folder, resume, progress, resume_words)
        results.append(ComparedRun(config, result.records))
    return results


def _run_side_by_side(
    runs: Sequence[tuple[Config, Path]], workers: int, quiet: bool, resume_words: Sequence[str]
) -> list[ComparedRun]:
    """Run several runs at a time until a signal, as `run_until_signal` does with one."""
    stop = Event()
    try:
        with stop_on_signals(stop.set):
            records = run_side_by_side(runs, workers, listener(quiet), stop.is_set)
    except (Stopped, KeyboardInterrupt):
        typer.echo(f"Stopped. Continue with: fedglimpse {shlex.join(resume_words)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    return [ComparedRun(run[0], of_run) for run, of_run in zip(runs, records, strict=True)]


def show_comparison(results: Sequence[ComparedRun], out: Path, target: float | None) -> None:
    """Print the table of a comparison and write it to `out`."""
    table = comparison_table(results, target)
    with writing(out / "comparison.md"):
        write_atomically(out / "comparison.md", table + "\n")
    typer.echo(table)
    typer.echo(f"results: {out}")


def pretrain(configs: Sequence[Config], lessons: int, policy: Path, quiet: bool) -> None:
    """Pretrain a policy on federations, write it and print how well it fits."""
    check_place(str(policy), "--policy")
    result = teach(configs, lessons, listener(quiet))
    typer.echo(
        f"trained on {_count_runs(result.runs)}, {result.rounds:,} rounds, with {lessons:,} "
        f"mini-batches; TD loss {result.td_loss:.2g}"
    )
    if result.agreement is None:
        typer.echo(
            "agreement is unknown: it needs several seeds, more rounds, and rounds in which some "
            "visible clients are not selected"
        )
    else:
        agreement = result.agreement.text(scale=1, digits=3)
        typer.echo(
            f"agreement with the rewards of {_count_runs(result.held_out)} held out: {agreement}"
        )
    typer.echo(f"policy: {write_policy(result.policy, str(policy))}")


def _count_runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
