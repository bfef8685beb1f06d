"""Device sharing's contract: a mapped file for each server and each rank of the learner, in `var/device_sharing/`.
Imports no torch.

A server marks in its file that requests wait; the learner reads the marks of all servers between micro-batches. Each
file has one writer, which holds a lock on it while it lives: the kernel releases the lock however the process ends,
while pids mean nothing between containers that share a volume. A mark in a file that is not locked is of a dead server.

On a CPU, a server that runs a batch also lowers the priority of the threads that the learner names in its file.

Every field is a word of 64 bits that is valid by itself and is written at once, so that no reader sees half of a mark.
Times are nanoseconds of the monotonic clock, which all processes of one machine share.
"""

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

from anabranch.core.errors import SettingsError
from anabranch.core.failures import state_errors
from anabranch.learner.device.cpu_priority import computing_threads, leads_group, set_level, start_of

FOLDER = "device_sharing"
_SERVER, _LEARNER = "server", "learner"
_FORM = 0x2_6573_6165_6C
"""The first word of such a file: "lease" and the format number."""
_BYTES = 1024
_MOST_HOLDERS = 256
_REFRESH_SECONDS = 0.5
_PATIENCE = timedelta(seconds=30)
"""Another server whose batch takes longer hangs."""


class Field(IntEnum):
    """The words of a file."""

    FORM = 0
    WAITING = 1
    """Of a server: since when the oldest request waits for its answer; 0: none does."""
    RUNNING = 2
    """Of a server: since when the model runs on a batch; 0: it does not."""
    ANSWERED = 3
    """Of a server: requests answered so far."""
    LATE = 4
    """Of a server: requests that took longer than `serving.slo`."""
    YIELDING = 5
    """Of a rank: since when it yields; 0: it does not."""
    ROWS = 6
    """Of a rank: largest micro-batch in events; 0: all of a step."""
    PROCESS = 7
    """Of a rank: its pid, if servers may change the priority of its threads; 0: they may not."""
    STARTED = 8
    """Of a rank: when that process was started, in ticks since the boot."""
    GROUP = 9
    """Of a rank: 1 if it is alone in its session, which has a level too."""
    NICE = 10
    """Of a rank: the level of its threads while a batch runs."""
    USUAL = 11
    """Of a rank: their level otherwise."""
    THREADS = 12
    """Of a rank: the number of its computing threads, whose ids are the words that follow."""


class Slot:
    """One holder's file, mapped."""

    def __init__(self, descriptor: int, mapped: mmap.mmap) -> None:
        self._descriptor = descriptor
        self._mapped = mapped
        self._words = memoryview(mapped).cast("Q")

    def __getitem__(self, field: Field) -> int:
        return self._words[field]

    def __setitem__(self, field: Field, value: int) -> None:
        self._words[field] = value

    @property
    def alive(self) -> bool:
        """Whether another process holds it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def publish_threads(self, nice: int, usual: int) -> None:
        """Let servers set the level of this process's computing threads; called again when there may be new ones."""
        threads = computing_threads()[: len(self._words) - Field.THREADS - 1]
        for word, thread in enumerate(threads, Field.THREADS + 1):
            self._words[word] = thread
        self[Field.THREADS], self[Field.GROUP] = len(threads), int(leads_group())
        self[Field.NICE], self[Field.USUAL] = nice, usual
        self[Field.STARTED], self[Field.PROCESS] = start_of(os.getpid()), os.getpid()

    def set_level(self, field: Field) -> None:
        """Set the level of the threads that a rank publishes: that of `field`."""
        threads = self._words[Field.THREADS + 1 : Field.THREADS + 1 + self[Field.THREADS]].tolist()
        set_level(self[Field.PROCESS], threads, bool(self[Field.GROUP]), self[field])

    def close(self) -> None:
        """Unmap the file, and release the lock."""
        self._words.release()
        self._mapped.close()
        os.close(self._descriptor)


