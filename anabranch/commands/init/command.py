"""`anabranch init`: writes the example pipeline, to begin with."""

import importlib.resources
import os
import re
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.command import command, output, say
from anabranch.commands.event_files.files import Delimiter, FileFormat, is_named_as_file
from anabranch.commands.init.files import refuse_existing, write_files
from anabranch.commands.init.sample import EventSample, sample_of_file, sampled_pipeline
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.runtime.lifecycle import stop_on_signals

if TYPE_CHECKING:
    from anabranch.commands.init.topic import SampledMessage

_BACKTEST_SECONDS = 60.0
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
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
            "--from",
            metavar="FILE|TOPIC",
            help="JSON lines, CSV or Parquet with events, or a topic: the first or newest 10,000 say the fields.",
        ),
    ] = None,
    broker: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Kafka broker of a topic that --from names.")
    ] = "localhost:9092",
    no_backtest: Annotated[
        bool, typer.Option("--no-backtest", help="With --from: do not train on the events that were read.")
    ] = False,
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
    """Write an example pipeline, or one for a file or a topic of events, a subject of a Schema Registry or a history.

    With --from, it also trains on the events that were read, and prints how well it predicts each before.
    """
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
        refuse_existing([folder / name for name in ("pipeline.toml", "my_model.py")], force=force)
        commands = next_commands(folder, NEXT_OF_HISTORY)
        messages = None
        if source.exists() or not _TOPIC.fullmatch(str(source)) or is_named_as_file(source):
            sample = sample_of_file(source, format_, delimiter)
            commands = next_commands(folder, _NEXT_OF_FILE.format(shlex.quote(str(source.absolute()))))
        else:
            from anabranch.commands.init.topic import TopicSource, sample_of_topic

            sample, messages = sample_of_topic(TopicSource(str(source), broker, registry), os.environ)
        paths, remarks = write_sampled(folder, sample, label, key, force=force)
        say(*remarks)
        first_results(paths[0], sample, messages, backtest=not no_backtest)
        remarks = []
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
    folder: Path, sample: EventSample, label: str | None, key: str | None = None, *, force: bool = False
) -> tuple[list[Path], list[str]]:
    """Write a pipeline for events into `folder`; return its paths, and remarks on fields.

    Without a label, a terminal is asked for it.

    Raises:
        SettingsError: as `write_example`; or an option names no field of the events.
    """
    if label is None and sys.stdin.isatty():
        typer.echo(f"The fields are {', '.join(sample.fields)}.", err=True)
        label = typer.prompt("Which one is to be predicted", err=True)
    contents, remarks = sampled_pipeline(folder, sample, label, key)
    return write_files(folder, contents, force=force), remarks


def first_results(
    config: Path, sample: EventSample, messages: "Sequence[SampledMessage] | None", *, backtest: bool
) -> None:
    """Print how many messages the new pipeline can use, if they are from a topic, and its backtest."""
    loaded = load_config(config)
    if messages is not None:
        from anabranch.commands.init.topic import usable

        say(usable(loaded.pipeline.stream, loaded.pipeline.events, messages))
    if not backtest:
        return
    from anabranch.commands.backtest.command import as_no_daemon
    from anabranch.commands.backtest.measure import BacktestProgress, run_backtest
    from anabranch.commands.backtest.render import render_backtest
    from anabranch.commands.backtest.rows import EventsInMemory

    def show(progress: BacktestProgress) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{progress.events:,} of {len(events):,} events")
            sys.stderr.flush()

    events = sample.events()
    typer.echo(f"backtest on {sample.source}, for {_BACKTEST_SECONDS:.0f} s at most:", err=True)
    with as_no_daemon(), stop_on_signals() as stop:
        timer = threading.Timer(_BACKTEST_SECONDS, stop.set)
        timer.start()
        try:
            result = run_backtest(loaded.pipeline, EventsInMemory(events, sample.where), progress=show, stop=stop)
        except SettingsError:
            if not stop.is_set():
                raise
            say("the backtest was stopped before the first event was scored")
            return
        finally:
            timer.cancel()
    if result.stopped:
        say(f"the backtest was stopped after {result.events:,} of {len(events):,} events")
    output(None, lambda: render_backtest(result))


_NEXT_OF_FILE = """\
  anabranch backtest {0}    # the same on the whole file
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
