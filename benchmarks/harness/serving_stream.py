"""Stream: predictions from topic to topic.

Rate: messages that wait in a topic, packed rows of 784 floats, one event each, answered at `max_batch` 64 by an MLP of
1.0 M weights, over the rows a second of the same version alone on batches of 64 rows. Both have one thread of torch and
take turns, since other programs use the machine too.

Latency: single messages, 20 a second, from before they are sent until a reader of committed records has the answer.
`kafka` is the same for a message that is only copied: read, and written in a transaction, without a model. The added
latency is the difference of the medians.
"""

import contextlib
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from confluent_kafka import Consumer, Producer, TopicPartition

from anabranch.config.loader import load_config
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import row_dtype
from anabranch.ingest.kafka.producer import create_topics
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.serving.__main__ import deployment_of
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.reporting.report import read_report
from benchmarks.harness.interleave import Spread
from benchmarks.harness.pipeline import BrokenRunError
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess
from benchmarks.harness.version_publisher import VersionPublisher

TARGETS = {
    "stream_rate_over_model": Target(0.9, least=True),
    "stream_added_p50_seconds": Target(0.010),
}
_WIDTHS = [784, 900, 320, 10]
_MAX_BATCH = 64
_SCHEMA = {"features": {"x": {"dtype": "float32", "shape": [784]}}, "label": {"name": "y", "classes": 10}}
_PATIENCE_SECONDS = 120.0
_GAP_SECONDS = 0.05
_PARTITIONS = 4


