"""The rate at which ingest reads the history, over that of pyarrow's bare scan, and the memory that it takes.

    python -m benchmarks.backfill [--quick] [--json FILE] [--save] [--only PART ...] [--rows N]

    rate    rows a second from Parquet files through ingest to blocks in the learner, over those of a loop that scans
            the same columns of the same files with pyarrow and discards them: of 64 numbers in one column and a label;
            and `narrow`, of four columns of numbers, a time and a label, which pyarrow copies at the speed of memory
    memory  resident memory of the ingest process at its highest, over that up to the first million rows

Both arms of `rate` read all files in each turn, in turns, from the page cache. The bare scan takes pyarrow's defaults.
The learner's end releases each block at once, and its time counts from the first block to the last.
"""

import argparse
import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.pipeline import Stream, broker, make_topic
from benchmarks.harness.results import Form, Results, Target, options

TARGETS = {
    "backfill_over_scan": Target(0.9, least=True),
    "backfill_memory_growth": Target(1.05),
}
_FILES, _FIRST_ROWS = 10, 1_000_000
_POLL = timedelta(seconds=1)
_LABEL = {"name": "y", "classes": 10}
NARROW: dict[str, Any] = {
    "features": {name: {"dtype": "float32"} for name in ("a", "b", "c", "d")},
    "label": _LABEL,
    "time": {"name": "time"},
}
WIDE: dict[str, Any] = {"features": {"x": {"dtype": "float32", "shape": [64]}}, "label": _LABEL}


@dataclass(frozen=True)
class Sizes:
    """Rows of the files of each part, and the rounds of `rate`."""

    narrow: int
    wide: int
    memory: int
    rounds: int


SIZES = (
    Sizes(20_000, 4_000, 20_000, 1),
    Sizes(2_000_000, 400_000, 4_000_000, 5),
    Sizes(10_000_000, 2_000_000, 10_000_000, 15),
)
"""Of each form."""


def write_files(folder: Path, rows: int, schema: dict[str, Any]) -> None:
    """Write random rows as Parquet files, with pyarrow's defaults."""
    folder.mkdir()
    generator, each = np.random.default_rng(0), rows // _FILES
    for number in range(_FILES):
        columns: dict[str, Any] = {}
        for name, feature in schema["features"].items():
            size = int(np.prod(feature.get("shape", [])))
            values = pa.array(generator.standard_normal(each * size, np.float32))
            columns[name] = pa.FixedSizeListArray.from_arrays(values, size) if "shape" in feature else values
        columns["y"] = generator.integers(0, 10, each)
        if "time" in schema:
            columns["time"] = 1.7e9 + np.arange(number * each, (number + 1) * each) / 1000
        pq.write_table(pa.table(columns), folder / f"part-{number:04d}.parquet")


def scan(folder: Path, schema: dict[str, Any]) -> float:
    """Return the rows a second of a bare scan of the schema's columns."""
    names = [*schema["features"], "y", *(["time"] if "time" in schema else [])]
    rows, begin = 0, time.perf_counter()
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path) as file:
            rows += sum(len(batch) for batch in file.iter_batches(columns=names))
    return rows / (time.perf_counter() - begin)


class Backfill:
    """An ingest process that reads the files of a folder, and the learner's end of it."""

    def __init__(self, bootstrap: str, folder: Path, schema: dict[str, Any], buffer: str = "64MB") -> None:
        stream = Stream(bootstrap, f"backfill-{folder.name}-{os.urandom(4).hex()}", schema, 0)
        make_topic(stream)
        settings = StreamSettings.model_validate(
            {
                "bootstrap_servers": bootstrap,
                "topics": [stream.topic],
                "buffer_bytes": buffer,
                "backfill": {"files": [f"{folder}/*.parquet"]},
            }
        )
        self._reader = BlockReader(
            settings.resolved("backfill"), SchemaSettings.model_validate(schema), HoldOut(fraction=0.01, seed=0)
        )

    def __enter__(self) -> "Backfill":
        self._reader.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def blocks(self, rows: int) -> Iterator[int]:
        """Receive and release blocks up to a number of rows; yield the rows of each."""
        received = 0
        while received < rows:
            block = self._reader.poll(_POLL)
            if block is not None:
                count = len(block)
                received += count
                self._reader.release(block)
                yield count

    @functools.cached_property
    def process(self) -> psutil.Process:
        """The ingest process."""
        popen = self._reader._process.popen
        assert popen is not None
        return psutil.Process(popen.pid)


def backfill_rate(bootstrap: str, folder: Path, rows: int, schema: dict[str, Any]) -> float:
    """Return the rows a second after the first block."""
    with Backfill(bootstrap, folder, schema) as backfill:
        blocks = backfill.blocks(rows)
        next(blocks)
        begin = time.perf_counter()
        return sum(blocks) / (time.perf_counter() - begin)


def rate(results: Results, sizes: Sizes, bootstrap: str, folder: Path) -> None:
    """Measure ingest and the bare scan in turns."""
    for name, schema, rows in (("backfill", WIDE, sizes.wide), ("backfill_narrow", NARROW, sizes.narrow)):
        files = folder / name
        write_files(files, rows, schema)
        results.title(f"{name}: {rows:,} rows in {_FILES} files, {', '.join(schema['features'])} and a label")
        arms: dict[str, Callable[[], float]] = {
            "scan": functools.partial(scan, files, schema),
            "ingest": functools.partial(backfill_rate, bootstrap, files, rows, schema),
        }
        rates = interleave(arms, sizes.rounds)
        results.add(f"{name}_over_scan", ratio(rates["ingest"], rates["scan"]))
        for arm, found in rates.items():
            results.add(f"{name}_{arm}_rows_per_second", Spread.of(found))


def memory(results: Results, sizes: Sizes, bootstrap: str, folder: Path) -> None:
    """Measure the memory of ingest at its highest up to the first million rows, and up to the last row."""
    files, rows = folder / "memory", sizes.memory
    write_files(files, rows, NARROW)
    results.title(f"memory: ingest at its highest up to {_FIRST_ROWS:,} rows, and up to {rows:,}")
    first = most = received = 0
    # A buffer that the first rows fill: its pages count once they are written.
    with Backfill(bootstrap, files, NARROW, "8MB") as backfill:
        for count in backfill.blocks(rows):
            received += count
            most = max(most, backfill.process.memory_info().rss)
            first = most if received <= _FIRST_ROWS else first
    results.add("backfill_memory_growth", most / first)
    results.add("backfill_memory_bytes", float(most))


PARTS: dict[str, Callable[[Results, Sizes, str, Path], None]] = {"rate": rate, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    chosen = parser.parse_args()
    results = Results("backfill", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="backfill-"))).resolve()
        bootstrap = stack.enter_context(broker(None))
        for part in chosen.only or PARTS:
            results.fact(f"load_before_{part}", os.getloadavg()[0])
            PARTS[part](results, SIZES[chosen.form], bootstrap, folder)
    results.write(chosen)


if __name__ == "__main__":
    main()
