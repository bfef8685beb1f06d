"""A background thread that runs jobs one at a time, in the order in which they are submitted."""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from anabranch.core.shutdown import Deadline

_PATIENCE_SECONDS = 60.0
_Task = tuple[Callable[[], object], int]
_first_calls: list[Callable[[], object]] = []


@contextlib.contextmanager
def at_start_of_job_threads(call: Callable[[], object]) -> Iterator[None]:
    """Let each `JobThread` that starts while the block runs make this call first, in its own thread.

    CUDA's current device, for example, belongs to a thread: a new one begins with device 0.
    """
    _first_calls.append(call)
    try:
        yield
    finally:
        _first_calls.remove(call)


class JobThread:
    """A daemon thread, started by the first job or by `start`, and kept: on a busy core the start takes long.

    Any thread may call the methods. A job sees the effects of those submitted before it. An exception of a job is a
    bug: jobs handle the errors that they expect. The bug is kept for `raise_bug`; later jobs run all the same.
    """

    def __init__(self, name: str, max_bytes: int = sys.maxsize) -> None:
        """Start nothing yet; `max_bytes`: bound of the bytes that pending jobs hold in all."""
        self._name = name
        self._max_bytes = max_bytes
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._submitted = self._done = self._pending_bytes = 0
        self.busy = False
        """Whether a job is pending or running."""
        self.bug: BaseException | None = None
        """The exception of the last job that failed."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, so that the first job need not."""
        with self._changed:
            if self._thread is None:
                first = tuple(_first_calls)
                self._thread = threading.Thread(target=self._run, args=(first,), name=self._name, daemon=True)
                self._thread.start()

    def submit(self, job: Callable[[], object], size: int = 0) -> float:
        """Run a job that holds `size` bytes until it ends. Blocks while too many bytes are pending.

        Returns the seconds that it blocked. A job larger than the bound waits until no bytes are pending.
        """
        with self._changed:
            waited = 0.0 if self._has_room(size) else self._wait_for(lambda: self._has_room(size))
            self._submitted += 1
            self.busy = True
            self._pending_bytes += size
            self._tasks.put((job, size))
        if self._thread is None:
            self.start()
        return waited

    def wait(self, seconds: float | None = None) -> float:
        """Wait until the jobs submitted so far are done, or for `seconds` at most; return the seconds waited."""
        with self._changed:
            last = self._submitted
            return self._wait_for(lambda: self._done >= last, seconds)

    def raise_bug(self) -> None:
        """Raise the exception of the last job that failed, if any has."""
        if self.bug is not None:
            raise self.bug

    def close(self) -> None:
        """Run all submitted jobs, then end the thread."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()

    def _has_room(self, size: int) -> bool:
        return not self._pending_bytes or self._pending_bytes + size <= self._max_bytes

    def _wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> float:
        begin = time.perf_counter()
        self._changed.wait_for(condition, seconds)
        return time.perf_counter() - begin

    def _run(self, first: Sequence[Callable[[], object]]) -> None:
        try:
            for call in first:
                call()
        except BaseException as exc:  # noqa: BLE001 the top of a thread: `raise_bug` raises it
            self.bug = exc
        while (task := self._tasks.get()) is not None:
            job, size = task
            try:
                job()
            except BaseException as exc:  # noqa: BLE001 the top of a thread: `raise_bug` raises it
                self.bug = exc
            del job, task  # a job may hold a copy of the weights, which must not outlive it
            with self._changed:
                self._done += 1
                self.busy = self._done < self._submitted
                self._pending_bytes -= size
                self._changed.notify_all()


class BackgroundWorker:
    """A background thread for the loop's thread. An exception in the work is a bug, which `raise_bug` raises again.

    So is one in `check`, which is called before each piece of work; the work is skipped then.
    """

    def __init__(self, name: str, check: Callable[[], object] = bool) -> None:
        self._thread = JobThread(name)
        self._check = check
        self._began = 0.0
        self.unsettled = False
        """Whether work was started whose end no `raise_bug` has seen."""

    def overdue(self, location: str, every_seconds: float) -> str | None:
        """Return one sentence when the work takes over a minute and twice `every_seconds`; it writes to `location`.

        Any thread may call it. A disk that hangs raises no error.
        """
        bound = max(_PATIENCE_SECONDS, 2 * every_seconds)
        if not self.busy or time.monotonic() - self._began <= bound:
            return None
        return f"what is written to {location} has taken more than {bound:g} s so far; is it slow or away?"

    @property
    def busy(self) -> bool:
        """Whether a piece of work is running."""
        return self._thread.busy

    def start(self, work: Callable[[], object]) -> None:
        """Start a piece of work; the previous one must be done."""
        assert not self.busy
        self._began, self.unsettled = time.monotonic(), True
        self._thread.submit(lambda: (self._check(), work()))

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait until the work is done, or the deadline has passed."""
        self._thread.wait(None if deadline is None else deadline.left)

    def raise_bug(self) -> None:
        """Raise the exception of the work, if there was one."""
        self.unsettled = self._thread.busy
        self._thread.raise_bug()
