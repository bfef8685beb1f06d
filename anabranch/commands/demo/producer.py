"""Sends the demo's stream in a thread, with the producer and the pace of `anabranch produce`."""

from datetime import timedelta

from typing_extensions import override

from anabranch.commands.demo.dataset import Digits, messages
from anabranch.core.errors import AnabranchError
from anabranch.ingest.kafka.producer import EventProducer
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.runtime.rate_limiter import PacedThread

_STOP_PATIENCE = timedelta(seconds=5)


class StreamProducer(PacedThread):
    """Connects and sends; finishes the messages in flight when it is stopped. Its figures may be read at any time."""

    def __init__(self, settings: StreamSettings, digits: Digits, events: int | None, rate: float, seed: int) -> None:
        """Take the stream of `messages`, and the events a second."""
        self._producer = EventProducer(settings, settings.topics[0])
        self._messages = messages(digits, seed, events)
        super().__init__("producer", rate)
        self.sent = 0
        self.phase = 0
        """The class that the stream is at."""
        self.classes_seen = 1
        self.poisoned = False
        """Whether labels are wrong on purpose now."""
        self.error: AnabranchError | None = None
        """Why it has ended before it had sent everything."""
        self.last_offsets: dict[str, int] | None = None
        """By `topic:partition`, once everything is sent and acknowledged."""

    @override
    def _run(self) -> None:
        try:
            self._producer.open()
            self._send()
        except AnabranchError as exc:
            self.error = exc
        finally:
            self._producer.close()

    def _send(self) -> None:
        for message in self._messages:
            self._pacer.pace()
            if self._stop.is_set():
                break
            self._producer.send(message.value)
            self.sent += 1
            self.phase, self.poisoned = message.phase, message.poisoned
            self.classes_seen = max(self.classes_seen, message.phase + 1)
        self._producer.flush(_STOP_PATIENCE if self._stop.is_set() else None)
        if not self._stop.is_set():
            self.last_offsets = self._producer.last_offsets
