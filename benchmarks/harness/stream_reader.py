"""A reader that discards a stream: the load on the other cores while a learner trains, without the learner."""

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from benchmarks.harness.event_feed import EventFeed
from benchmarks.harness.pipeline import Stream
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.reader.reader import BlockReader

_POLL = timedelta(seconds=0.1)


class StreamReader:
    """A separate ingest process, whose blocks are released at a fixed rate; it ends with the context."""

    def __init__(self, stream: Stream, form: str, feed: EventFeed) -> None:
        settings = StreamSettings.model_validate(
            {
                "bootstrap_servers": stream.bootstrap,
                "topics": [stream.topic],
                "format": form,
                "start": "latest",
                "buffer_bytes": "8MB",  # so that little is read beyond what is released
            }
        )
        schema = SchemaSettings.model_validate(stream.schema)
        self._source = BlockReader(settings.resolved("stream_reader"), schema, HoldOut(fraction=0.01, seed=0))
        self._feed = feed

    def __enter__(self) -> "StreamReader":
        self._source.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @contextlib.contextmanager
    def reading(self, rate: float) -> Iterator[None]:
        """Read `rate` events a second of what the feed sends, until the context ends."""
        done = threading.Event()
        thread = threading.Thread(target=self._read, args=(rate, done))
        self._source.pass_over()
        self._feed.go_on()
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._feed.pause()

    def _read(self, rate: float, done: threading.Event) -> None:
        if rate == 0:  # on a machine that does other things the learner may have had no step
            return
        begin, rows = time.perf_counter(), 0
        while not done.wait(max(0.0, begin + rows / rate - time.perf_counter())):
            block = self._source.poll(_POLL)
            if block is not None:
                rows += len(block.columns["row"])
                self._feed.read_by_others(len(block.columns["row"]))
                self._source.release(block)
