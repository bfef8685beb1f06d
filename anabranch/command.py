"""What all commands share: the decorator that makes a command of a function, their options, output and questions."""

import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from anabranch.config.loader import Config, Examined, examine_config, load_config
from anabranch.core.durations import format_duration, parse_duration
from anabranch.core.errors import SettingsError
from anabranch.core.logs import printable
from anabranch.runtime.lifecycle import Exit, run
from anabranch.runtime.private_state import private_files

PIPELINE = Path("pipeline.toml")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed when no terminal is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]

_ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="The pipeline's file.", metavar="FILE")]
_Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Use this value of a setting, such as learner.batch_size=64; repeatable."
    ),
]


class ConfigFile:
    """What `--config` and `--set` name, before it is read."""

    def __init__(self, path: Path, assignments: Iterable[str]) -> None:
        self.path = path
        self.assignments = tuple(assignments)

    def load(self) -> Config:
        """Read and check the settings; raises SettingsError."""
        return load_config(self.path, assignments=self.assignments)

    def examine(self) -> Examined:
        """Read the settings with everything that is wrong with them; raises SettingsError where there is no file."""
        return examine_config(self.path, assignments=self.assignments)

    def arguments(self) -> list[str]:
        """Return the options that name them to a daemon."""
        return ["-c", str(self.path), *(part for each in self.assignments for part in ("--set", each))]


def time_option(text: str, *, default: str, least: timedelta = timedelta(0)) -> Any:
    """Return an option that takes a duration as settings write it, such as `30s`; its help shows the default."""

    def duration(value: str | timedelta) -> timedelta:
        try:
            found = parse_duration(value)
        except ValueError as exc:
            raise typer.BadParameter(f"{value!r}: {exc}") from exc
        if found < least:
            raise typer.BadParameter(f"{value} is shorter than {format_duration(least)}")
        return found

    return typer.Option(parser=duration, metavar="TIME", help=text, show_default=default)


def command(example: str, *, private: bool = True) -> Callable[[Callable[..., Exit | None]], Any]:
    """Make a command of a function: its name, its docstring is the help, its parameters are the options.

    A parameter of type `Config` or `ConfigFile` becomes `--config` and `--set`. An error of ours is printed as one
    sentence. What the command writes is readable by this user alone, since it may have events; `private=False` is for
    files that are made to be passed on.
    """

    def decorate(function: Callable[..., Exit | None]) -> Any:
        hints = get_type_hints(function, include_extras=True)
        source = hints.get("config")

        @functools.wraps(function)
        def call(**arguments: Any) -> int:
            def start() -> Exit | None:
                if source is not None:
                    file = ConfigFile(arguments["config"], arguments.pop("overrides") or ())
                    arguments["config"] = file.load() if source is Config else file
                return function(**arguments)

            with private_files() if private else contextlib.nullcontext():
                return run(start)

        signature = inspect.Signature(list(_parameters(function, hints)))
        call.__signature__ = signature  # type: ignore[attr-defined] # typer reads it, and no type has it
        call.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()} | {"return": int}
        app = typer.Typer(add_completion=False)
        app.command(function.__name__.strip("_").replace("_", "-"), epilog=f"Example: {example}")(call)
        return typer.main.get_command(app)

    return decorate


def _parameters(function: Callable[..., Any], hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "config":
            only = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(name, only, default=PIPELINE, annotation=_ConfigPath)
            yield inspect.Parameter("overrides", only, default=None, annotation=_Assignments)
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])


def output(document: object, render: Callable[[], Any]) -> None:
    """Print a JSON document, or else what `render` returns."""
    if document is not None:
        typer.echo(json.dumps(document, indent=2))
    else:
        from anabranch.runtime.console import PlainConsole

        PlainConsole().print(render())


def say(*sentences: str) -> None:
    """Print sentences that may have text of state files in them, one a line."""
    for sentence in sentences:
        typer.echo(printable(sentence))


def confirm(name: str, preview: str, *, yes: bool) -> None:
    """Ask before a change of what is served or stored, unless `--yes` was given.

    Raises:
        SettingsError: no terminal is there to ask at, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingsError(
            f"{name} asks first, and there is no terminal to ask at; add --yes, or --dry-run to see what it would do"
        )
    sys.stderr.write(f"{printable(preview)}\nContinue? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SettingsError("nothing was changed")
