"""Options, output and questions that the commands share."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.core.errors import SettingsError
from anabranch.core.logs import printable
from anabranch.runtime.lifecycle import Exit, run
from anabranch.runtime.private_state import private_files

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", help="The pipeline's file.", show_default=True, metavar="FILE")
]
PIPELINE = Path("pipeline.toml")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed when no terminal is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]


def show(document: object, render: Callable[[], Any]) -> None:
    """Print a JSON document, or else what `render` returns."""
    if document is not None:
        import json

        typer.echo(json.dumps(document, indent=2))
    else:
        from anabranch.runtime.console import PlainConsole

        PlainConsole().print(render())


def say(sentence: str) -> None:
    """Print a sentence that may have text of state files in it."""
    typer.echo(printable(sentence))


def confirm(command: str, preview: str, *, yes: bool) -> None:
    """Ask before a change that is hard or impossible to undo, unless `--yes` was given.

    Raises:
        SettingsError: no terminal is there to ask at, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingsError(
            f"{command} asks first, and there is no terminal to ask at; add --yes, or --dry-run to see what it would do"
        )
    sys.stderr.write(f"{printable(preview)}\nContinue? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SettingsError("nothing was changed")


def run_command(start: Callable[[], Exit | None], *, private: bool = True) -> int:
    """Run a command, and return its exit code.

    What it writes is readable by this user alone, since it may have events; `private=False` is for files that are made
    to be passed on.
    """
    with private_files() if private else contextlib.nullcontext():
        return run(start)
