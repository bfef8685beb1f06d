"""How the launchers of several hosts meet, and agree on which ranks there are.

Host 0 deals the seats of a round: who takes part, and which ranks are whose. A round ends on all hosts when it ends on
one, and another is dealt to those that are there.
"""

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from hashlib import sha256
from typing import Protocol

import msgspec
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from anabranch.core.errors import SettingsError
from ingest.config import StreamSettings
from ingest.transport.tcp import Remote
from learner.config import LearnerSettings
from learner.distributed.membership import (
    HostAssignment,
    HostState,
    Membership,
    MembershipRound,
    listen,
    own_address,
    reach,
    read_word,
)

_LOOK_SECONDS = 0.1
_OWN = {
    "host_rank",
    "replicas",
    "interface",
    "rendezvous",
    "join_timeout",
    "device",
    "status",
    "stop_timeout",
    "profile",
}
"""Settings of the learner in which hosts may differ."""
_TWICE_SECONDS = 2.0
"""So long is looked whether somebody else says the words of this host."""

log = logging.getLogger(__name__)


class MembershipChange(Enum):
    """What has become of a round."""

    NONE = "nothing"
    HOSTS = "a host came, or wants to leave: stop in order, and deal anew"
    DIED = "the ranks of another host are gone"
    LOST = "another host is gone"


class Hosts(Protocol):
    """Deals the rounds that ranks are started for. Used by the launcher's one thread."""

    leads: bool
    """Whether this is the host that decides when to give up."""

    @property
    def ran_out(self) -> Collection[str]:
        """The names of the rounds in which ranks of other hosts ran out of memory when those last ended."""
        ...

    def gather(self, stop: threading.Event) -> MembershipRound | None:
        """Wait for the next round that this host has a seat in; None once `stop` is set."""
        ...

    def change(self) -> MembershipChange:
        """Return what has become of the round since."""
        ...

    def over(self, *, ran_out: bool) -> None:
        """Say that the ranks of this host have ended, and whether it was for want of memory."""
        ...

    def leave(self) -> None:
        """Say that this host ends when the round does."""
        ...


class SingleHost:
    """One host."""

    leads = True
    ran_out: Collection[str] = ()

    def __init__(self, ranks: int) -> None:
        self._round = MembershipRound(str(uuid.uuid4()), ranks, {0: HostAssignment("", 0)})

    def gather(self, stop: threading.Event) -> MembershipRound | None:
        """Begin at once."""
        return None if stop.is_set() else self._round

    def change(self) -> MembershipChange:
        """Nothing ever changes."""
        return MembershipChange.NONE

    def over(self, *, ran_out: bool) -> None:
        """Nobody to tell."""

    def leave(self) -> None:
        """Nobody to tell."""


class Coordinator:
    """Host 0's: waits for the others, for so long at most, and deals the seats."""

    leads = True

    def __init__(self, store: Store, settings: LearnerSettings, alike: dict[str, str]) -> None:
        self._others = range(1, settings.hosts)
        self._patience = settings.join_timeout
        self._ranks = settings.replicas
        self._voice = Membership(store, 0, HostState(str(uuid.uuid4()), self._ranks, alike), self._others)
        self._round: MembershipRound | None = None
        self._within: set[int] = set()
        self._refused: dict[int, str] = {}

    @property
    def ran_out(self) -> Collection[str]:
        """What the words of all others say, until their ranks end again."""
        words = [self._voice.heard(host) for host in self._others]
        return [word.ran_out for word in words if word is not None and word.ran_out is not None]

    def gather(self, stop: threading.Event) -> MembershipRound | None:
        """Wait until all are ready, or those that are not have had their time."""
        deadline, told = time.monotonic() + self._patience.total_seconds(), False
        while not stop.is_set():
            ready = {host: word for host in self._others if (word := self._ready(host))}
            awaited = [host for host in self._others if host not in ready and not self._left(host)]
            if not awaited or time.monotonic() > deadline:
                return self._deal(ready)
            if not told:
                log.info("waiting for host %s for %s at most", ", ".join(map(str, awaited)), self._patience)
                told = True
            stop.wait(_LOOK_SECONDS)
        return None

    def change(self) -> MembershipChange:
        """Look at the words of all others."""
        assert self._round is not None
        newcomers = False
        for host in self._others:
            seat, word = self._round.seats.get(host), self._voice.heard(host)
            if seat is None:
                newcomers |= self._ready(host) is not None
                continue
            if word is None or word.id != seat.id:
                log.warning("host %d is gone", host)
                return MembershipChange.LOST
            if word.within == self._round.name:
                self._within.add(host)
            elif host in self._within:
                return MembershipChange.DIED
            newcomers |= word.leaving
        return MembershipChange.HOSTS if newcomers else MembershipChange.NONE

    def over(self, *, ran_out: bool) -> None:  # noqa: ARG002 it knows that itself
        """Let all others end their ranks too."""
        self._voice.say(dealt=None)

    def leave(self) -> None:
        """The others wait for this host's return."""

    def close(self) -> None:
        """Fall silent."""
        self._voice.close()

    def _ready(self, host: int) -> HostState | None:
        word = self._voice.heard(host)
        if word is None or word.within is not None or word.leaving or not self._takes(host, word):
            return None
        return word

    def _takes(self, host: int, word: HostState) -> bool:
        """Whether a host has the settings of this one; says so once where it does not, which will end by itself."""
        other = _unlike(self._voice.word, word)
        if other and self._refused.get(host) != word.id:
            self._refused[host] = word.id
            log.warning("host %d is refused: its %s differ from those of host 0", host, other)
        return not other

    def _left(self, host: int) -> bool:
        word = self._voice.heard(host)
        return word is not None and word.leaving

    def _deal(self, ready: Mapping[int, HostState]) -> MembershipRound:
        seats, size = {0: HostAssignment(self._voice.word.id, 0)}, self._ranks
        for host, word in ready.items():
            seats[host] = HostAssignment(word.id, size, word.reads_at)
            size += word.ranks
        self._round, self._within = MembershipRound(str(uuid.uuid4()), size, seats), set()
        self._voice.say(dealt=self._round)
        log.info("%d of %d hosts take part, with %d ranks", len(seats), len(self._others) + 1, size)
        return self._round


