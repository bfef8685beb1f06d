"""The fleet: what its servers report of themselves, and which versions they may serve.

    servers/<id>.json   written by each server every few seconds
    rollout.json        replaced under compare-and-swap: by rollout commands at any server, and by the learner where it
                        judges canaries; every server follows it

What a server serves, and served before, is its own.
"""

import logging
import re
import socket
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import msgspec

from anabranch.core.failures import DamagedError, damage_is, decoded
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.object_store.tagged_object import TaggedObject
from anabranch.learner.errors import StorageError
from anabranch.learner.versions.format import RegistryState

ROLLOUT = "rollout.json"
_MOST_ROLLOUT_BYTES = 1_000_000
_FOLDER = "servers"
REPORT_EVERY = timedelta(seconds=5)
SILENT = timedelta(seconds=30)
"""A server that has reported nothing for this long has ended, or cannot reach the object store."""
_DELETED_AFTER = timedelta(hours=1)
"""The report of a silent server, or an object that is no report, is deleted after this time."""
_MOST_REPORT_BYTES = 100_000
_MOST_SERVERS = 1000
"""Objects that are read as reports: each takes a request every few seconds."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,300}")
_MOST_SENTENCE = 1000
_UNPRINTABLE = re.compile(r"[^ -~\u00a1-\ufffd]")
"""Control characters of terminals, and what Unicode has beyond its first plane."""

log = logging.getLogger(__name__)


class FleetServer(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one server."""

    id: str
    """The name of its host and its port."""
    beat: int
    """Grows with each report."""
    time: float
    """Seconds since 1970, by the server's clock; for display."""
    address: str
    ready: bool
    version: int | None = None
    previous: int | None = None
    """The version that it served before."""
    pinned: int | None = None
    requests_per_second: float = 0.0
    request_p99_seconds: float | None = None
    slo_seconds: float = 0.0
    """`serving.slo`."""
    refused: dict[int, str] = {}
    """The newest versions that it refused, with the reason."""
    model_problem: str | None = None
    """One sentence when the served model fails on every input."""
    problems: int = 0
    """How many problems the server reports."""
    crashes: dict[int, int] = {}
    """How often the process ended without a last report, by the version that it served or was to take."""
    stopped: bool = False
    """Whether it has ended in order."""
    taking: int | None = None
    """The canaries' version if it is to serve it and does not yet."""
    process: str = ""
    """A random id of its process: two servers must not have one id."""

    @property
    def needed(self) -> set[int]:
        """The versions that it serves, served before, or is pinned to."""
        return {number for number in (self.version, self.previous, self.pinned) if number is not None}


