"""What a process takes of the machine, as Linux counts it; nothing is known on other systems."""

import os
from pathlib import Path

_PROC = Path("/proc")
_KILO = 1024
_USER = 11
"""Where `stat` has the time in user mode, after the name; that in the kernel follows."""


def is_counted() -> bool:
    """Return whether this system counts what a process takes."""
    return (_PROC / "self" / "status").exists()


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process; empty when it is gone."""
    found = list[int]()
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += [int(each) for each in path.read_text().split()]
        except OSError:  # a thread has just ended
            continue
    return found


def private_bytes(pid: int) -> int:
    """Return the memory of a process that is neither of a file nor shared; 0 when it is gone."""
    return _counter(_PROC / str(pid) / "status", "RssAnon") * _KILO


def shared_bytes(pid: int) -> int:
    """Return the shared memory that a process has touched; 0 when it is gone."""
    return _counter(_PROC / str(pid) / "status", "RssShmem") * _KILO


def written_bytes(pid: int) -> int:
    """Return the bytes that a process has had written to disks so far, in pages; 0 when it is gone.

    Without pages of files that were deleted before they were written.
    """
    path = _PROC / str(pid) / "io"
    return _counter(path, "write_bytes") - _counter(path, "cancelled_write_bytes")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that all threads of a process have taken so far; 0 when it is gone."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[_USER]) + int(fields[_USER + 1])) / os.sysconf("SC_CLK_TCK")


def cpu_of_parts(learner: int, serving: int) -> dict[str, float]:
    """Return the CPU time of a learner, its ingest process and serving so far."""
    return {
        "learner": cpu_seconds(learner),
        "ingest": sum(map(cpu_seconds, children_of(learner))),
        "serving": cpu_seconds(serving),
    }


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PeakMemory:
    """The most memory that a learner, its ingest process and serving have taken in the samples so far."""

    def __init__(self, learner: int, serving: int | None) -> None:
        """Take the processes."""
        self._learner, self._serving = learner, serving
        self.learner = self.ingest = self.serving = self.ring = 0

    def sample(self) -> None:
        """Read what they take now."""
        self.learner = max(self.learner, private_bytes(self._learner))
        for child in children_of(self._learner):
            self.ingest = max(self.ingest, private_bytes(child))
            self.ring = max(self.ring, shared_bytes(child))
        if self._serving is not None:
            self.serving = max(self.serving, private_bytes(self._serving))

    @property
    def total(self) -> int:
        """The sum of the highest values."""
        return self.learner + self.ingest + self.serving + self.ring


def _counter(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
