"""What the launchers of several hosts say to each other, in a key-value store that the one of host 0 serves.

It is torch's TCPStore, on the one address that `learner.rendezvous` names. A host says a word about itself four times a
second, as JSON of a fixed form: nothing that comes from another host is unpickled.
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
"""After so long without a new word a host counts as gone."""
_CONNECT_SECONDS = 2.0

log = logging.getLogger(__name__)


class HostAssignment(msgspec.Struct, frozen=True):
    """The first rank of a launcher, which is known by an id of its own."""

    id: str
    first: int
    reads_at: str = ""
    """Where its ingest process listens."""


class MembershipRound(msgspec.Struct, frozen=True):
    """What host 0 has dealt: `size` ranks, and each host's seat among them."""

    name: str
    size: int
    seats: dict[int, HostAssignment]


class HostState(msgspec.Struct, frozen=True):
    """What the launcher of a host says of itself."""

    id: str
    ranks: int
    settings: dict[str, str]
    """A digest of each section that hosts have to have alike."""
    beat: int = 0
    within: str | None = None
    """Name of the round that its ranks are in; None: it is ready for another."""
    reads_at: str = ""
    """Where its ingest process listens for the learner of a round."""
    leaving: bool = False
    ran_out: str | None = None
    """Name of the last round, where its ranks ran out of memory in it."""
    dealt: MembershipRound | None = None
    """Host 0's word alone has it."""


class Membership:
    """Says the word of this host and hears those of others, in a thread of its own, which a network may hold up."""

    def __init__(self, store: Store, host: int, word: HostState, others: Sequence[int]) -> None:
        self._store = store
        self._host = host
        self._others = others
        self.word = word
        """But for the beat, which is the thread's."""
        self._beat = 0
        self._heard: dict[int, tuple[HostState, float]] = {}
        self._said = time.monotonic()
        self._closed = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._talk, name="voice", daemon=True)
        self._thread.start()

    def say(self, **changes: object) -> None:
        """Change the word of this host."""
        self.word = msgspec.structs.replace(self.word, **changes)

    def heard(self, host: int) -> HostState | None:
        """Return the last word of a host that is there."""
        word, at = self._heard.get(host, (None, 0.0))
        return word if time.monotonic() - at < SILENT_SECONDS else None

    @property
    def broken(self) -> bool:
        """Whether the store cannot be reached any more."""
        return self._broken or time.monotonic() - self._said > SILENT_SECONDS

    def close(self) -> None:
        """Say the last word, and end."""
        self._closed.set()
        self._thread.join(_CONNECT_SECONDS)

    def _talk(self) -> None:
        try:
            while not self._closed.is_set():
                self._say_once()
                for host in self._others:
                    self._listen(host)
                self._closed.wait(_TICK_SECONDS)
            self._say_once()
        except RuntimeError as exc:  # torch's errors of the network are among them
            if not self._closed.is_set():
                log.debug("the store of hosts cannot be reached: %s", exc)
            self._broken = True

    def _say_once(self) -> None:
        self._beat += 1
        word = msgspec.structs.replace(self.word, beat=self._beat)
        self._store.set(f"host/{self._host}", msgspec.json.encode(word).decode())
        self._said = time.monotonic()

    def _listen(self, host: int) -> None:
        word = read_word(self._store, host)
        before = self._heard.get(host)
        if word is not None and (before is None or (word.id, word.beat) != (before[0].id, before[0].beat)):
            self._heard[host] = word, time.monotonic()


def read_word(store: Store, host: int) -> HostState | None:
    """Return the newest word of a host, if there is one that can be read."""
    key = f"host/{host}"
    if not store.check([key]):
        return None
    try:
        return decoded(store.get(key), HostState)
    except DamagedError:
        return None


def listen(address: str) -> Store:
    """Serve the store of all hosts, on that one address.

    Raises:
        SettingsError: it is not this host's, or taken.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen()
            descriptor = listening.detach()
    except OSError as exc:
        raise SettingsError(
            f'learner.rendezvous = "{address}" cannot be listened on by host 0: {exc.strerror or exc}'
        ) from exc
    patience = timedelta(seconds=SILENT_SECONDS)
    return TCPStore(str(place[0]), int(place[1]), None, True, patience, False, master_listen_fd=descriptor)


def reach(address: str, stop: threading.Event) -> Store | None:
    """Connect to the store of host 0, when it is there; None once `stop` is set."""
    told = False
    while not stop.is_set():
        try:
            return connect(address, timedelta(seconds=SILENT_SECONDS))
        except OSError as exc:
            if not told:
                log.info("waiting for host 0 at %s: %s", address, exc.strerror or exc)
                told = True
            stop.wait(_TICK_SECONDS)
    return None


def own_address(address: str) -> str:
    """Return the address of this host by which it reaches host 0; raises OSError."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as connected:
        return str(connected.getsockname()[0])


def connect(address: str, patience: timedelta) -> Store:
    """Connect to the store of host 0 now; raises OSError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    # Torch goes on trying, and says so on stderr each time: it is asked only when somebody listens.
    socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    try:
        return TCPStore(host, int(port), None, False, patience, False)
    except RuntimeError as exc:
        raise OSError(str(exc).partition("\n")[0]) from exc