def measure(results: Results, form: Form, bootstrap: str) -> None:
    """Measure the section."""
    messages, rounds, latencies = ((500, 1, 5), (20_000, 3, 100), (50_000, 5, 400))[form]
    results.title(f"stream: topic to topic, an MLP {_WIDTHS}, max_batch {_MAX_BATCH}")
    with tempfile.TemporaryDirectory(dir=".", prefix="stream-") as folder:
        bench = _Bench(Path(folder).resolve(), bootstrap)
        with bench.server() as server:
            bench.answer(messages // 5)  # warm-up
            rates, alone, ratios, busy = [], [], [], []
            for _ in range(rounds):
                (first, first_busy), before = bench.model_rate(), server.busy_seconds()
                rates.append(bench.answer(messages))
                spent = (server.busy_seconds() - before) / messages
                last, last_busy = bench.model_rate()
                alone.append((first + last) / 2)
                ratios.append(rates[-1] / alone[-1])
                busy.append(spent / ((first_busy + last_busy) / 2))
            results.add("stream_answers_per_second", Spread.of(rates))
            results.add("stream_model_rows_per_second", Spread.of(alone), "batches of 64 rows, nothing else")
            results.add("stream_rate_over_model", Spread.of(ratios))
            results.add("stream_busy_over_model", Spread.of(busy), "CPU time of a message, all threads of the server")
            ours = bench.latency(bench.input, bench.output, latencies)
        with bench.copier() as (source, target):
            copied = bench.latency(source, target, latencies)
    results.add("stream_p50_seconds", statistics.median(ours), "from append to the committed answer")
    results.add("stream_kafka_p50_seconds", statistics.median(copied), "the same of a copy without a model")
    results.add("stream_added_p50_seconds", statistics.median(ours) - statistics.median(copied))


class _Bench:
    """A pipeline whose server answers a topic."""

    def __init__(self, root: Path, bootstrap: str) -> None:
        self._root, self._bootstrap = root, bootstrap
        name = f"stream-{uuid.uuid4().hex[:8]}"
        self.input, self.output = name, f"{name}-answers"
        self._settings = StreamSettings(bootstrap_servers=bootstrap, topics=(self.input,))
        self._copied = f"{name}-copied", f"{name}-copies"
        names = (self.input, self.output, *self._copied)
        create_topics(self._settings, {**dict.fromkeys(names, _PARTITIONS), "events.dead": 1})
        serving = {"max_batch": _MAX_BATCH, "stream": {"topics": [self.input], "output": self.output}}
        VersionPublisher(root, {"factory": "mlp", "args": {"widths": _WIDTHS}}, _SCHEMA, serving).publish()
        path = root / "pipeline.toml"
        stream = f'{{"bootstrap_servers" = "{bootstrap}", "format" = "rows", '
        path.write_text(path.read_text().replace('stream = {"topics"', f'stream = {stream}"topics"', 1))
        deployment = deployment_of(load_config(path))
        self._version = load_version(deployment, deployment.versions.manifest(1), _MAX_BATCH)
        row = np.zeros(1, row_dtype(Schema(SchemaSettings.model_validate(_SCHEMA))))
        row["x"] = np.random.default_rng(0).random((1, 784), np.float32)
        self._value = row.tobytes()
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "acks": "all"})

    def model_rate(self, seconds: float = 2.0) -> tuple[float, float]:
        """Return the rows a second of the version alone, with one thread, and the CPU time of a row."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            batches = np.random.default_rng(0).random((50, _MAX_BATCH, 784), np.float32)
            self._version.run({"x": batches[0]})
            begin, busy, runs = time.perf_counter(), time.thread_time(), 0
            while time.perf_counter() - begin < seconds:
                self._version.run({"x": batches[runs % len(batches)]})
                runs += 1
            rows = runs * _MAX_BATCH
            return rows / (time.perf_counter() - begin), (time.thread_time() - busy) / rows
        finally:
            torch.set_num_threads(threads)

    @contextlib.contextmanager
    def server(self) -> Iterator[ServingProcess]:
        """Run the server; return once it has partitions."""
        with ServingProcess(self._root) as server:
            server.wait()
            self._until(lambda: self._report().partitions == _PARTITIONS, "partitions")
            yield server

    def answer(self, messages: int) -> float:
        """Send messages, and return how many a second are answered once all are sent, by the answers' record times."""
        with self._reader(self.output) as reader:
            for number in range(messages):
                while True:
                    try:
                        self._producer.produce(self.input, self._value, partition=number % _PARTITIONS)
                    except BufferError:
                        self._producer.poll(0.1)
                    else:
                        break
            self._producer.flush(_PATIENCE_SECONDS)
            sent_ms, times_ms = time.time() * 1000, list[int]()
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while len(times_ms) < messages:
                times_ms += [m.timestamp()[1] for m in reader.consume(1000, 0.05) if m.error() is None]
                if time.monotonic() > deadline:
                    raise BrokenRunError(f"{len(times_ms)} of {messages} messages are answered")
        after = [time_ms for time_ms in times_ms if time_ms > sent_ms]
        if len(after) < messages // 4:  # it was as fast as the messages came
            return len(times_ms) / max(0.001, (max(times_ms) - min(times_ms)) / 1000)
        return len(after) / ((max(after) - sent_ms) / 1000)

    def latency(self, source: str, target: str, count: int) -> list[float]:
        """Send single messages, and return the seconds until each has an answer."""
        found = []
        with self._reader(target) as reader:
            for number in range(count + 5):
                begin = time.monotonic()
                self._producer.produce(source, self._value, partition=number % _PARTITIONS)
                self._producer.flush(_PATIENCE_SECONDS)
                while (message := reader.poll(_PATIENCE_SECONDS)) is None or message.error() is not None:
                    if message is None:
                        raise BrokenRunError("a message has no answer")
                if number >= 5:  # warm-up
                    found.append(time.monotonic() - begin)
                time.sleep(_GAP_SECONDS)
        return found

    @contextlib.contextmanager
    def copier(self) -> Iterator[tuple[str, str]]:
        """Copy a topic to another, message by message, each in a transaction; yield both."""
        source, target = self._copied
        stop = threading.Event()
        group = {"group.id": source, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        consumer = Consumer({"bootstrap.servers": self._bootstrap, "isolation.level": "read_committed", **group})
        producer = Producer({"bootstrap.servers": self._bootstrap, "transactional.id": source, "linger.ms": 0})
        producer.init_transactions(30)
        consumer.subscribe([source])

        def run() -> None:
            while not stop.is_set():
                message = consumer.poll(0.1)
                if message is not None and message.error() is None:
                    producer.begin_transaction()
                    producer.produce(target, message.value(), message.key())
                    ends = consumer.position(consumer.assignment())
                    known = [each for each in ends if each.offset >= 0]
                    producer.send_offsets_to_transaction(known, consumer.consumer_group_metadata())
                    producer.commit_transaction()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield source, target
        finally:
            stop.set()
            thread.join()
            consumer.close()

    @contextlib.contextmanager
    def _reader(self, topic: str) -> Iterator[Any]:
        """A reader of committed records from the present end on."""
        reader = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": uuid.uuid4().hex,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        ends = [TopicPartition(topic, number) for number in range(_PARTITIONS)]
        for each in ends:
            each.offset = reader.get_watermark_offsets(each, timeout=30)[1]
        reader.assign(ends)
        reader.poll(0.2)
        try:
            yield reader
        finally:
            reader.close()

    def _report(self) -> Any:
        report = read_report(self._root / "var")
        if report is None or report.stream is None:
            raise BrokenRunError("the server answers no topic")
        return report.stream

    def _until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                raise BrokenRunError(f"no {what}: {read_report(self._root / 'var')}")
            time.sleep(0.05)
