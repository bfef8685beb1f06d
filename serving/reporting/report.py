"""The report of serving: `serving.json` in the state directory, replaced atomically about once a second.

A file for the same reasons as `learner.status.report`. `time` shows its age.
"""

from pathlib import Path

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file

REPORT = "serving.json"
STOPPED = "it has stopped"
"""The problem in the last report of a process."""


class ShadowReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a version that is not served answers a fraction of the live requests."""

    version: int
    rows: int = 0
    """Compared rows."""
    disagreement: float | None = None
    """The fraction of rows with another prediction; for regression the mean absolute difference."""
    failed: str | None = None
    """Why it was given up."""


class AnswersReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `[serving.stream]` has answered, of a process or of all workers together."""

    topics: list[str]
    output: str
    partitions: int
    """That the group has given to this server."""
    messages: dict[str, int]
    """By outcome: answered, dead_lettered."""
    per_second: float
    """Answers, over about the last ten seconds."""
    lag: int
    """Messages that are not answered yet."""
    p50_seconds: float | None = None
    """Of recent answers, from record time to commit; None without any."""
    p99_seconds: float | None = None


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `[serving.log]` has written, of all workers together."""

    topic: str
    answers: dict[str, int]
    """Answers to rows of requests by outcome: written, dropped."""


class ServingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a serving process, or of all workers together."""

    pid: int
    """Of the process, or of the one that starts the workers."""
    workers: int = 1
    """Processes that answer requests."""
    started: float
    """Seconds since 1970, as is `time`."""
    time: float
    address: str
    """The URL of the server, such as `http://127.0.0.1:8000`."""
    grpc_address: str = ""
    """Host and port for gRPC; empty without `serving.grpc_port`."""
    ready: bool
    """Whether a version is served."""
    version: int | None = None
    version_since: float | None = None
    """When it replaced the version before."""
    trained_through: str = ""
    """Of the served version, as in HTTP replies."""
    swaps: dict[str, int] = {}
    """Versions by outcome: swapped, rolled_back to, refused."""
    pinned: int | None = None
    """The only version that is served until it is unpinned."""
    refused: dict[int, str] = {}
    """The newest versions that were refused, with the reason."""
    freshness_p50_seconds: float | None = None
    """Of the events served first in the last minute, from record time to swap; None without any."""
    freshness_p99_seconds: float | None = None
    requests: dict[str, int] = {}
    """Inference requests by HTTP status."""
    answered: dict[int, int] = {}
    """Inference requests that the newest versions have answered, since the start of serving."""
    requests_per_second: float = 0.0
    """Over about the last ten seconds."""
    request_p50_seconds: float | None = None
    """Of the last minute's answers; None without any."""
    request_p99_seconds: float | None = None
    shadow: ShadowReport | None = None
    """The candidate of `serving.shadow`; None without one."""
    stream: AnswersReport | None = None
    """The answers through Kafka; None without `[serving.stream]`."""
    log: LogReport | None = None
    """The log of answers; None without `[serving.log]`."""
    server: str | None = None
    """Its id in the fleet; None where it follows the learner of its state directory."""
    follow_lag_seconds: float | None = None
    """For how long there has been a version in the object store that is not here; None as `server`."""
    skew: dict[str, float] = {}
    """Population stability index of features of requests against events of training, of the 20 largest."""
    warnings: list[str] = []
    """One sentence while features of requests have drifted."""
    model_problem: str | None = None
    """One sentence when the served model fails on every input."""
    problems: list[str] = []
    """One sentence for each problem; empty when serving is healthy."""


def write_report(folder: Path, report: ServingReport, name: str = REPORT) -> None:
    """Replace the report atomically for readers; without an fsync, since a crash of the machine makes it obsolete."""
    replace_file(folder / name, msgspec.json.encode(report), durable=False)


def read_report(folder: Path, name: str = REPORT) -> ServingReport | None:
    """Return the newest report; None if there is none that can be read."""
    try:
        return decoded(read_file(folder / name, MOST_BYTES), ServingReport)
    except (OSError, DamagedError):
        return None
