"""What serving says of itself: `serving.json` in the state directory, replaced atomically about once a second.

A file for the same reasons as `learner.state_dir.report`. `time` tells its age.
"""

import os
from pathlib import Path

import msgspec

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file

REPORT = "serving.json"
STOPPED = "it has stopped"
"""What the last report says is unhealthy."""


class ShadowReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a version that is not served answers a part of the live requests."""

    version: int
    rows: int = 0
    """That were compared."""
    disagreement: float | None = None
    """The part of them for which it predicts something else; for regression the mean absolute difference."""
    failed: str | None = None
    """Why it was given up."""


class ServingReport(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a serving process, or of all workers of one."""

    pid: int
    """Of the process, or of the one that starts the workers."""
    workers: int = 1
    """Processes that answer."""
    started: float
    """Seconds since 1970, as is `time`."""
    time: float
    address: str
    """Where it listens, such as `http://127.0.0.1:8000`."""
    ready: bool
    """Whether a version is served."""
    version: int | None = None
    version_since: float | None = None
    """When it took the place of the one before."""
    trained_through: str = ""
    """Of the served version, as HTTP replies carry it."""
    swaps: dict[str, int] = {}
    """Versions by what became of them: swapped, rolled_back to, refused."""
    pinned: int | None = None
    """The version that is served, and no other, until it is unpinned."""
    refused: dict[int, str] = {}
    """The newest versions that were refused, with the reason."""
    freshness_p50_seconds: float | None = None
    """Of the events served first in the last minute, from record time to swap; None without any."""
    freshness_p99_seconds: float | None = None
    requests: dict[str, int] = {}
    """Inference requests by HTTP status."""
    requests_per_second: float = 0.0
    """Over about the last ten seconds."""
    request_p50_seconds: float | None = None
    """Of the last minute's answers; None without any."""
    request_p99_seconds: float | None = None
    shadow: ShadowReport | None = None
    """With `serving.shadow`, the candidate; None where there is none."""
    problems: list[str] = []
    """One sentence for each part that does not work as it should; empty when all is well."""


def write_report(folder: Path, report: ServingReport, name: str = REPORT) -> None:
    """Replace the report atomically for readers; without an fsync, since after a crash of the machine it is void."""
    temporary = folder / f".{name}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(report))
    temporary.replace(folder / name)


def read_report(folder: Path, name: str = REPORT) -> ServingReport | None:
    """Read the newest report; None when no serving process has written one that can be read."""
    try:
        return decoded(read_file(folder / name, MOST_BYTES), ServingReport)
    except (OSError, DamagedError):
        return None
