"""Copies tensors of the device to the host at a step boundary, while the host goes on.

On CUDA a copy goes into page-locked memory, on a stream that training does not use. No step may change a tensor before
its copy is done, which is ensured in one of two ways:

* Where the device has memory to spare, tensors are cloned there, and the next step runs at once. The thread that reads
  the copy first brings the clones to the host in chunks, and yields to serving between them.
* Else the copies are queued at once, and the stream of training waits for each: the device waits, and the host does
  not. Of tensors that are gathered from other ranks, one at a time is then on the device.

Page-locked memory comes from torch's allocator, which keeps it for the next copy.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.core.failures import out_of_memory
from anabranch.learner.errors import CopyMemoryError

CHUNK_BYTES = 32 << 20
"""Bytes that are copied between two calls of `before_chunk`: less than a millisecond of a PCIe link of 50 GB/s."""
_SPARE = 0.1
"""The part of a device's memory that stays free when tensors are cloned."""
_PAUSE_SECONDS = 60.0
"""Time without clones after one did not fit."""

log = logging.getLogger(__name__)


class HostCopies(Mapping[str, Tensor]):
    """Tensors on the host. The first access waits until they are copied; any thread may make it."""

    def __init__(self, finish: Callable[[], dict[str, Tensor]]) -> None:
        """`finish` returns the tensors, once they are on the host."""
        self._finish: Callable[[], dict[str, Tensor]] | None = finish
        self._tensors: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        return self._finished()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._finished())

    def __len__(self) -> int:
        return len(self._finished())

    def _finished(self) -> dict[str, Tensor]:
        with self._lock:
            if self._finish is not None:
                finish, self._finish = self._finish, None
                try:
                    self._tensors = finish()
                except BaseException as exc:
                    self._error = exc
                    raise
            if self._error is not None:
                raise self._error
            return self._tensors


@dataclass(eq=False)
class _Clones:
    """Clones on the device, which are removed as they reach the host."""

    tensors: dict[str, Tensor]
    nbytes: int
    ready: torch.cuda.Event
    """After this event of training's stream they have their values."""


