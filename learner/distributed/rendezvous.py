"""Rendezvous of the launchers of several hosts: they agree on the hosts and ranks of each round.

Host 0 decides which hosts take part in a round, and assigns their ranks. A round ends on all hosts when it ends on one;
then host 0 assigns the next round to the hosts that are there.
"""

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256

import msgspec
import torch
from torch.distributed import Store, is_nccl_available  # type: ignore[attr-defined]

from anabranch.core.errors import SettingsError
from ingest.config import StreamSettings
from ingest.transport.tcp import Remote
from learner.config import LearnerSettings
from learner.distributed.hosts import Hosts, MembershipChange, SingleHost
from learner.distributed.membership import (
    HostAssignment,
    HostState,
    Membership,
    MembershipRound,
    listen,
    own_address,
    reach,
    read_state,
)
from learner.model.device import choose_device, choose_precision

_POLL_SECONDS = 0.1
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
"""Settings of the learner that may differ between hosts."""
_READABLE = {"torch", "device type", "precision", "CUDA", "NCCL"}
"""Values that have to be the same on all hosts and are published as they are, not as a digest."""
_DUPLICATE_CHECK_SECONDS = 2.0
"""How long a launcher watches whether another one publishes states of the same host."""

log = logging.getLogger(__name__)


class Coordinator:
    """Host 0's: waits for the other hosts, for `learner.join_timeout` at most, and assigns the ranks."""

    leads = True

    def __init__(self, store: Store, settings: LearnerSettings, alike: dict[str, str]) -> None:
        self._others = range(1, settings.hosts)
        self._join_timeout = settings.join_timeout
        self._ranks = settings.replicas
        self._membership = Membership(store, 0, HostState(str(uuid.uuid4()), self._ranks, alike), self._others)
        self._round: MembershipRound | None = None
        self._within: set[int] = set()
        self._refused: dict[int, str] = {}

    @property
    def ran_out(self) -> Collection[str]:
        """The rounds that the states of the other hosts name, until their ranks end again."""
        states = [self._membership.latest(host) for host in self._others]
        return [state.ran_out for state in states if state is not None and state.ran_out is not None]

    def next_round(self, stop: threading.Event) -> MembershipRound | None:
        """Wait until all hosts are ready or the join timeout has passed, and assign a round."""
        deadline, logged = time.monotonic() + self._join_timeout.total_seconds(), False
        while not stop.is_set():
            ready = {host: state for host in self._others if (state := self._ready(host))}
            awaited = [host for host in self._others if host not in ready and not self._left(host)]
            if not awaited or time.monotonic() > deadline:
                return self._assign(ready)
            if not logged:
                log.info("waiting for host %s for %s at most", ", ".join(map(str, awaited)), self._join_timeout)
                logged = True
            stop.wait(_POLL_SECONDS)
        return None

    def poll(self) -> MembershipChange:
        """Compare the states of the other hosts with the round."""
        assert self._round is not None
        newcomers = False
        for host in self._others:
            assignment, state = self._round.assignments.get(host), self._membership.latest(host)
            if assignment is None:
                newcomers |= self._ready(host) is not None
                continue
            if state is None or state.id != assignment.id:
                log.warning("host %d is gone", host)
                return MembershipChange.LOST
            if state.within == self._round.name:
                self._within.add(host)
            elif host in self._within:
                return MembershipChange.DIED
            newcomers |= state.leaving
        return MembershipChange.HOSTS if newcomers else MembershipChange.NONE

    def round_ended(self, *, ran_out: bool) -> None:  # noqa: ARG002 the launcher has it already
        """Publish that there is no round, so that the other hosts end their ranks too."""
        self._membership.publish(current_round=None)

    def leave(self) -> None:
        """Do nothing: the other hosts wait until this one is back."""

    def close(self) -> None:
        """Stop publishing."""
        self._membership.close()

    def _ready(self, host: int) -> HostState | None:
        state = self._membership.latest(host)
        if state is None or state.within is not None or state.leaving or not self._accepts(host, state):
            return None
        return state

    def _accepts(self, host: int, state: HostState) -> bool:
        """Return whether a host has the settings of this one; if not, log it once per start: that host ends itself."""
        differing = differing_settings(state, self._membership.state)
        if differing and self._refused.get(host) != state.id:
            self._refused[host] = state.id
            log.warning("host %d is refused: its %s differ from those of host 0", host, differing)
        return not differing

    def _left(self, host: int) -> bool:
        state = self._membership.latest(host)
        return state is not None and state.leaving

    def _assign(self, ready: Mapping[int, HostState]) -> MembershipRound:
        assignments, size = {0: HostAssignment(self._membership.state.id, 0)}, self._ranks
        for host, state in ready.items():
            assignments[host] = HostAssignment(state.id, size, state.reads_at)
            size += state.ranks
        self._round, self._within = MembershipRound(str(uuid.uuid4()), size, assignments), set()
        self._membership.publish(current_round=self._round)
        log.info("%d of %d hosts take part, with %d ranks", len(assignments), len(self._others) + 1, size)
        return self._round


