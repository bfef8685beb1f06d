"""`anabranch predict` and `backtest`: the commands that read events from a file."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, run_command, show

_File = Annotated[
    Path, typer.Argument(metavar="FILE", help="JSON lines, CSV (both also as .gz) or Parquet; - is stdin.")
]
_Format = Annotated[
    Literal["jsonl", "csv", "parquet"] | None,
    typer.Option("--format", metavar="FORMAT", help="jsonl, csv or parquet; by default from the suffix, else jsonl."),
]
_Delimiter = Annotated[
    str | None, typer.Option(metavar="CHARACTER", help="Between the cells of CSV; by default a comma.")
]


def predict(
    source: _File,
    config: ConfigPath = PIPELINE,
    format_: _Format = None,
    delimiter: _Delimiter = None,
    as_json: AsJson = False,
) -> int:
    """Ask the running server for a prediction for each event of a file, and print one JSON object a line."""

    def start() -> None:
        import json

        from anabranch.commands.predict import predict as predictions
        from anabranch.config.loader import load_config

        found = predictions(load_config(config), source, kind=format_, delimiter=delimiter)
        if as_json:
            show(list(found), lambda: None)
            return
        for prediction in found:
            typer.echo(json.dumps(prediction))

    return run_command(start)


def backtest(
    source: _File,
    config: ConfigPath = PIPELINE,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Events between two lines; by default about 20 lines.")
    ] = None,
    format_: _Format = None,
    delimiter: _Delimiter = None,
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
) -> int:
    """Train on the events of a file, without Kafka, and print the accuracy on each before it is trained on.

    The step and the store are the learner's, with all its settings. No version is published.
    """

    def start() -> None:
        from anabranch.commands.backtest import backtest as measure
        from anabranch.commands.backtest import render_backtest
        from anabranch.config.loader import load_config

        result = measure(
            load_config(config),
            source,
            every=every,
            kind=format_,
            delimiter=delimiter,
            label_time=label_time,
            compare=compare,
        )
        show(result.document() if as_json else None, lambda: render_backtest(result))
        if result.skipped:
            first = f"; the first: {result.first_fault}" if result.first_fault else ""
            sys.stderr.write(f"skipped {result.skipped:,} events without a label or that cannot be used{first}\n")

    return run_command(start)