class ServerMark:
    """The marks that one server sets for the learner. Used by one thread."""

    def __init__(self, slot: Slot, slo: timedelta, training: "Training") -> None:
        self._slot = slot
        self._training = training
        self._slo = slo.total_seconds() * 1e9
        self._begins: dict[int, int] = {}
        self._requests = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that a request waits while the block runs, and count it as answered unless the block raises."""
        begin, self._requests = time.monotonic_ns(), self._requests + 1
        number = self._requests
        self._begins[number] = begin
        self._mark()
        try:
            yield
            if time.monotonic_ns() - begin > self._slo:
                self._slot[Field.LATE] += 1
            self._slot[Field.ANSWERED] += 1
        finally:
            del self._begins[number]
            self._mark()

    def run(self) -> None:
        """Mark that the model starts on a batch, and lower the priority of training."""
        self._slot[Field.RUNNING] = time.monotonic_ns()
        self._training.lower()

    def rest(self) -> None:
        """Mark that the model is idle, and restore the priority of training."""
        self._slot[Field.RUNNING] = 0
        self._training.restore()

    def _mark(self) -> None:
        self._slot[Field.WAITING] = next(iter(self._begins.values()), 0)


class Servers:
    """The marks of all servers of a state directory, as the learner sees them. Used by one thread."""

    def __init__(self, state_dir: Path, patience: timedelta) -> None:
        """A mark that is older than `patience` is of a server that hangs, and is ignored."""
        self._folder = state_dir / FOLDER
        self._patience = int(patience.total_seconds() * 1e9)
        self._slots: dict[str, Slot] = {}

    def refresh(self) -> None:
        """Map the slots of new servers; mapped slots are kept, since another server may take them over.

        A slot that cannot be read, for lack of descriptors for example, is tried again at the next call.
        """
        _map(self._folder, _SERVER, self._slots)

    def since(self, field: Field) -> int:
        """Return the earliest time in a field of the living servers, 0 when there is none.

        Takes a microsecond where no request waits, since only servers with a mark are checked for life.
        """
        earliest = 0
        for slot in self._slots.values():
            since = slot[field]
            if since and time.monotonic_ns() - since < self._patience and slot.alive:
                earliest = min(earliest or since, since)
        return earliest

    def total(self, field: Field) -> int:
        """Return the sum of a count over all servers; the count of a restarted server starts at 0."""
        return sum(slot[field] for slot in self._slots.values())

    @property
    def alive(self) -> int:
        """Number of living servers."""
        return sum(slot.alive for slot in self._slots.values())

    def close(self) -> None:
        """Unmap all slots."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()


class Training:
    """The priority of training, as a server sets it around each batch. Used by one thread."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER
        self._servers = Servers(state_dir, _PATIENCE)
        self._slots: dict[str, Slot] = {}
        self._published: list[Slot] = []
        self._due = 0.0

    def lower(self) -> None:
        """Lower the priority of the threads that ranks of this host publish."""
        for slot in self._published:
            slot.set_level(Field.NICE)

    def restore(self) -> None:
        """Restore it, unless another server runs a batch."""
        if self._published and not self._servers.since(Field.RUNNING):
            for slot in self._published:
                slot.set_level(Field.USUAL)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _REFRESH_SECONDS
            self._refresh()

    def _refresh(self) -> None:
        self._servers.refresh()
        _map(self._folder, _LEARNER, self._slots)
        self._published = [
            slot
            for slot in self._slots.values()
            if slot[Field.PROCESS] and slot.alive and start_of(slot[Field.PROCESS]) == slot[Field.STARTED]
        ]

    def close(self) -> None:
        """Restore the priority, and unmap all slots."""
        self.restore()
        for slot in self._slots.values():
            slot.close()
        self._servers.close()


@contextlib.contextmanager
def hold_server(state_dir: Path, slo: timedelta) -> Iterator[ServerMark]:
    """Hold a server's slot; raises as `lock_state_directory` does where the state directory cannot be written."""
    with _hold(state_dir, _SERVER) as slot, contextlib.closing(Training(state_dir)) as training:
        yield ServerMark(slot, slo, training)


@contextlib.contextmanager
def hold_learner(state_dir: Path) -> Iterator[Slot]:
    """Hold a rank's slot; raises as `lock_state_directory` does where the state directory cannot be written."""
    with _hold(state_dir, _LEARNER) as slot:
        yield slot


def learners(state_dir: Path) -> list[dict[Field, int]]:
    """Return the fields of each living rank of the learner."""
    ranks = []
    for path in sorted((state_dir / FOLDER).glob(f"{_LEARNER}-*")):
        slot = _seen(path)
        if slot is not None:
            if slot.alive:
                ranks.append({field: slot[field] for field in Field})
            slot.close()
    return ranks


@contextlib.contextmanager
def _hold(state_dir: Path, kind: str) -> Iterator[Slot]:
    folder = state_dir / FOLDER
    with state_errors(f"state_dir: cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        slot = next(filter(None, (_taken(folder / f"{kind}-{n}") for n in range(_MOST_HOLDERS))), None)
    if slot is None:
        raise SettingsError(f"state_dir: {_MOST_HOLDERS} processes hold a slot in {folder} already")
    try:
        yield slot
    finally:
        slot.close()


def _taken(path: Path) -> Slot | None:
    """Take a slot, with all words but the first 0; None when another process has it.

    The words are written, not only mapped, so that a full disk raises here.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, bytes(_BYTES), 0)
        slot = Slot(descriptor, mmap.mmap(descriptor, _BYTES))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    slot[Field.FORM] = _FORM
    return slot


def _map(folder: Path, kind: str, slots: dict[str, Slot]) -> None:
    """Map the slots of new holders; one that cannot be read now is tried again at the next call."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name not in slots and path.name.startswith(kind):
                slot = _seen(path)
                if slot is not None:
                    slots[path.name] = slot


def _seen(path: Path) -> Slot | None:
    """Map another process's slot for reading; None when it is incomplete or no slot."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size < _BYTES:
            os.close(descriptor)
            return None
        mapped = mmap.mmap(descriptor, _BYTES, prot=mmap.PROT_READ)
    except OSError:
        os.close(descriptor)
        return None
    slot = Slot(descriptor, mapped)
    if slot[Field.FORM] not in (0, _FORM):
        slot.close()
        return None
    return slot