def server_id(port: int) -> str:
    """Return the id of the server on a port of this host; on Kubernetes the host's name is that of the pod."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', socket.gethostname())}-{port}"


def write_server(bucket: Bucket, server: FleetServer) -> None:
    """Write a report; raises BucketAwayError."""
    bucket.write(_path(server.id), msgspec.json.encode(server))


def read_server(bucket: Bucket, name: str) -> FleetServer | None:
    """Return the last report of a server; None without one that can be used. Raises BucketAwayError.

    Whoever may write a report may write anything there: a report under another server's id is none.
    """
    if not is_server_id(name):
        return None
    try:
        server = decoded(bucket.read(_path(name), _MOST_REPORT_BYTES), FleetServer)
    except (FileNotFoundError, DamagedError):
        return None
    if server.id != name:
        return None
    return msgspec.structs.replace(
        server,
        address=_printable(server.address),
        model_problem=None if server.model_problem is None else _printable(server.model_problem),
        refused={number: _printable(reason) for number, reason in server.refused.items()},
    )


def is_server_id(name: str) -> bool:
    """Return whether a server may have this id."""
    return _ID.fullmatch(name) is not None


def _printable(sentence: str) -> str:
    """Return a sentence as a terminal may show it."""
    return _UNPRINTABLE.sub("?", sentence[:_MOST_SENTENCE])


def read_servers(bucket: Bucket) -> list[FleetServer]:
    """Return the last report of every server that has not ended in order, by id, of the first thousand objects.

    Raises BucketAwayError.
    """
    found = [read_server(bucket, _name(path)) for path in sorted(bucket.sizes(_FOLDER))[:_MOST_SERVERS]]
    return [server for server in found if server is not None and not server.stopped]


class FleetReader:
    """Reads which servers are alive, by this process's monotonic clock: a report that does not change is of a silent
    server. Used by one thread."""

    def __init__(self, bucket: Bucket, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = bucket
        self._clock = clock
        self._seen: dict[str, tuple[int | None, float]] = {}
        """The beat in each object, None where it is no report, and when it was first read."""
        self._read_at: float | None = None
        self.silent: Collection[str] = ()
        """Servers that have been silent, and have not ended in order. Any thread may ask."""

    def read(self) -> Sequence[FleetServer]:
        """Return the reports of the servers that are alive, and delete those of servers that have ended.

        What is more than a thousand objects is deleted unread, that of servers which are known last: a server that
        reports writes its own again. Time in which this process could not read does not count: no server could report
        while the store was away.

        Raises:
            BucketAwayError: the object store cannot be reached.
        """
        known = {path for path, (beat, _) in self._seen.items() if beat is not None}
        paths = sorted(self._bucket.sizes(_FOLDER), key=lambda path: (path not in known, path))
        if excess := paths[_MOST_SERVERS:]:
            log.warning(
                "%s has %d objects, and is to have %d at most: the others are deleted",
                _FOLDER,
                len(paths),
                _MOST_SERVERS,
            )
            self._bucket.delete(excess)
        reports = {path: read_server(self._bucket, _name(path)) for path in sorted(paths[:_MOST_SERVERS])}
        now = self._clock()
        gap = 0.0 if self._read_at is None else now - self._read_at
        unread = max(0.0, gap - 2 * REPORT_EVERY.total_seconds())
        before, self._seen, self._read_at = self._seen, {}, now
        for path, report in reports.items():
            beat, first = before.get(path, (None, now))
            is_same = path in before and beat == (None if report is None else report.beat)
            self._seen[path] = (None if report is None else report.beat), first + unread if is_same else now
        ages = {path: now - first for path, (_, first) in self._seen.items()}
        self._bucket.delete([path for path, report in reports.items() if ages[path] >= _kept_for(report)])
        servers = [
            (report, ages[path]) for path, report in reports.items() if report is not None and not report.stopped
        ]
        self.silent = {report.id for report, age in servers if age >= SILENT.total_seconds()}
        return [report for report, _ in servers if report.id not in self.silent]


def _kept_for(report: FleetServer | None) -> float:
    """Return for how many seconds an object stays that does not change."""
    return (SILENT if report is not None and report.stopped else _DELETED_AFTER).total_seconds()


def _path(name: str) -> str:
    return f"{_FOLDER}/{name}.json"


def _name(path: str) -> str:
    """Return the id of the server whose report this is; for an object that is no report, no possible id."""
    return path.removeprefix(f"{_FOLDER}/").removesuffix(".json") if path.endswith(".json") else ""


class FleetRollout(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `rollout.json`."""

    pinned: int | None = None
    promoted: int | None = None
    rolled_back: list[int] = []
    """As in `RegistryState`, for all servers."""
    stable: int | None = None
    """With `serving.canary`, the newest version that every server may serve; None: any version."""
    canary: int | None = None
    """The newer version that the canaries serve while it is judged."""
    canaries: list[str] = []
    """Ids of the servers that serve it."""

    def allows(self, number: int, server: str) -> bool:
        """Return whether a server may take a version as far as canaries are concerned."""
        return (
            self.stable is None
            or number <= self.stable
            or number in (self.pinned, self.promoted)
            or (number == self.canary and server in self.canaries)
        )

    def applied_to(self, own: RegistryState) -> RegistryState:
        """Return the state of one server with the decisions of the fleet."""
        return msgspec.structs.replace(
            own, pinned=self.pinned, promoted=self.promoted, rolled_back=sorted(self.rolled_back)
        )

    def changed_to(self, state: RegistryState, numbers: Collection[int]) -> "FleetRollout":
        """Return the decisions after a rollout command; deleted versions are left out of `rolled_back`.

        A promoted version is one that every server may serve, and ends the comparison with a canary; so is one that was
        promoted before if all from it to the stable version are rolled back now.
        """
        promoted, rolled_back = state.promoted, set(state.rolled_back)
        promotes = promoted is not None and (
            promoted != self.promoted
            or (
                self.stable is not None
                and self.stable > promoted
                and rolled_back.issuperset(number for number in numbers if promoted < number <= self.stable)
            )
        )
        ends = promotes or self.canary in rolled_back
        return msgspec.structs.replace(
            self,
            pinned=state.pinned,
            promoted=state.promoted,
            rolled_back=sorted(rolled_back & set(numbers)),
            stable=promoted if promotes and self.stable is not None else self.stable,
            canary=None if ends else self.canary,
            canaries=[] if ends else self.canaries,
        )


def without_canaries(rollout: FleetRollout) -> FleetRollout:
    """Return the decisions of a fleet in which every server may serve every version."""
    return msgspec.structs.replace(rollout, stable=None, canary=None, canaries=[])


class RolloutFile(TaggedObject[FleetRollout]):
    """Reads and replaces `rollout.json`. Used by one thread at a time."""

    def __init__(self, bucket: Bucket) -> None:
        def decode(content: bytes) -> FleetRollout:
            with damage_is(StorageError, f"{bucket.url}/{ROLLOUT} cannot be used"):
                found = decoded(content, FleetRollout)
            return msgspec.structs.replace(found, canaries=[name for name in found.canaries if is_server_id(name)])

        super().__init__(bucket, ROLLOUT, decode, FleetRollout(), StorageError, _MOST_ROLLOUT_BYTES)
