"""`anabranch backtest`."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from anabranch.command import AsJson, command, output
from anabranch.commands.event_files.files import Delimiter, FileArgument, FileFormat
from anabranch.config.loader import Config
from anabranch.runtime.lifecycle import stop_on_signals


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
    as_json: AsJson = False,
) -> None:
    """Run the pipeline on the events of a file, without Kafka: predict, then train, and judge versions.

    Nothing is written but into a temporary folder. Ctrl-C ends it with what is known by then.
    """
    from anabranch.commands.backtest.measure import run_backtest
    from anabranch.commands.backtest.render import render_backtest
    from anabranch.commands.backtest.rows import EventsOfFile

    rows = EventsOfFile(source, format_, delimiter)
    with as_no_daemon(), stop_on_signals() as stop:
        result = run_backtest(config.pipeline, rows, every=every, label_time=label_time, compare=compare, stop=stop)
    output(result.document() if as_json else None, lambda: render_backtest(result))
    if result.skipped:
        first = f"; the first: {result.first_fault}" if result.first_fault else ""
        sys.stderr.write(f"skipped {result.skipped:,} events without a label or that cannot be used{first}\n")


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
