"""The command line: finds the file of the command that was typed. The words are the path below `anabranch/commands`.

A command is imported when it is named; the help of all of them loads no torch.
"""

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from anabranch.core.logs import LogFormat, LogLevel, LogSettings, configure_logging
from anabranch.core.users_code import UsersCodeError, entry_points_of, imported
from anabranch.runtime.lifecycle import Exit

SUMMARIES = {
    "Try it": {
        "demo": "Run a whole pipeline on this machine, broker and stream included.",
        "init": "Write an example pipeline, or one for your own events.",
        "backtest": "Train on the events of a file and print the accuracy. No Kafka needed.",
        "broker": "Run a Kafka broker for development.",
    },
    "Prepare a pipeline": {
        "config": "Check the settings, or show what they resolve to.",
        "doctor": "Check config, broker, model and machine, and suggest fixes.",
        "plan": "Estimate memory, disk writes, freshness and maximum throughput.",
        "topics": "Create the topics of a pipeline.",
    },
    "Run it": {
        "up": "Run learner and serving.",
        "learn": "Run the learner alone.",
        "serve": "Run serving alone.",
        "status": "Show health, lag, throughput, accuracy and the served version.",
        "produce": "Send the events of a file to the topic.",
        "predict": "Ask the running server for predictions for the events of a file.",
    },
    "Control what is served and learned": {
        "versions": "List model versions and control which one is served.",
        "checkpoints": "Show what a restart of the learner can resume from, and go back to an older one.",
        "search": "Show the challengers of \\[search], and decide which settings the model takes.",
        "replay": "Show what the replay store holds.",
        "dead-letters": "List messages that the pipeline could not use, and send them again.",
        "undo": "Undo events: serve and learn without them, weights included.",
        "erase": "Erase events from everything that is stored.",
    },
}
"""What each word does, by the panel of the help that has it."""
GROUPS = {
    "config": ("check", "show", "schema"),
    "topics": ("create",),
    "versions": ("ls", "show", "diff", "export", "rebuild", "lineage", "serve", "rollback", "reject", "unpin"),
    "checkpoints": ("ls", "show", "restore", "backup"),
    "search": ("status", "promote", "pin", "unpin"),
    "replay": ("stats", "sample"),
    "dead-letters": ("ls", "resend"),
}
"""The words that follow a word."""
COMMANDS = "anabranch.commands"
"""The group of the entry points that are commands of other packages."""
_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""Click's, from wherever typer has it: some versions have their own copy."""


def find(*words: str) -> Any:
    """Import a command by its words: from `a/b.py` or `a/b/command.py`, or from `a.py`, which has a whole group."""
    path = [word.replace("-", "_") for word in words]
    module = importlib.import_module(f"anabranch.commands.{path[0]}")
    for name in (*path[1:], "command"):
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{module.__name__}.{name}")
    return without_values_of_flags(getattr(module, path[-1]))


def without_values_of_flags(command: Any) -> Any:
    """Return a command of typer, which would print `<bool>` as the value of each flag."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command, **_HELP))):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return command


class _Modules(Mapping[str, Any]):
    """The commands of a group, each imported when it is asked for."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __getitem__(self, word: str) -> Any:
        if word not in GROUPS[self._group]:
            raise KeyError(word)
        return find(self._group, word)

    def __iter__(self) -> Iterator[str]:
        return iter(GROUPS[self._group])

    def __len__(self) -> int:
        return len(GROUPS[self._group])


class _Root(TyperGroup):
    """Lists summaries, and imports the command that is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {
            word: TyperCommand(word, callback=lambda: None, help=summary, rich_help_panel=panel)
            for panel, words in SUMMARIES.items()
            for word, summary in words.items()
        }

    def list_commands(self, ctx: Any) -> list[str]:
        """Return our words, and those of installed packages."""
        return [*super().list_commands(ctx), *entry_points_of(COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what the help has of a command."""
        ours = super().get_command(ctx, cmd_name)
        if ours is not None or (reference := entry_points_of(COMMANDS).get(cmd_name)) is None:
            return ours
        package = reference.partition(":")[0].partition(".")[0]
        panel, summary = "Commands of other packages", f"Of the package {package}."
        return TyperCommand(cmd_name, callback=lambda: None, help=summary, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the word, its command or group, and the arguments that follow."""
        word, known, rest = super().resolve_command(ctx, args)
        if word is None or known is None:
            return word, None, rest
        if word not in self.commands:
            try:
                return word, without_values_of_flags(imported(entry_points_of(COMMANDS)[word])), rest
            except UsersCodeError as exc:
                raise UsageError(f"{word}: {exc}") from exc
        if word not in GROUPS:
            return word, find(word), rest
        example = f"Example: anabranch {word} {GROUPS[word][0]}"
        modules: Any = _Modules(word)
        group = TyperGroup(name=word, commands=modules, help=known.help, epilog=example, no_args_is_help=True)
        return word, without_values_of_flags(group), rest


app = typer.Typer(
    name="anabranch",
    help="Keeps a PyTorch model learning from a Kafka stream while it serves it.",
    epilog="Begin with: anabranch demo",
    cls=_Root,
    no_args_is_help=True,
    # Tracebacks with the values of variables would print secrets.
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)


@functools.cache
def command_tree() -> Any:
    """Return the root command."""
    return without_values_of_flags(typer.main.get_command(app))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 a bug, 2 bad settings or input, 3 something is unreachable."""
    try:
        code = command_tree().main(arguments, "anabranch", standalone_mode=False)
    except UsageError as exc:
        where = exc.ctx.command_path if exc.ctx else "anabranch"
        sentence = exc.format_message().rstrip(".")
        if sentence:  # empty when there was no argument: the help has been printed
            sys.stderr.write(f'{where}: {sentence[:1].lower()}{sentence[1:]} (see "{where} --help")\n')
        return Exit.SETTINGS
    return int(code or Exit.DONE)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(installed_version("anabranch"))
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log at level debug.")] = False,
    log_level: Annotated[
        LogLevel, typer.Option(metavar="LEVEL", help="Write log lines from this level on: debug, info, warning, error.")
    ] = "info",
    log_format: Annotated[
        LogFormat, typer.Option(metavar="FORMAT", help="Format of log lines: text, or json, one object a line.")
    ] = "text",
) -> None:
    configure_logging(LogSettings("debug" if verbose else log_level, log_format))
