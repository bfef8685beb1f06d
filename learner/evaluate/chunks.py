"""How held-out events go through a model: how many at once, in which arithmetic, on which stream, and when."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from anabranch.learner.model.device import Precision

_MOST_ROWS = 1024
_FIRST_ROWS = 64
"""Rows of the first chunk on a CUDA device, where nothing is known of the time that it takes."""
_CHUNK_SECONDS = 0.005
"""Time of a chunk on a CUDA device: a request waits for no more than the chunk that runs."""
_FITS = 100
"""After so many chunks that fitted, larger ones are tried again: other processes may have had the memory for a moment.
Each time that they do not fit, twice as many come first."""


class Chunks:
    """The chunks in which one thread scores events while training goes on.

    On CUDA they run on a stream of the lowest priority, and their size follows from the time that they take there. On a
    CPU the size is fixed, since the kernel takes the core from any thread that serving needs it from.
    """

    def __init__(
        self,
        device: torch.device,
        precision: Precision | None = None,
        before_chunk: Callable[[], object] = bool,
        *,
        fixed: bool = False,
    ) -> None:
        """Take training's arithmetic (None: that of the weights), and `before_chunk`, which waits while requests do.

        `fixed`: whether chunks on CUDA always have the same size, whatever time they take.
        """
        self._fixed = fixed
        self.device = device
        self._precision = precision or Precision("fp32", None)
        self._before_chunk = before_chunk
        # Of the lowest priority, as all streams by default.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._most = _MOST_ROWS
        self.rows = _MOST_ROWS if self._stream is None else _FIRST_ROWS
        """How many events are scored at once."""
        self._seconds = 0.0
        self._fitted, self._fits, self._larger = 0, _FITS, False

    def limit(self, rows: int) -> None:
        """Score at most `rows` at once for a while, since more have not fitted into memory."""
        self.rows = self._most = rows
        if self._larger:
            self._fits *= 2
        self._fitted, self._larger = 0, False

    def seconds(self) -> float:
        """Return a clock for measuring how long scoring takes: of this thread's core, or of the CUDA device.

        CPU time, since other processes may have the core; the device's own time, since a thread that waits for it
        waits for training too.
        """
        return time.thread_time() if self._stream is None else self._seconds

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Launch the work of the block on the stream of scoring."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def follow(self) -> None:
        """Let later chunks see what this thread has queued on its current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @contextlib.contextmanager
    def timed(self, rows: int | None = None) -> Iterator[None]:
        """Run a chunk in the block, of `rows` events or a part of the weights: yield first, then count its time."""
        self._before_chunk()
        if self._stream is None:
            with self._precision.autocast(self.device):
                yield
            if self._fit(rows):
                self.rows = self._most
            return
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(self._stream)
        with self._precision.autocast(self.device):
            yield
        end.record(self._stream)
        end.synchronize()
        self._fit(rows)
        self._count(begin.elapsed_time(end) / 1000, rows)

    def _fit(self, rows: int | None) -> bool:
        """Count a chunk that fitted, and return whether more rows are tried from now on."""
        if rows != self._most or rows >= _MOST_ROWS:
            return False
        self._fitted += 1
        if self._fitted < self._fits:
            return False
        self._most, self._fitted, self._larger = min(_MOST_ROWS, 2 * self._most), 0, True
        return True

    def _count(self, seconds: float, rows: int | None) -> None:
        """Count the time of a chunk; one of full size decides how large the next ones are."""
        self._seconds += seconds
        if self._fixed:
            return
        if rows == self.rows and seconds > 2 * _CHUNK_SECONDS:
            self.rows = max(1, rows // 2)
        elif rows == self.rows and seconds < _CHUNK_SECONDS / 2:
            self.rows = min(self._most, rows * 2)
