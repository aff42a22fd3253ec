"""The commands that train: `fedglimpse run`, `compare` and `teach`.

Here are their options, and what is wrong with them is found. The work is in `training.py`, which
imports torch and is therefore imported only when nothing is wrong.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedglimpse.cli.entry import importing
from fedglimpse.cli.options import (
    Quiet,
    Words,
    WorkersOption,
    check_target,
    load_config,
    read_number,
    sort_words,
    without_names,
)
from fedglimpse.config.loading import parse_overrides
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.methods import registry
from fedglimpse.methods.descriptions import descriptions

ALLOW_ORACLE = "options.allow_oracle=true"
TEACH_DEFAULTS = {"method": registry.WITH_AGENT}

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
    with importing():
        from fedglimpse.cli import training
    if resume and not files and not settings:
        config = training.resumed_config(folder, from_out=out is not None)
    notices: list[str] = []
    if resume and not training.holds_run(folder):
        notices.append(f"{folder}: {training.NEW_RUN}")
    ignored = settings_without_effect(config, settings)
    if ignored:
        notices.append(ignored)
    progress = training.follow(config, folder, notices, quiet=quiet, profile=profile)
    resume_words = ["run", "--out", str(folder), "--resume"]
    result = training.run_until_signal(config, folder, resume, progress, resume_words)
    training.show_result(config, result)


def default_folder(config: Config) -> Path:
    """Return the results folder of a run without --out."""
    return Path("runs") / f"{config.data.name}-{config.method}".replace(":", "_")


def settings_without_effect(config: Config, settings: Sequence[str]) -> str:
    """Return a sentence naming `agent.*` overrides that this method ignores, or an empty string."""
    agent_keys = [key for key in parse_overrides(settings) if key.startswith("agent.")]
    is_plugin = config.method not in registry.MODULES  # which may read them
    if not agent_keys or config.method == registry.WITH_AGENT or is_plugin:
        return ""
    verb = "has" if len(agent_keys) == 1 else "have"
    return (
        f"{', '.join(agent_keys)} {verb} no effect with method={config.method}: only "
        f"method={registry.WITH_AGENT} has that agent."
    )


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
    configs = [load_config(files, settings, TEACH_DEFAULTS)]
    for text in also or []:
        configs.append(load_config(files, [*settings, *_split(text)], TEACH_DEFAULTS))
    with importing():
        from fedglimpse.cli import training
    training.pretrain(configs, lessons, policy, quiet)


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
    workers: WorkersOption = "auto",
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
    processes = read_number("--workers", workers)
    configs = [load_config(files, settings_of(name, settings)) for name in methods]
    resume_words = ["compare", *(words or []), "--out", str(out)]
    if target is not None:
        resume_words += ["--target", str(target)]
    if processes is not None:
        resume_words += ["--workers", workers]
    if quiet:
        resume_words.append("--quiet")
    resume_words.append("--resume")
    with importing():
        from fedglimpse.cli import training
    results = training.run_all(configs, out, resume, quiet, resume_words, processes)
    training.show_comparison(results, out, target)


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


def is_oracle(name: str) -> bool:
    """True for a method that reads what no server may know."""
    if ":" in name:
        with importing():
            from fedglimpse.methods import build
        return build.is_oracle(name)
    return name in descriptions() and descriptions()[name].oracle


def check_methods(methods: Sequence[str], settings: Sequence[str]) -> None:
    """Raise UserError unless at least two methods are named, once each, and not as a setting."""
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
    for name in methods:
        if methods.count(name) > 1:
            raise UserError(
                f"compare was given '{name}' twice: name each method once.", key="method"
            )
