"""Membership of the launchers of several hosts, in a key-value store that the launcher of host 0 serves.

The store is torch's TCPStore, on the one address that `learner.rendezvous` names. Each host publishes its `HostState`
four times a second, as JSON of a fixed form: nothing that comes from another host is unpickled.
"""

import logging
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, decoded

_TICK_SECONDS = 0.25
SILENT_SECONDS = 10.0
"""A host that publishes no new state for so long counts as gone."""
_CONNECT_SECONDS = 2.0

log = logging.getLogger(__name__)


class HostAssignment(msgspec.Struct, frozen=True):
    """A launcher, by its id, and the first rank of its host."""

    id: str
    first: int
    reads_at: str = ""
    """Where its ingest process listens."""


class MembershipRound(msgspec.Struct, frozen=True):
    """One round: the hosts that take part, `size` ranks in all, and the assignment of each host."""

    name: str
    size: int
    assignments: dict[int, HostAssignment]


class HostState(msgspec.Struct, frozen=True):
    """The state that the launcher of a host publishes."""

    id: str
    ranks: int
    settings: dict[str, str]
    """A digest of each section that has to be the same on all hosts."""
    beat: int = 0
    within: str | None = None
    """Name of the round that its ranks run in; None: it is ready for another."""
    reads_at: str = ""
    """Where its ingest process listens for the learner of a round."""
    leaving: bool = False
    ran_out: str | None = None
    """Name of the last round, if its ranks ran out of memory in it."""
    current_round: MembershipRound | None = None
    """The current round; set by host 0 alone."""


class Membership:
    """Publishes this host's state and reads the other hosts' in a background thread, since network calls may block."""

    def __init__(self, store: Store, host: int, state: HostState, others: Sequence[int]) -> None:
        self._store = store
        self._host = host
        self._others = others
        self.state = state
        """Without the beat, which the thread counts."""
        self._beat = 0
        self._latest: dict[int, tuple[HostState, float]] = {}
        self._published_at = time.monotonic()
        self._closed = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def publish(self, **changes: object) -> None:
        """Change the state of this host; the thread sends it."""
        self.state = msgspec.structs.replace(self.state, **changes)

    def latest(self, host: int) -> HostState | None:
        """Return the latest state of a host; None when it counts as gone."""
        state, at = self._latest.get(host, (None, 0.0))
        return state if time.monotonic() - at < SILENT_SECONDS else None

    @property
    def broken(self) -> bool:
        """Whether the store cannot be reached any more."""
        return self._broken or time.monotonic() - self._published_at > SILENT_SECONDS

    def close(self) -> None:
        """Publish the state once more, and end the thread."""
        self._closed.set()
        self._thread.join(_CONNECT_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._publish_once()
                for host in self._others:
                    self._receive(host)
                self._closed.wait(_TICK_SECONDS)
            self._publish_once()
        except RuntimeError as exc:  # includes torch's network errors
            if not self._closed.is_set():
                log.debug("the store of hosts cannot be reached: %s", exc)
            self._broken = True

    def _publish_once(self) -> None:
        self._beat += 1
        state = msgspec.structs.replace(self.state, beat=self._beat)
        self._store.set(f"host/{self._host}", msgspec.json.encode(state).decode())
        self._published_at = time.monotonic()

    def _receive(self, host: int) -> None:
        state = read_state(self._store, host)
        before = self._latest.get(host)
        if state is not None and (before is None or (state.id, state.beat) != (before[0].id, before[0].beat)):
            self._latest[host] = state, time.monotonic()


def read_state(store: Store, host: int) -> HostState | None:
    """Return the newest state of a host; None when there is none that can be read."""
    key = f"host/{host}"
    if not store.check([key]):
        return None
    try:
        return decoded(store.get(key), HostState)
    except DamagedError:
        return None


def listen(address: str) -> Store:
    """Serve the store of all hosts, on `address` alone.

    Raises:
        SettingsError: the address is not this host's, or is taken.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(socket_address)
            listening.listen()
            descriptor = listening.detach()
    except OSError as exc:
        raise SettingsError(
            f'learner.rendezvous = "{address}" cannot be listened on by host 0: {exc.strerror or exc}'
        ) from exc
    timeout = timedelta(seconds=SILENT_SECONDS)
    return TCPStore(
        str(socket_address[0]), int(socket_address[1]), None, True, timeout, False, master_listen_fd=descriptor
    )


def reach(address: str, stop: threading.Event) -> Store | None:
    """Wait for the store of host 0 and connect to it; return None once `stop` is set."""
    logged = False
    while not stop.is_set():
        try:
            return connect(address, timedelta(seconds=SILENT_SECONDS))
        except OSError as exc:
            if not logged:
                log.info("waiting for host 0 at %s: %s", address, exc.strerror or exc)
                logged = True
            stop.wait(_TICK_SECONDS)
    return None


def own_address(address: str) -> str:
    """Return the local address of this host's connections to host 0; raises OSError."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as connected:
        return str(connected.getsockname()[0])


def connect(address: str, timeout: timedelta) -> Store:
    """Connect to the store of host 0 now; raises OSError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    # Torch keeps trying and logs each attempt to stderr, so check first that the port is open.
    socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    try:
        return TCPStore(host, int(port), None, False, timeout, False)
    except RuntimeError as exc:
        raise OSError(str(exc).partition("\n")[0]) from exc
