"""`fedglimpse teach`: pretrain a policy on many simulated federations."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedglimpse.agent.policy import check_place, write_policy
from fedglimpse.cli.options import Quiet, Words, load_config, without_names
from fedglimpse.errors import UserError
from fedglimpse.runs.pretrain import METHOD, teach
from fedglimpse.runs.progress import listener

DEFAULTS = {"method": METHOD}


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
    configs = [load_config(files, settings, DEFAULTS)]
    for text in also or []:
        configs.append(load_config(files, [*settings, *_split(text)], DEFAULTS))
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
