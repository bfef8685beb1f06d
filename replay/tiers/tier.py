"""The contract of a tier: a place where the payload of events lies, a packed row each; and of how one is opened.

Legend: n rows of a call, N rows of an array, R bytes of a row, S slots of the tier.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import SettingsError
from replay.snapshot import StoreSnapshot, TierRef


class Tier(Protocol):
    """S slots for one row each. Which events are in the store is not its business, only where their payload lies.

    A tier that cannot be asked at the moment raises OSError: that tells nothing of its rows. What it raises in `write`
    may leave some of the rows written.
    """

    name: str
    """Its label in metrics: device, or the name of its section in `[replay]`."""
    slots: int
    slot_bytes: int
    """Bytes that an event takes here."""

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8], /) -> None:
        """Write rows `[n, R]` of the events `identity` `[n]` into slots `[n]`; raises OSError when it cannot."""
        ...

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], /) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return the rows of slots `[n]`, uint8 `[n, R]` on the tier's device, and which are whole, bool `[n]`.

        A row is whole when it is what was last written for the event `identity`; of others the bytes mean nothing.
        """
        ...

    def erase(self, slots: NDArray[np.int64], /) -> None:
        """Overwrite the rows of slots `[n]`, which are no event's afterwards; raises OSError when it cannot."""
        ...

    def close(self) -> None:
        """Let go of memory, files and connections."""
        ...


class SlowTier(Tier, Protocol):
    """A tier that is written and read in the background, into rows on the host."""

    @property
    def file(self) -> TierRef | None:
        """What a checkpoint names for these slots to be found again; None where they are gone with the process: a
        cache."""
        ...

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work as it should; in any thread."""
        ...

    def read_into(
        self,
        rows_NR: Tensor,
        places: NDArray[np.int64],
        slots: NDArray[np.int64],
        identity: NDArray[np.uint64],
        /,
    ) -> NDArray[np.bool_]:
        """Read n rows into places `[n]` of `rows_NR`, and return which are whole, bool `[n]`."""
        ...

    def sync(self) -> None:
        """Wait until what was written outlives the process; raises OSError when it does not."""
        ...

    def mark_named(self) -> None:
        """Keep in mind, beyond the process, that there is a checkpoint that names these slots; raises OSError when it
        cannot.

        So that a start without checkpoints, which may have been moved away, does not remove what they name.
        """
        ...


@dataclass(frozen=True)
class TierContext:
    """Where the slower tiers of one store lie.

    Attributes:
        folder: of their files; None where there can be none.
        keys: what their keys on a server begin with, and no other's do; empty where there can be none.
        row_bytes: R.
        pinned: whether rows are read into pinned memory, for a GPU.
        writable: whether a checkpoint's tier is opened for more than a look.
    """

    folder: Path | None
    keys: str
    row_bytes: int
    pinned: bool = False
    writable: bool = True


class TierFactory(Protocol):
    """Opens the slower tiers of one kind for one store: its own one, and that which has the payload of a checkpoint.

    Of a kind that `[replay]` leaves out neither `slots` nor a home or a cache are asked for. What has a body here is
    for a cache without a server or files, and may be inherited.
    """

    @property
    def slots(self) -> int:
        """The slots that its bytes hold."""
        ...

    def connect(self, opened: ExitStack, /, *, needed: bool) -> None:
        """Reach its server, where `[replay]` names one, before any tier is opened.

        Args:
            opened: what closes it if there comes no store to close its tiers.
            needed: whether it must be there now.

        Raises:
            DependencyError: it cannot be reached, and is needed.
            SettingsError: it cannot be used.
        """

    def owns(self, _file: TierRef, /) -> bool:
        """Return whether what a checkpoint names is a tier of this kind."""
        return False

    def open_existing(self, contents: StoreSnapshot, /) -> SlowTier:
        """Open the tier that has the payload of a checkpoint, which it `owns`; raises SettingsError when it is not
        there."""
        raise NotImplementedError

    def open_primary(self, _slots: int, _source: SlowTier | None, /) -> SlowTier:
        """Open the tier that holds all: the checkpoint's where that one is of this kind and fits, else a new one.

        Raises:
            SettingsError: it cannot be had.
        """
        raise SettingsError(
            "the slowest tier that [replay] sets holds nothing for a restart, and is to hold everything; set "
            "replay.disk or replay.redis too"
        )

    def cache(self, slots: int, home: SlowTier, /) -> SlowTier:
        """Open the tier that has the first slots of another; raises SettingsError when it cannot be had."""
        ...

    def cleanup_actions(self, *, first: bool) -> list[Callable[[], None]]:  # noqa: ARG002 of such a kind there are none
        """Return what removes things that only checkpoints of earlier processes can name, beside what was opened.

        Args:
            first: whether there are no such checkpoints, so that they may go at once.
        """
        return []


@dataclass
class TierStats:
    """Running totals. The store's thread counts those of the memory tier, the I/O thread those of slower tiers.

    Attributes:
        row_bytes: R.
        read: rows that were read for samples, by tier.
        missed: rows that a cache should have had and had not, by tier.
        moved: bytes by tier and direction, `read` or `written`.
        stall_seconds: time that steps waited, for a tier or for earlier work of the store.
    """

    row_bytes: int
    read: dict[str, int]
    missed: dict[str, int]
    moved: dict[tuple[str, str], int]
    stall_seconds: float = 0.0

    @classmethod
    def of(cls, tiers: Sequence[Tier]) -> "TierStats":
        """Return totals of 0 for these tiers, from fast to slow."""
        names = [tier.name for tier in tiers]
        return cls(
            tiers[0].slot_bytes,
            dict.fromkeys(names, 0),
            dict.fromkeys(names[:-1], 0),
            {(name, direction): 0 for name in names for direction in ("read", "written")},
        )

    def add_read(self, name: str, rows: int) -> None:
        """Count rows that were read from a tier for samples."""
        self.read[name] += rows
        self.add_moved(name, "read", rows)

    def add_moved(self, name: str, direction: str, rows: int) -> None:
        """Count the bytes of rows that were read from a tier or written to it."""
        self.moved[name, direction] += rows * self.row_bytes
