"""A topic that gets messages at a rate."""

import itertools
import threading
import time

from benchmarks.harness.pipeline import Stream, make_topic
from ingest.kafka.producer import EventProducer


class PacedStream:
    """Makes a topic, and sends messages at a rate in a thread while the context lasts."""

    def __init__(self, stream: Stream, messages: list[bytes], rate: float) -> None:
        self._producer = EventProducer(make_topic(stream), stream.topic)
        self._messages, self._rate = messages, rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "PacedStream":
        self._producer.open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.flush()
        self._producer.close()

    def send(self, count: int) -> None:
        """Send so many messages, outside the context."""
        self._producer.open()
        for message in itertools.islice(itertools.cycle(self._messages), count):
            self._producer.send(message)
        self._producer.flush()
        self._producer.close()

    def _send(self) -> None:
        begin = time.perf_counter()
        for number, message in enumerate(itertools.cycle(self._messages)):
            if self._stop.wait(max(0.0, begin + number / self._rate - time.perf_counter())):
                return
            self._producer.send(message)