class Member:
    """Another host's: takes the seats that host 0 deals, and waits for it as long as it is away."""

    leads = False
    ran_out: Collection[str] = ()

    def __init__(self, settings: LearnerSettings, stream: StreamSettings, alike: dict[str, str]) -> None:
        assert settings.rendezvous is not None
        self._address = settings.rendezvous
        self._stream = stream
        self._remote: Remote | None = None
        self._host = settings.host_rank
        self._word = HostState(str(uuid.uuid4()), settings.replicas, alike)
        self._voice: Membership | None = None
        self._last = ""

    def gather(self, stop: threading.Event) -> MembershipRound | None:
        """Wait for a seat.

        Raises:
            SettingsError: host 0 has other settings, or another launcher says that it is this host.
        """
        while not stop.is_set():
            self._keep_reading()
            if self._voice is None or self._voice.broken:
                self._meet(stop)
            elif (leader := self._voice.heard(0)) is not None:
                self._check(leader)
                dealt = leader.dealt
                seat = dealt.seats.get(self._host) if dealt is not None else None
                if dealt is not None and seat is not None and seat.id == self._word.id and dealt.name != self._last:
                    self._last = dealt.name
                    self._voice.say(within=dealt.name)
                    return dealt
            stop.wait(_LOOK_SECONDS)
        return None

    def change(self) -> MembershipChange:
        """Look at the word of host 0, and at the ingest process here."""
        self._keep_reading()
        assert self._voice is not None
        leader = self._voice.heard(0)
        if self._voice.broken or leader is None:
            log.warning("host 0 is gone; it is waited for")
            return MembershipChange.LOST
        return (
            MembershipChange.NONE
            if leader.dealt is not None and leader.dealt.name == self._last
            else MembershipChange.LOST
        )

    def over(self, *, ran_out: bool) -> None:
        """Be ready for another round."""
        self._read_anew()
        if self._voice is not None:
            last = self._last if ran_out else None
            self._voice.say(within=None, reads_at=self._word.reads_at, ran_out=last)

    def leave(self) -> None:
        """Let host 0 deal without this one."""
        if self._voice is not None:
            self._voice.say(leaving=True)

    def close(self) -> None:
        """Leave at once."""
        if self._remote is not None:
            self._remote.close()
        if self._voice is not None:
            self._voice.say(leaving=True, within=None)
            self._voice.close()

    def _meet(self, stop: threading.Event) -> None:
        if self._voice is not None:
            self._voice.close()
            self._voice = None
        store = reach(self._address, stop)
        if store is None:
            return
        before = read_word(store, self._host)
        if before is not None and before.id != self._word.id and not before.leaving:
            stop.wait(_TWICE_SECONDS)
            now = read_word(store, self._host)
            if now is not None and now.beat != before.beat:
                raise SettingsError(f"learner.host_rank = {self._host}: another launcher is host {self._host} already")
        self._read_anew()
        self._voice = Membership(store, self._host, self._word, range(1))

    def _read_anew(self) -> None:
        """Start another ingest process: the one before may wait for a learner that is gone."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        with suppress(OSError):  # host 0 is gone, and is to be met again
            self._remote = Remote(self._stream, own_address(self._address))
        self._word = msgspec.structs.replace(self._word, reads_at=self._remote.address if self._remote else "")

    def _keep_reading(self) -> None:
        if self._remote is not None:
            self._remote.keep()

    def _check(self, leader: HostState) -> None:
        if other := _unlike(self._word, leader):
            raise SettingsError(
                f"{other} of host {self._host} differ from those of host 0; all hosts take the same ones"
            )


@contextmanager
def meet_hosts(settings: LearnerSettings, stream: StreamSettings, others: Mapping[str, object]) -> Iterator[Hosts]:
    """Yield what deals the rounds of this host.

    Args:
        settings: of this host's learner.
        stream: of which this host reads a part.
        others: what else has to be the same on all hosts, by name.

    Raises:
        SettingsError: `learner.rendezvous` cannot be listened on, or there is no `learner.interface`.
    """
    if settings.hosts == 1:
        yield SingleHost(settings.replicas)
        return
    assert settings.rendezvous is not None
    assert settings.interface is not None
    address = settings.rendezvous
    try:
        socket.if_nametoindex(settings.interface)
    except OSError as exc:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise SettingsError(f'learner.interface = "{settings.interface}": there are {known}') from exc
    learner = settings.model_dump(mode="json", exclude=_OWN)
    alike = {name: _digest(values) for name, values in {**others, "[learner]": learner}.items()}
    alike["torch"] = torch.__version__.partition("+")[0]
    hosts: Coordinator | Member
    hosts = (
        Coordinator(listen(address), settings, alike) if settings.host_rank == 0 else Member(settings, stream, alike)
    )
    try:
        yield hosts
    finally:
        hosts.close()


def _unlike(one: HostState, other: HostState) -> str:
    """Name what two hosts have to have alike and have not; empty: nothing."""
    names = sorted(one.settings.keys() | other.settings.keys())
    return ", ".join(name for name in names if one.settings.get(name) != other.settings.get(name))


def _digest(values: object) -> str:
    """Return what tells values apart, which are JSON's."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
