"""`anabranch backtest`."""

import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.command import AsJson, command, output
from anabranch.commands.event_files.files import STDIN, Delimiter, FileArgument, FileFormat
from anabranch.config.loader import Config, load_config
from anabranch.core.errors import SettingsError
from anabranch.runtime.lifecycle import stop_on_signals

if TYPE_CHECKING:
    from anabranch.commands.backtest.measure import BacktestProgress


@command("anabranch backtest events.jsonl")
def backtest(
    source: FileArgument,
    config: Config,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Events between two lines; by default about 20 lines.")
    ] = None,
    format_: FileFormat = None,
    delimiter: Delimiter = None,
    label_time: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column with the time at which the label is known: it comes then, as stream.labels says.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also without replay and, with --label-time, by other policies for late labels."
        ),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=A,B,...", help="Run with each of these values of a setting, and compare them."),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the prediction, label, loss and version of each event: .parquet, .csv or .jsonl.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline on the events of a file, without Kafka: predict, then train, and judge versions.

    Nothing is written but into a temporary folder. Ctrl-C ends it with what is known by then.
    """
    from anabranch.commands.backtest.measure import run_backtest
    from anabranch.commands.backtest.predictions_file import predictions_file
    from anabranch.commands.backtest.render import render_backtest
    from anabranch.commands.backtest.rows import EventsOfFile
    from anabranch.commands.backtest.sweep import render_sweep, run_sweep, values_of
    from anabranch.ingest.events.schema import Schema

    with contextlib.ExitStack() as stack:
        if sweep is not None:
            if compare or predictions is not None or every is not None:
                raise SettingsError("--sweep shows one line for each value: leave out --compare, --output and --every")
            key, values = values_of(sweep)
            specs = {
                value: load_config(config.path, assignments=(*config.assignments, f"{key}={value}")).pipeline
                for value in values
            }
        if predictions is not None and predictions.exists() and source.exists() and predictions.samefile(source):
            raise SettingsError(f"--output {predictions} is the file that is read: name another")
        if source == STDIN and (compare or sweep is not None):
            file = stack.enter_context(tempfile.NamedTemporaryFile())
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            source = Path(file.name)
        rows = EventsOfFile(source, format_, delimiter)
        written = (predictions_file(predictions, Schema(config.pipeline.events).label),) if predictions else ()
        sinks = [stack.enter_context(each) for each in written]
        stack.enter_context(as_no_daemon())
        stop = stack.enter_context(stop_on_signals())
        with _shown() as progress:
            if sweep is not None:
                swept = run_sweep(key, specs, rows, label_time=label_time, progress=progress, stop=stop)
            else:
                result = run_backtest(
                    config.pipeline,
                    rows,
                    every=every,
                    label_time=label_time,
                    compare=compare,
                    progress=progress,
                    stop=stop,
                    sinks=sinks,
                )
    if sweep is not None:
        output(swept.document() if as_json else None, lambda: render_sweep(swept))
        return
    output(result.document() if as_json else None, lambda: render_backtest(result))
    if result.skipped:
        first = f"; the first: {result.first_fault}" if result.first_fault else ""
        sys.stderr.write(f"skipped {result.skipped:,} events without a label or that cannot be used{first}\n")


@contextlib.contextmanager
def _shown() -> Iterator[Callable[["BacktestProgress"], object]]:
    """Yield what to call after each round: on a terminal it shows how far it is, and when it is expected to end."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(each: "BacktestProgress") -> None:
            runs = f"run {each.run} of {each.runs}, " if each.runs > 1 else ""
            progress.update(task, description=f"{runs}{each.events:,} events")
            if each.part is not None:
                progress.update(task, total=each.runs, completed=each.run - 1 + each.part)

        yield show


@contextlib.contextmanager
def as_no_daemon() -> Iterator[None]:
    """Log no steps of a start, which are those of a daemon."""
    logger = logging.getLogger("anabranch")
    before = logger.level
    logger.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(before)
