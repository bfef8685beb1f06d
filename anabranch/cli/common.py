"""What the commands of the command line share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.runtime.lifecycle import Exit, configure_logging, run
from anabranch.runtime.printable import printable

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", help="The pipeline's file.", show_default=True, metavar="FILE")
]
PIPELINE = Path("pipeline.toml")


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


def run_command(start: Callable[[], Exit | None]) -> int:
    """Run a command, and return its exit code."""
    configure_logging()
    return run(start)
