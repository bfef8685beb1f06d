"""What a process takes of the machine, as Linux counts it; nothing is known on other systems."""

from pathlib import Path

_PROC = Path("/proc")
_KILO = 1024


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


class PeakMemory:
    """The most memory that a learner, its ingest process and serving have taken in the samples so far."""

    def __init__(self, learner: int, serving: int) -> None:
        """Take the processes."""
        self._learner, self._serving = learner, serving
        self.learner = self.ingest = self.serving = self.ring = 0

    def sample(self) -> None:
        """Read what they take now."""
        self.learner = max(self.learner, private_bytes(self._learner))
        for child in children_of(self._learner):
            self.ingest = max(self.ingest, private_bytes(child))
            self.ring = max(self.ring, shared_bytes(child))
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
