"""Seconds from the start of a learner on an empty disk to its next step, with all state in an object store.

    python -m benchmarks.fresh_host [--quick] [--json FILE] [--save] [--only file s3] [--rows N]

A learner with a disk tier fills its store from Kafka, 1 KB an event, and ends; its state is in the object store by
then. The next learner begins in another folder with nothing but its settings, and reads on:

    file   the object store is a folder of the same disk
    s3     it is SeaweedFS, an S3 server, on the same machine

`seconds_to_next_step` counts from the start of the process, to the report that has the first step. The lease is
released, as where a pod is stopped; after a host is lost, `storage.lease` comes before it. `busy_seconds_to_next_step`
is the CPU time of the process until then, and `peak_resident_bytes` its memory, both without ingest and the S3 server.
`lost` and `twice` compare the ledger with the topic.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from anabranch.ingest.kafka.producer import EventProducer
from benchmarks.harness.events import CLASSES, Events
from benchmarks.harness.pipeline import (
    LearnerProcess,
    Stream,
    broker,
    make_topic,
    messages,
    packed,
    pipeline,
    schema_of,
)
from benchmarks.harness.results import Results, Target, options
from tests.support.s3 import started_s3

PARTS = ("file", "s3")
EVENTS = Events(256)
BATCH = 1024
_AT_ONCE = 20_000
TARGETS = {
    **{f"seconds_to_next_step_{part}": Target(30) for part in PARTS},
    **{f"{what}_{part}": Target(0, exact=True) for part in PARTS for what in ("lost", "twice", "missing")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS, "a store of 100 MB in place of 1 GB")
    parser.add_argument("--rows", type=int, help="events of the store")
    chosen = parser.parse_args()
    rows = chosen.rows or (2_000, 100_000, 1_000_000)[chosen.form]
    results = Results("fresh_host", TARGETS)
    with broker(None) as bootstrap:
        for part in chosen.only or PARTS:
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, storage(part, Path(name)) as section:
                measure(results, part, bootstrap, Path(name), section, rows)
    results.write(chosen)


@contextlib.contextmanager
def storage(part: str, folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the section `[storage]`."""
    if part == "file":
        yield {"url": (folder / "bucket").as_uri()}
        return
    with started_s3(folder / "s3") as server:
        prefix = server.prefix()
        yield {"url": prefix.url, "options": prefix.options}


def measure(results: Results, part: str, bootstrap: str, folder: Path, section: Mapping[str, Any], rows: int) -> None:
    """Fill a store, and go on elsewhere."""
    results.title(f"{part}: a store of {rows} events of {EVENTS.row_bytes} bytes on disk")
    described = schema_of({"x": EVENTS.x(EVENTS.columns(0, 1)["offset"])}, CLASSES)
    stream = Stream(bootstrap, f"fresh-{part}-{time.time_ns()}", described, rows)
    document = {**pipeline(stream, {"factory": "mlp", "args": {"widths": [256, CLASSES]}}, 0, sections(rows))}
    document["storage"] = section
    producer = EventProducer(make_topic(stream), stream.topic)
    with contextlib.closing(producer):
        producer.open()
        with LearnerProcess(folder / "lost", document) as learner:
            # In parts: the embedded broker answers with all that it has.
            for first in range(0, rows, _AT_ONCE):
                sent = min(rows, first + _AT_ONCE)
                send(producer, described, first, sent)
                learner.wait_for(lambda report, sent=sent: sum(report.outcomes.values()) >= sent - _AT_ONCE)
            learner.wait_for(lambda report: sum(report.outcomes.values()) >= rows)
            learner.stop()
        send(producer, described, rows, rows + 10 * BATCH)
        begin = time.monotonic()
        with LearnerProcess(folder / "fresh", document) as learner:
            process, peak = psutil.Process(learner.process.pid), 0
            while (report := learner.report()) is None or not report.steps_since_start:
                peak = max(peak, process.memory_info().rss)
                time.sleep(0.05)
            results.add(f"seconds_to_next_step_{part}", time.monotonic() - begin, f"of {report.steps} steps")
            results.add(f"busy_seconds_to_next_step_{part}", learner.busy_seconds(), "CPU time of the process")
            results.add(f"peak_resident_bytes_{part}", peak)
            report = learner.wait_for(lambda report: sum(report.outcomes.values()) >= rows + 10 * BATCH)
            counted = sum(report.outcomes.values())
            results.add(f"lost_{part}", max(0, rows + 10 * BATCH - counted), "events of the topic")
            results.add(f"twice_{part}", max(0, counted - rows - 10 * BATCH), "events of the topic")
            results.add(f"missing_{part}", report.replay_lost, "events of the store")
            learner.stop()


def send(producer: EventProducer, described: Mapping[str, Any], begin: int, end: int) -> None:
    """Send events as packed rows, many a message."""
    for first in range(begin, end, _AT_ONCE):
        columns = EVENTS.columns(first, min(_AT_ONCE, end - first))
        for message in messages(packed(described, {"x": columns["feature.x"]}, columns["label"])):
            producer.send(message)
    producer.flush()


def sections(rows: int) -> dict[str, Any]:
    """Return the sections of the settings that matter: the store has a disk tier, of which a part is in memory."""
    tier = {"bytes": 2 * rows * EVENTS.row_bytes}
    return {
        "learner": {"batch_size": BATCH, "replay_ratio": 0.1, "stop_timeout": "2m"},
        "checkpoints": {"every": "10s"},
        "replay": {"capacity": rows, "device_bytes": 64_000_000, "disk": tier},
    }


if __name__ == "__main__":
    main()
