"""`anabranch backtest`."""

import sys
from typing import Annotated

import typer

from anabranch.command import AsJson, command, output
from anabranch.commands.event_files.files import Delimiter, FileArgument, FileFormat
from anabranch.config.loader import Config


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
    """For each event of a file, predict, then train, without Kafka. Print accuracy, measures and baselines.

    The step and the store are the learner's, with all its settings. No version is published.
    """
    from anabranch.commands.backtest.measure import render_backtest, run_backtest

    result = run_backtest(
        config, source, every=every, kind=format_, delimiter=delimiter, label_time=label_time, compare=compare
    )
    output(result.document() if as_json else None, lambda: render_backtest(result))
    if result.skipped:
        first = f"; the first: {result.first_fault}" if result.first_fault else ""
        sys.stderr.write(f"skipped {result.skipped:,} events without a label or that cannot be used{first}\n")