class Member:
    """Another host's: runs the rounds that host 0 assigns, and waits while host 0 is away."""

    leads = False
    ran_out: Collection[str] = ()

    def __init__(self, settings: LearnerSettings, stream: StreamSettings, alike: dict[str, str]) -> None:
        assert settings.rendezvous is not None
        self._address = settings.rendezvous
        self._stream = stream
        self._remote: Remote | None = None
        self._host = settings.host_rank
        self._state = HostState(str(uuid.uuid4()), settings.replicas, alike)
        self._membership: Membership | None = None
        self._last = ""

    def next_round(self, stop: threading.Event) -> MembershipRound | None:
        """Wait for a round in which host 0 gives this launcher an assignment.

        Raises:
            SettingsError: host 0 has other settings, or another launcher runs as this host.
        """
        while not stop.is_set():
            self._keep_ingest()
            if self._membership is None or self._membership.broken:
                self._connect(stop)
            elif (leader := self._membership.latest(0)) is not None:
                self._check(leader)
                current_round = leader.current_round
                assignment = current_round.assignments.get(self._host) if current_round is not None else None
                if (
                    current_round is not None
                    and assignment is not None
                    and assignment.id == self._state.id
                    and current_round.name != self._last
                ):
                    self._last = current_round.name
                    self._membership.publish(within=current_round.name)
                    return current_round
            stop.wait(_POLL_SECONDS)
        return None

    def poll(self) -> MembershipChange:
        """Compare the state of host 0 with the round, and keep the ingest process running."""
        self._keep_ingest()
        assert self._membership is not None
        leader = self._membership.latest(0)
        if self._membership.broken or leader is None:
            log.warning("host 0 is gone; it is waited for")
            return MembershipChange.LOST
        return (
            MembershipChange.NONE
            if leader.current_round is not None and leader.current_round.name == self._last
            else MembershipChange.LOST
        )

    def round_ended(self, *, ran_out: bool) -> None:
        """Publish that this host is ready for another round."""
        self._restart_ingest()
        if self._membership is not None:
            last = self._last if ran_out else None
            self._membership.publish(within=None, reads_at=self._state.reads_at, ran_out=last)

    def leave(self) -> None:
        """Publish that host 0 is to assign rounds without this host."""
        if self._membership is not None:
            self._membership.publish(leaving=True)

    def close(self) -> None:
        """Publish that this host has left, and end its ingest process."""
        if self._remote is not None:
            self._remote.close()
        if self._membership is not None:
            self._membership.publish(leaving=True, within=None)
            self._membership.close()

    def _connect(self, stop: threading.Event) -> None:
        if self._membership is not None:
            self._membership.close()
            self._membership = None
        store = reach(self._address, stop)
        if store is None:
            return
        before = read_state(store, self._host)
        if before is not None and before.id != self._state.id and not before.leaving:
            stop.wait(_DUPLICATE_CHECK_SECONDS)
            now = read_state(store, self._host)
            if now is not None and now.beat != before.beat:
                raise SettingsError(f"learner.host_rank = {self._host}: another launcher is host {self._host} already")
        self._restart_ingest()
        self._membership = Membership(store, self._host, self._state, range(1))

    def _restart_ingest(self) -> None:
        """Restart the ingest process: the one before may wait for a learner that is gone."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        with suppress(OSError):  # host 0 is gone; `next_round` connects again
            self._remote = Remote(self._stream, own_address(self._address))
        self._state = msgspec.structs.replace(self._state, reads_at=self._remote.address if self._remote else "")

    def _keep_ingest(self) -> None:
        if self._remote is not None:
            self._remote.keep()

    def _check(self, leader: HostState) -> None:
        if differing := differing_settings(self._state, leader):
            raise SettingsError(
                f"{differing} of host {self._host} differ from those of host 0; all hosts take the same ones"
            )


@contextmanager
def connect_hosts(settings: LearnerSettings, stream: StreamSettings, others: Mapping[str, object]) -> Iterator[Hosts]:
    """Yield the rounds of this host.

    Args:
        settings: of this host's learner.
        stream: the stream; this host reads a part of it.
        others: further values that have to be the same on all hosts, by name.

    Raises:
        SettingsError: `learner.rendezvous` cannot be listened on, or there is no `learner.interface` or device.
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
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        raise SettingsError(f'learner.interface = "{settings.interface}": there are {interfaces}') from exc
    learner = settings.model_dump(mode="json", exclude=_OWN)
    alike = {name: _digest(values) for name, values in {**others, "[learner]": learner}.items()}
    alike |= _releases(settings)
    hosts: Coordinator | Member
    hosts = (
        Coordinator(listen(address), settings, alike) if settings.host_rank == 0 else Member(settings, stream, alike)
    )
    try:
        yield hosts
    finally:
        hosts.close()


def _releases(settings: LearnerSettings) -> dict[str, str]:
    """Return the device type, precision and releases of this host, which the ranks of all hosts need alike.

    Between a CPU and a CUDA device, or between two precisions, ranks would wait for each other without end.

    Raises:
        SettingsError: there is no such device, or it cannot do the precision.
    """
    device = choose_device(settings.device)
    precision = choose_precision(settings.precision, device).name
    alike = {"torch": torch.__version__.partition("+")[0], "device type": device.type, "precision": precision}
    if device.type == "cuda":
        alike["CUDA"] = str(torch.version.cuda)
        nccl = torch.cuda.nccl.version() if is_nccl_available() else ("none",)  # type: ignore[no-untyped-call]
        alike["NCCL"] = ".".join(map(str, nccl))
    return alike


def differing_settings(one: HostState, host_0: HostState) -> str:
    """Return what differs between a host and host 0, joined by commas; empty when nothing does."""
    ours, theirs = one.settings, host_0.settings
    names = sorted((ours.keys() | theirs.keys()) - (_READABLE - (ours.keys() & theirs.keys())))
    return ", ".join(
        f"{name} ({ours[name]}, not {theirs[name]})" if name in _READABLE else name
        for name in names
        if ours.get(name) != theirs.get(name)
    )


def _digest(values: object) -> str:
    """Return a digest of JSON values."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