class HostStaging:
    """Copies tensors for versions and checkpoints. `copy` is called by the training thread."""

    def __init__(self, device: torch.device, before_chunk: Callable[[], object] = bool) -> None:
        """`before_chunk` is called before each chunk, by the threads that read copies."""
        self.device = device
        self.before_chunk = before_chunk
        # Of the lowest priority, as all streams by default.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._clones_from = 0.0
        """When tensors may be cloned on the device again, by the monotonic clock."""
        self._alive: weakref.WeakSet[_Clones] = weakref.WeakSet()

    @property
    def cloned_bytes(self) -> int:
        """Bytes on the device that clones take now."""
        return sum(clones.nbytes for clones in list(self._alive))

    def copy(self, tensors: Iterable[tuple[str, Tensor]], *, gathered: bool = False) -> Mapping[str, Tensor]:
        """Return copies of the tensors as they are now: on the host, or on a device that is not CUDA on that device.

        Args:
            tensors: by name. Each is used before the next is asked for.
            gathered: whether they are gathered from other ranks on access: then not all are on the device at once.

        Raises:
            CopyMemoryError: there is no memory for them on the host, or on a device that is not CUDA. Torch's error is
                raised instead if `gathered`, since other ranks wait for this one then.
        """
        try:
            return self._copy(tensors, gathered=gathered)
        except (RuntimeError, MemoryError) as exc:
            if gathered or not out_of_memory(exc):
                raise
            raise CopyMemoryError(" ".join(str(exc).split())) from exc

    def _copy(self, tensors: Iterable[tuple[str, Tensor]], *, gathered: bool) -> Mapping[str, Tensor]:
        stream = self._stream
        if stream is None:
            return {name: tensor.clone() for name, tensor in tensors}
        if gathered:
            return self._in_order(tensors, stream)
        originals = dict(tensors)
        clones = self._clones(originals)
        if clones is None:
            return self._in_order(originals.items(), stream)
        return HostCopies(lambda: self._fetched(clones, stream))

    def _clones(self, tensors: Mapping[str, Tensor]) -> _Clones | None:
        """Return clones on the device; None where it has no memory to spare."""
        size = sum(tensor.nbytes for tensor in tensors.values() if tensor.is_cuda)
        if time.monotonic() < self._clones_from or not self._has_room(size):
            return None
        try:
            copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            for names in _alike(tensors):
                torch._foreach_copy_([copies[name] for name in names], [tensors[name] for name in names])
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            self._clones_from = time.monotonic() + _PAUSE_SECONDS
            log.info("%s has no memory for a copy of %d bytes: steps wait for copies to the host", self.device, size)
            return None
        clones = _Clones(copies, size, torch.cuda.current_stream(self.device).record_event())
        self._alive.add(clones)
        return clones

    def _has_room(self, size: int) -> bool:
        """Return whether enough memory stays free, for serving's next version and others."""
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached - size >= _SPARE * total

    def _fetched(self, clones: _Clones, stream: torch.cuda.Stream) -> dict[str, Tensor]:
        """Bring clones to the host in chunks; each is freed once it is there."""
        copies, chunk, size = dict[str, Tensor](), list[Tensor](), 0
        stream.wait_event(clones.ready)
        for name in list(clones.tensors):
            clone = clones.tensors.pop(name)
            if not clone.is_cuda:
                copies[name] = clone
                continue
            copies[name] = host = _page_locked(clone)
            for to, piece in pieces(host, clone):
                if not size:
                    self.before_chunk()
                _queue(to, piece, stream)
                chunk.append(piece)
                size += piece.nbytes
                if size >= CHUNK_BYTES:
                    _wait_for(stream)
                    clones.nbytes -= size
                    chunk.clear()
                    size = 0
        _wait_for(stream)  # before the clones of the last chunk are released
        clones.nbytes -= size
        return copies

    def _in_order(self, tensors: Iterable[tuple[str, Tensor]], stream: torch.cuda.Stream) -> HostCopies:
        """Queue all copies; training's stream goes on with the next tensor, or step, after each."""
        copies, training = dict[str, Tensor](), torch.cuda.current_stream(self.device)
        for name, tensor in tensors:
            if not tensor.is_cuda:
                copies[name] = tensor.clone()
                continue
            copies[name] = host = _page_locked(tensor)
            stream.wait_stream(training)
            _queue(host, tensor, stream)
            training.wait_stream(stream)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)

        def finish() -> dict[str, Tensor]:
            done.synchronize()
            return copies

        return HostCopies(finish)


def _wait_for(stream: torch.cuda.Stream) -> None:
    """Let this thread wait for a stream, and leave its core to others meanwhile."""
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(stream)
    done.synchronize()


def _queue(to: Tensor, tensor: Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        to.copy_(tensor, non_blocking=to.is_pinned())


def _page_locked(like: Tensor) -> Tensor:
    """Return an uninitialized tensor of the host, page-locked unless the system has no such memory left."""
    dense = like.untyped_storage().nbytes() == like.nbytes
    stride = like.stride() if dense else torch.empty(like.shape, device="meta").stride()
    try:
        return torch.empty_strided(like.shape, stride, dtype=like.dtype, pin_memory=True)
    except RuntimeError as exc:
        if not out_of_memory(exc):
            raise
    return torch.empty_strided(like.shape, stride, dtype=like.dtype)


def pieces(to: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of at most a chunk, of a tensor and its copy; a tensor that is not contiguous is one piece."""
    if tensor.nbytes <= CHUNK_BYTES or not (tensor.is_contiguous() and to.is_contiguous()):
        yield to, tensor
        return
    rows = CHUNK_BYTES // tensor.element_size()
    yield from zip(torch.split(to.view(-1), rows), torch.split(tensor.view(-1), rows), strict=True)


def _alike(tensors: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Return the names of tensors of each dtype and device, which one kernel copies."""
    groups: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), []).append(name)
    return groups.values()
