"""A thread that reads and writes for the step, in the order in which it was asked to."""

import queue
import threading
import time
from collections.abc import Callable

_MOST_WAITING_BYTES = 64_000_000


class IOWorker:
    """Runs jobs one after the other: what is written first is found by a read asked for later, and the other way round.

    Bounded: whoever asks for more than waits already has to wait itself. Jobs deal with their own OSErrors; any other
    exception is a bug, and is raised by the next `send`.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._bug: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, job: Callable[[], None], size: int) -> float:
        """Have a job done that holds `size` bytes until then; return the seconds waited for room."""
        if self._bug is not None:
            raise self._bug
        waited = 0.0
        with self._room:
            if self._waiting_bytes and self._waiting_bytes + size > _MOST_WAITING_BYTES:
                begin = time.perf_counter()
                self._room.wait_for(
                    lambda: not self._waiting_bytes or self._waiting_bytes + size <= _MOST_WAITING_BYTES
                )
                waited = time.perf_counter() - begin
            self._waiting_bytes += size
        self._jobs.put((job, size))
        return waited

    def drain(self) -> None:
        """Wait until all jobs are done that were sent before."""
        done = threading.Event()
        self.send(done.set, 0)
        done.wait()

    def close(self) -> None:
        """Do what was sent, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, size = task
            try:
                job()
            except Exception as exc:  # noqa: BLE001 the top of a thread: `send` hands it on
                self._bug = exc
            with self._room:
                self._waiting_bytes -= size
                self._room.notify_all()
