"""The commands that train: `fedglimpse run`, `compare` and `teach`.

`run` and `compare` stop cleanly at a signal and can be resumed from their folders.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer

from fedglimpse.agent.policy import check_place, write_policy
from fedglimpse.cli.options import Quiet, Words, load_config, sort_words, without_names
from fedglimpse.config.loading import parse_overrides
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.methods import registry
from fedglimpse.methods.build import is_oracle
from fedglimpse.methods.descriptions import descriptions
from fedglimpse.runs.experiment import Result, Stopped, run
from fedglimpse.runs.folder import RunFolder, stored_config, write_atomically, writing
from fedglimpse.runs.preflight import Readiness
from fedglimpse.runs.pretrain import METHOD, teach
from fedglimpse.runs.progress import Listener, Profiled, listener
from fedglimpse.runs.signals import stop_on_signals
from fedglimpse.runs.summary import Estimate
from fedglimpse.studies.compare import comparison_table
from fedglimpse.studies.report.analysis import check_target

NEW_RUN = "nothing there to resume: a new run begins"
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C
ALLOW_ORACLE = "options.allow_oracle=true"
TEACH_DEFAULTS = {"method": METHOD}

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
    is_plugin = config.method not in registry.MODULES  # which may read them
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
            return run(config, out, resume=resume, listener=progress, should_stop=stop.is_set)
    except (Stopped, KeyboardInterrupt):
        typer.echo(f"Stopped. Continue with: fedglimpse {shlex.join(resume_words)}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def teach_command(
    policy: Annotated[Path, typer.Option("--policy", help="File that the policy is written to.")],
    words: Words = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            help="Add federations with these settings changed, such as "
            "'data.partition=dirichlet selection.k=4'; can be repeated.",
        ),
    ] = None,
    lessons: Annotated[int, typer.Option(help="Mini-batches to train on.")] = 6000,
    quiet: Quiet = False,
) -> None:
    """Pretrain a policy: fedglimpse teach [FILE.toml] [key=value ...] --policy F.

    Every seed is a federation with random selections: give many, such as
    'seeds=[0,1,2,3,4,5,6,7]'. Use the policy with agent.load=F agent.frozen=true.
    """
    files, settings = without_names(words or [])
    check_place(str(policy), "--policy")
    configs = [load_config(files, settings, TEACH_DEFAULTS)]
    for text in also or []:
        configs.append(load_config(files, [*settings, *_split(text)], TEACH_DEFAULTS))
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


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"--also {text} cannot be read ({error}): fix its quotes.", key="--also"
        ) from None


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
    for description in descriptions().values():
        if with_oracles or not description.oracle:
            names.append(description.name)
    return names


def settings_of(name: str, settings: Sequence[str]) -> list[str]:
    """Return a method's settings; only an oracle gets the permission for oracles."""
    keeps_permission = ALLOW_ORACLE in settings and is_oracle(name)
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
