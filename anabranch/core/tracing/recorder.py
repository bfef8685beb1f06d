"""Spans that a thread creates once what they describe is over, many at once, away from the path of a request.

Among other work, OpenTelemetry's code for a span takes about 100 microseconds, since it has left the caches of the
core: several times what it takes for one span after another. Its spans are also many objects, over which each
collection of garbage goes: so they are created when they are exported.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from anabranch.core.tracing.spans import LeftOut

_MOST_WAITING = 4096
_AT_ONCE = 512
"""Once so many wait, they are created at once."""
_LONGEST_END = timedelta(seconds=2)
"""How long the end of a process waits for the last spans."""

log = logging.getLogger("anabranch.tracing")


class EndedSpan(Protocol):
    """What a span describes is over."""

    def create(self) -> None:
        """Start the span and end it, with the times at which that was due. Called in the recorder's thread."""
        ...


class Recorder:
    """Creates ended spans in a daemon thread, which sleeps while there are none; a context manager.

    Spans for which its queue has no room are left out and counted, and so are those that cannot be created.
    """

    def __init__(
        self,
        left_out: LeftOut,
        every: timedelta,
        created: Callable[[], object] = bool,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        """`created` is called after spans were created, in the recorder's thread."""
        self._left_out = left_out
        self._every = every.total_seconds()
        self._created = created
        self._most_waiting = most_waiting
        self._spans: deque[EndedSpan] = deque()
        self._any = threading.Event()
        self._now = threading.Event()
        self._stopping = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="tracing-record", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Create what waits, for two seconds at most, and count the rest as left out."""
        self._stopping = True
        self._any.set()
        self._now.set()
        self._thread.join(_LONGEST_END.total_seconds())
        if self._thread.is_alive():
            self._left_out("queue", len(self._spans))
            self._spans.clear()

    def put(self, span: EndedSpan) -> None:
        """Enqueue a span. Any thread may call it; it does not wait."""
        waiting = len(self._spans)
        if self._stopping or waiting >= self._most_waiting:
            self._left_out("queue", 1)
            return
        self._spans.append(span)
        if not self._any.is_set():
            self._any.set()
        if waiting >= _AT_ONCE and not self._now.is_set():
            self._now.set()

    def _run(self) -> None:
        while not self._stopping or self._spans:
            self._any.wait()
            self._now.wait(self._every)
            if not self._stopping:  # else a stop between a check and here would be lost
                self._any.clear()
                self._now.clear()
            self._create()
            self._created()

    def _create(self) -> None:
        while self._spans:
            try:
                span = self._spans.popleft()
            except IndexError:  # the end has cleared them
                return
            try:
                span.create()
            except Exception:  # a processor of the user's may raise anything
                self._left_out("export", 1)
                if not self._failed:
                    log.warning("a span cannot be created, and is left out", exc_info=True)
                self._failed = True
