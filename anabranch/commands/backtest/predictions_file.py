"""`--output`: the events that a backtest has scored, one row each, as Parquet, CSV or JSON lines.

Legend: B events of a call.
"""

import contextlib
import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anabranch.commands.backtest.runs import PredictedEvents
from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.ingest.events.schema import Label

_ROWS = 8192
"""Events that are written at once."""
_SUFFIXES = (".parquet", ".csv", ".jsonl")

Table = dict[str, list[Any]]
"""Columns of some rows, as plain values."""


class PredictionsFile:
    """Writes each event: `event`, its number in the file from 0 on; `time`, in seconds since 1970, 0 where it has none;
    `label`; what the task predicts, by name; `loss`; and `version`, which servers would have had."""

    def __init__(self, label: Label, write: Callable[[Table], object]) -> None:
        """Take the label of the schema, and what writes some rows."""
        self._names, self._write = label.names if label.one_of else None, write
        self._rows: Table = {}

    def add(self, events: PredictedEvents) -> None:
        """Write the next B events, or keep them until there are more."""
        with torch.no_grad():
            predicted = {name: values.tolist() for name, values in events.task.predict(events.output_B).items()}
        columns = events.columns
        new = {
            "event": columns["offset"].tolist(),
            "time": (columns["time_ms"].astype(np.float64) / 1000).tolist(),
            "label": self._named(columns["label"].tolist()),
            **predicted,
            "prediction": self._named(predicted["prediction"]) if "prediction" in predicted else [],
            "loss": events.loss_B.tolist(),
            "version": [events.version] * len(events.loss_B),
        }
        for name, values in new.items():
            if values:
                self._rows.setdefault(name, []).extend(values)
        if len(self._rows.get("event", ())) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is kept."""
        if self._rows:
            self._write(self._rows)
        self._rows = {}

    def _named(self, classes: list[Any]) -> list[Any]:
        return classes if self._names is None else [self._names[each] for each in classes]


@contextlib.contextmanager
def predictions_file(path: Path, label: Label) -> Iterator[PredictionsFile]:
    """Yield what writes a file, by its suffix; after an error the file is as it was.

    Raises SettingsError where it cannot be written.
    """
    if path.suffix not in _SUFFIXES:
        raise SettingsError(f"--output {path}: name a file that ends with {', '.join(_SUFFIXES)}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(temporary.unlink, missing_ok=True)
            with contextlib.ExitStack() as files:
                kind = {".parquet": _parquet, ".csv": _csv, ".jsonl": _json_lines}[path.suffix]
                file = PredictionsFile(label, kind(temporary, files))
                yield file
                file.flush()
            temporary.replace(path)
    except OSError as exc:
        raise SettingsError(f"--output {path} cannot be written: {exc.strerror or exc}") from exc


def _rows_of(table: Table) -> Iterator[Mapping[str, Any]]:
    return (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))


def _json_lines(path: Path, stack: contextlib.ExitStack) -> Callable[[Table], object]:
    file = stack.enter_context(path.open("w", encoding="utf-8"))
    return lambda table: file.writelines(json.dumps(row) + "\n" for row in _rows_of(table))


def _csv(path: Path, stack: contextlib.ExitStack) -> Callable[[Table], object]:
    file = stack.enter_context(path.open("w", encoding="utf-8", newline=""))
    writer = csv.writer(file)

    def write(table: Table) -> None:
        if not file.tell():
            writer.writerow(table)
        for row in zip(*table.values(), strict=True):
            writer.writerow([json.dumps(each) if isinstance(each, list) else each for each in row])

    return write


def _parquet(path: Path, stack: contextlib.ExitStack) -> Callable[[Table], object]:
    with needs(f"--output {path}", "pyarrow", "arrow", "write .csv or .jsonl"):
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    file = stack.enter_context(path.open("wb"))
    writer: Any = None

    def write(table: Table) -> None:
        nonlocal writer
        columns = {name: pa.array(values) for name, values in table.items()}
        columns["version"] = pa.array(table["version"], pa.int64())  # all may be None
        if writer is None:
            writer = stack.enter_context(ParquetWriter(file, pa.table(columns).schema))
        writer.write_table(pa.table(columns).cast(writer.schema))

    return write
