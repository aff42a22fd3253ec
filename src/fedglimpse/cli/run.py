"""`fedglimpse run`: one method on one federation, in a folder from which it can be resumed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from fedglimpse.cli.options import Quiet, Words, load_config, without_names
from fedglimpse.config.loading import parse_overrides
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.methods.registry import MODULES
from fedglimpse.runs import experiment
from fedglimpse.runs.experiment import Result, Stopped
from fedglimpse.runs.folder import stored_config
from fedglimpse.runs.pretrain import METHOD
from fedglimpse.runs.progress import Listener, Profiled, listener
from fedglimpse.runs.signals import stop_on_signals
from fedglimpse.runs.summary import Estimate

NEW_RUN = "nothing there to resume: a new run begins"
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C

Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")]


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
    docs/data.md explains data and visibility.
    """
    files, settings = without_names(words or [])
    config = load_config(files, settings)
    folder = out or default_folder(config)
    if resume and not files and not settings:
        config = resumed_config(folder, from_out=out is not None)
    progress = listener(quiet)
    if resume and not holds_run(folder):
        progress = WithNotice(progress, f"{folder}: {NEW_RUN}")
    ignored = settings_without_effect(config, settings)
    if ignored:
        progress = WithNotice(progress, ignored)
    if profile:
        progress = Profiled(progress, folder, config.rounds)
    resume_words = ["run", "--out", str(folder), "--resume"]
    result = run_until_signal(config, folder, resume, progress, resume_words)
    show_result(config, result)


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


def default_folder(config: Config) -> Path:
    """Return the results folder of a run without --out."""
    return Path("runs") / f"{config.data.name}-{config.method}".replace(":", "_")


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


def settings_without_effect(config: Config, settings: Sequence[str]) -> str:
    """Return a sentence naming `agent.*` overrides that this method ignores, or an empty string."""
    agent_keys = [key for key in parse_overrides(settings) if key.startswith("agent.")]
    is_plugin = config.method not in MODULES  # which may read them
    if not agent_keys or config.method == METHOD or is_plugin:
        return ""
    verb = "has" if len(agent_keys) == 1 else "have"
    return (
        f"{', '.join(agent_keys)} {verb} no effect with method={config.method}: only "
        f"method={METHOD} has that agent."
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
            return experiment.run(
                config, out, resume=resume, listener=progress, should_stop=stop.is_set
            )
    except (Stopped, KeyboardInterrupt):
        typer.echo(f"Stopped. Continue with: fedglimpse {shlex.join(resume_words)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
