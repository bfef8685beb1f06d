"""`anabranch init`: writes the example pipeline, to begin with."""

import importlib.resources
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from anabranch.command import command, say
from anabranch.commands.event_files.files import Delimiter, FileFormat, SourceFormat
from anabranch.commands.init.files import write_files
from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs

FILES = ("pipeline.toml", "my_model.py", "events.jsonl")


@command("anabranch init digits && cd digits", private=False)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into; created if it does not exist.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    subject: Annotated[
        str | None,
        typer.Option(
            metavar="SUBJECT", help="Subject of a Schema Registry that the fields come from, instead of the example."
        ),
    ] = None,
    registry: Annotated[
        str, typer.Option(metavar="URL", help="Address of the registry; credentials come from the environment.")
    ] = "http://localhost:8081",
    history: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Parquet files that the fields come from, by path or URL, instead of the example.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="JSON lines, CSV or Parquet with events, whose first 10,000 say the fields."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="The field to predict; with --from on a terminal, asked for without."),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="N|A,B", help="With --subject: the number of classes of the label, or their names."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="With --subject or --from: the field that names whom an event is about."),
    ] = None,
    format_: FileFormat = None,
    delimiter: Delimiter = None,
) -> None:
    """Write an example pipeline, or one for a file of events, a subject of a Schema Registry or a history."""
    given = [name for name, value in (("from", source), ("subject", subject), ("history", history)) if value]
    if len(given) > 1:
        raise SettingsError(f"--{given[0]} and --{given[1]} exclude each other: each says where the fields come from")
    if subject is not None:
        from anabranch.commands.init.subject import SubjectOptions, write_subject

        options = SubjectOptions(subject, registry, label, classes, key)
        paths = write_subject(folder, options, os.environ, force=force)
        after = f'set stream.bootstrap_servers, then run "anabranch doctor -c {shlex.quote(str(paths[0]))}"'
        typer.echo(f"wrote {', '.join(path.name for path in paths)} to {folder}; {after}")
        return
    remarks: list[str] = []
    if source is not None:
        paths, remarks = write_sampled(folder, source, label, key, kind=format_, delimiter=delimiter, force=force)
        commands = next_commands(folder, _NEXT_OF_FILE.format(shlex.quote(str(source.absolute()))))
    elif history is None and label is None:
        paths, commands = write_example(folder, force=force), next_commands(folder)
    else:
        paths, remarks = write_history(folder, history, label, force=force)
        commands = next_commands(folder, NEXT_OF_HISTORY)
    say(*remarks)
    typer.echo(f"wrote {', '.join(path.name for path in paths)} to {folder}; next:\n\n{commands}")


def write_example(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the example's files into `folder`, which is made if need be, and return their paths.

    Raises:
        SettingsError: one of them is there already and `force` is not given, or the folder cannot be written.
    """
    template = importlib.resources.files("anabranch.commands.init") / "template"
    return write_files(folder, {name: (template / name).read_text(encoding="utf-8") for name in FILES}, force=force)


def write_history(
    folder: Path, pattern: str | None, label: str | None, *, force: bool = False
) -> tuple[list[Path], list[str]]:
    """Write a pipeline for the Parquet files of a glob or URL into `folder`; return its paths, and remarks on columns.

    Raises:
        SettingsError: as `write_example`; or the files are missing, cannot be read or have no column `label`.
        HistoryAwayError: the storage does not answer.
    """
    if pattern is None or label is None:
        raise SettingsError("--history and --label go together: which files, and which of their columns to predict")
    with needs("--history", "pyarrow", "arrow"):
        from anabranch.commands.init.history import described_pipeline
    contents, remarks = described_pipeline(folder, pattern, label)
    return write_files(folder, contents, force=force), remarks


def write_sampled(
    folder: Path,
    source: Path,
    label: str | None,
    key: str | None = None,
    *,
    kind: SourceFormat | None = None,
    delimiter: str | None = None,
    force: bool = False,
) -> tuple[list[Path], list[str]]:
    """Write a pipeline for the events of a file into `folder`; return its paths, and remarks on fields.

    Without a label, a terminal is asked for it.

    Raises:
        SettingsError: as `write_example`; or the file cannot be read, or an option names no field of it.
    """
    from anabranch.commands.init.sample import labels_of, sampled_pipeline

    if label is None and sys.stdin.isatty():
        fields = labels_of(source, kind, delimiter)
        typer.echo(f"The fields are {', '.join(fields)}.", err=True)
        label = typer.prompt("Which one is to be predicted", err=True)
    contents, remarks = sampled_pipeline(folder, source, label, key, kind=kind, delimiter=delimiter)
    return write_files(folder, contents, force=force), remarks


_NEXT_OF_FILE = """\
  anabranch backtest {0}    # how well it would have learned
  anabranch produce {0} --create-topic    # needs the Kafka broker that pipeline.toml names
  anabranch up                                     # learn from the topic, and serve
"""
_NEXT = """\
  anabranch produce events.jsonl --create-topic    # needs the Kafka broker that pipeline.toml names
  anabranch up                                     # learn from the topic, and serve
"""
NEXT_OF_HISTORY = """\
  anabranch doctor                                 # checks the files, the topic and the model
  anabranch up                                     # learn the history, then from the topic, and serve
"""


def next_commands(folder: Path, commands: str = _NEXT) -> str:
    """Return what to type after `init`."""
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {shlex.quote(str(folder))}\n"
    return f"{enter}{commands}"
