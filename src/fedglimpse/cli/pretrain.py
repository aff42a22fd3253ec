"""The subcommand `teach`: a policy for a federation to come, from many simulated ones."""

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

OTHERWISE = {"method": METHOD}  # for what the user does not say


def teach_command(
    policy: Annotated[Path, typer.Option("--policy", help="Where the policy is written.")],
    words: Words = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            help="More federations, with these settings changed, such as "
            "'data.partition=dirichlet selection.k=4'; repeat for several.",
        ),
    ] = None,
    lessons: Annotated[int, typer.Option(help="Mini-batches to learn from.")] = 6000,
    quiet: Quiet = False,
) -> None:
    """Teach a policy by many federations: fedglimpse teach [FILE.toml] [key=value ...] --policy F.

    Every seed is a federation, whose choices are drawn by lot: give many, such as
    'seeds=[0,1,2,3,4,5,6,7]'. Use the policy with agent.load=F agent.frozen=true.
    """
    files, settings = without_names(words or [])
    check_place(str(policy), "--policy")
    changed = [[], *(_split(some) for some in also or [])]
    configs = [load_config(files, [*settings, *more], OTHERWISE) for more in changed]
    taught = teach(configs, lessons, listener(quiet))
    typer.echo(
        f"taught by {_runs(taught.runs)}, {taught.rounds:,} rounds, in {lessons:,} lessons; "
        f"TD loss {taught.td_loss:.2g}"
    )
    if taught.agreement is None:
        typer.echo("agreement cannot be told: it takes other seeds, with more rounds and a choice")
    else:
        agreement = taught.agreement.text(1, 3)
        typer.echo(
            f"agreement with the rewards of {_runs(taught.held_out)} kept aside: {agreement}"
        )
    typer.echo(f"policy: {write_policy(taught.policy, str(policy))}")


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError as error:
        raise UserError(f"--also {words} cannot be read ({error}): mend its quotes.") from None
