"""A thread that reads and writes slower tiers, in the order in which jobs are submitted."""

import queue
import threading
import time
from collections.abc import Callable

_MOST_PENDING_BYTES = 64_000_000


class IOWorker:
    """Runs jobs one at a time, in order: a read sees the writes that were submitted before it, and none after it.

    Bounded: `submit` blocks while too many bytes are pending. Jobs handle their own OSErrors; any other exception is a
    bug, and the next `submit` raises it.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._pending_bytes = 0
        self._bug: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], size: int) -> float:
        """Run a job in the thread that holds `size` bytes until it ends; return the seconds waited for room."""
        if self._bug is not None:
            raise self._bug
        waited = 0.0
        with self._room:
            if self._pending_bytes and self._pending_bytes + size > _MOST_PENDING_BYTES:
                begin = time.perf_counter()
                self._room.wait_for(
                    lambda: not self._pending_bytes or self._pending_bytes + size <= _MOST_PENDING_BYTES
                )
                waited = time.perf_counter() - begin
            self._pending_bytes += size
        self._jobs.put((job, size))
        return waited

    def flush(self) -> None:
        """Wait until all jobs are done that were submitted before."""
        done = threading.Event()
        self.submit(done.set, 0)
        done.wait()

    def close(self) -> None:
        """Run all submitted jobs, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, size = task
            try:
                job()
            except Exception as exc:  # noqa: BLE001 the top of a thread: the next `submit` raises it
                self._bug = exc
            with self._room:
                self._pending_bytes -= size
                self._room.notify_all()
