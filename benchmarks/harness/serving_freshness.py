"""Freshness: from an event's append on the broker to a prediction by a version trained on it.

A producer sends 500 events a second, one a message, and the learner publishes every 250 ms. For one event in 25 a
request is sent with it, for a version that has been trained through that event
(`min_trained_through`); `freshness_p99_seconds` is the 99th percentile of the time from before the send to the end of
the answer. The broker, the learner, the server and the clients have all cores together, as on one host.
"""

import http.client
import itertools
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import numpy as np

from anabranch.ingest.kafka.producer import EventProducer
from benchmarks.harness.pipeline import LearnerProcess, Stream, make_topic, packed, pipeline, schema_of
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess

TARGETS = {"freshness_p99_seconds": Target(1.0)}
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
_RATE = 500
_EACH = 25
"""A request is sent for one event in this many."""
_POOL = 2_000
_WARM_UP = 2.0
_PATIENCE = 30.0
_MOST_WAITING = 128


class AskedStream:
    """Sends events at fixed times in a thread, and requests predictions for some of them during `ask`.

    Message n has the offset n of partition 0 of `topic`; `model` is the model's name, by default that of the topic.
    """

    def __init__(self, producer: EventProducer, messages: list[bytes], topic: str, *, model: str | None = None) -> None:
        self._producer, self._messages, self._topic, self._model = producer, messages, topic, model or topic
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_MOST_WAITING)
        self._address: str | None = None
        self._taken: list[float] = []
        self._failed = 0
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "AskedStream":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._pool.shutdown()

    def ask(self, address: str, seconds: float) -> tuple[list[float], int]:
        """Return the seconds of each request that was answered, and how many were not."""
        self._address = address
        time.sleep(seconds)
        self._address = None
        self._stop.wait(_WARM_UP)  # those that are on their way
        self._pool.shutdown()
        return self._taken, self._failed

    def _send(self) -> None:
        begin = time.perf_counter()
        for number, message in enumerate(itertools.cycle(self._messages)):
            time.sleep(max(0.0, begin + number / _RATE - time.perf_counter()))
            if self._stop.is_set():
                return
            since = time.perf_counter()
            self._producer.send(message)
            address = self._address
            if address is not None and number % _EACH == 0:
                self._pool.submit(self._ask, address, number, since)

    def _ask(self, address: str, offset: int, since: float) -> None:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 784], "data": [0.5] * 784}
        parameters = {"min_trained_through": f"{self._topic}:0={offset}"}
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=_PATIENCE)
        try:
            body = json.dumps({"inputs": [tensor], "parameters": parameters})
            connection.request("POST", f"/v2/models/{self._model}/infer", body)
            status = connection.getresponse().status
        except OSError:
            status = 0
        finally:
            connection.close()
        if status == 200:
            self._taken.append(time.perf_counter() - since)
        else:
            self._failed += 1


def measure(results: Results, form: Form, bootstrap: str) -> None:
    """Measure the section."""
    seconds = (0.5, 4.0, 120.0)[form]
    results.title(f"freshness: {_RATE} events a second, a version every 250 ms, an MLP of a million parameters")
    generator = np.random.default_rng(0)
    columns = {"x": generator.random((_POOL, 784), np.float32)}
    described = schema_of(columns, 10)
    rows = packed(described, columns, generator.integers(0, 10, _POOL))
    with tempfile.TemporaryDirectory(dir=".", prefix="fresh-") as folder:
        root = Path(folder).resolve()
        stream = Stream(bootstrap, f"fresh-{root.name}", described, 0)
        producer = EventProducer(make_topic(stream), stream.topic)
        producer.open()
        sections = {
            "learner": {"max_delay": "50ms"},
            "versions": {"publish_every": "250ms", "keep": 20},
            "checkpoints": {"every": "30s"},
            "gate": {"holdout_fraction": 0.01},
        }
        document = pipeline(stream, MLP, 0, sections) | {"serving": {"port": 0, "device": "cpu"}}
        with (
            LearnerProcess(root, document) as learner,
            ServingProcess(root) as server,
            AskedStream(producer, [row.tobytes() for row in rows], stream.topic) as events,
        ):
            learner.wait_for(lambda report: report.version is not None)
            address = server.wait().address
            time.sleep(_WARM_UP)
            taken, failed = events.ask(address, seconds)
        producer.close()
    delays = np.array(taken)
    results.add("freshness_p99_seconds", float(np.percentile(delays, 99)), f"of {len(delays)} requests")
    results.add("freshness_p50_seconds", float(np.percentile(delays, 50)))
    results.add("freshness_most_seconds", float(delays.max()))
    results.add("freshness_failed", float(failed))
