"""The command `fedglimpse`: its subcommands put together, and how errors end it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fedglimpse.cli.bench import bench_command
from fedglimpse.cli.flower import app as flower_app
from fedglimpse.cli.info import data_app, doctor, methods, schema
from fedglimpse.cli.options import PlainCommand, ReadingCommand, WordsCommand
from fedglimpse.cli.results import report, theory, verify
from fedglimpse.cli.run import compare, run_command, teach_command
from fedglimpse.cli.sweep import sweep
from fedglimpse.errors import TOO_LARGE, DeviceLost, UserError, lacks_memory
from fedglimpse.plugins import users_fault
from fedglimpse.version import VERSION

app = typer.Typer(
    help="Federated learning when the server can only see some of its clients each round.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # it takes [key=value ...] for markup
)
app.add_typer(data_app, name="data")
app.command("run", cls=WordsCommand)(run_command)
app.command("compare", cls=WordsCommand)(compare)
app.command("methods", cls=PlainCommand)(methods)
app.command("schema", cls=PlainCommand)(schema)
app.command("doctor", cls=PlainCommand)(doctor)
app.command("sweep", cls=PlainCommand)(sweep)
app.command("report", cls=ReadingCommand)(report)
app.command("teach", cls=WordsCommand)(teach_command)
app.command("theory", cls=ReadingCommand)(theory)
app.command("verify", cls=ReadingCommand)(verify)
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


def main() -> None:
    """Run the command line; a mistake of the user's ends in one sentence and exit code 2."""
    try:
        app()
    except SystemExit as ended:  # typer's own, but for one in a user's code
        fault = users_fault(ended)
        if fault is None:
            raise
        print(f"fedglimpse: your own code ended the command: {fault}; fix it.", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(f"fedglimpse: {error}", file=sys.stderr, flush=True)
        if isinstance(error, DeviceLost):
            os._exit(2)  # a normal exit frees memory on the lost GPU, which aborts the process
        sys.exit(2)
    except Exception as error:
        if lacks_memory(error):
            print(f"fedglimpse: {TOO_LARGE}", file=sys.stderr)
            sys.exit(2)
        fault = users_fault(error)
        if fault is None:
            raise
        print(
            f"fedglimpse: your own code failed: {fault}; fix it and rerun the command (run and "
            "compare with --resume).",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
