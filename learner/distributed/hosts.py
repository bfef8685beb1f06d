"""The contract between the launcher and the rendezvous of hosts, and the rendezvous of a single host."""

import threading
import uuid
from collections.abc import Collection
from enum import Enum
from typing import Protocol

from learner.distributed.membership import HostAssignment, MembershipRound


class MembershipChange(Enum):
    """Why a round has to end, if it does."""

    NONE = "nothing"
    HOSTS = "a host came, or is leaving: stop in order, and assign another round"
    DIED = "the ranks of another host are gone"
    LOST = "another host is gone"


class Hosts(Protocol):
    """Returns the rounds that ranks are started for. Used by the launcher's one thread."""

    leads: bool
    """Whether this host decides when to give up."""

    @property
    def ran_out(self) -> Collection[str]:
        """The last round of each other host, by name, if its ranks ran out of memory in it."""
        ...

    def next_round(self, stop: threading.Event) -> MembershipRound | None:
        """Wait for the next round that this host takes part in; return None once `stop` is set."""
        ...

    def poll(self) -> MembershipChange:
        """Return whether the round has to end, and why."""
        ...

    def round_ended(self, *, ran_out: bool) -> None:
        """Publish that the ranks of this host have ended, and whether they ran out of memory."""
        ...

    def leave(self) -> None:
        """Publish that this host leaves when the round ends."""
        ...


class SingleHost:
    """The only host: it starts its round at once."""

    leads = True
    ran_out: Collection[str] = ()

    def __init__(self, ranks: int) -> None:
        self._round = MembershipRound(str(uuid.uuid4()), ranks, {0: HostAssignment("", 0)})

    def next_round(self, stop: threading.Event) -> MembershipRound | None:
        """Return the round at once; None once `stop` is set."""
        return None if stop.is_set() else self._round

    def poll(self) -> MembershipChange:
        """Return that the round goes on."""
        return MembershipChange.NONE

    def round_ended(self, *, ran_out: bool) -> None:
        """Do nothing: there is no other host."""

    def leave(self) -> None:
        """Do nothing: there is no other host."""
