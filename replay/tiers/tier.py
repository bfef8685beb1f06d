"""The contracts of a tier, which holds the payload of events as packed rows, and of the factory that opens one.

Legend: n rows of a call, N rows of an array, R bytes of a row, S slots of the tier.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import crc32c
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.reported import Reported
from anabranch.replay.snapshot import StoreSnapshot, TierRef


class Tier:
    """S slots for one row each. A tier stores rows, and has no list of the held events.

    A tier that cannot be reached raises OSError: its rows may still be valid. After an error in `write` some of the
    rows may be written.
    """

    name: str
    """Its label in metrics: device, or the name of its section in `[replay]`."""
    slots: int
    slot_bytes: int
    """Bytes of an event in this tier."""

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Write rows `[n, R]` of the events `identity` `[n]` into slots `[n]`; raises OSError when it cannot."""
        raise NotImplementedError

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return the rows of slots `[n]`, uint8 `[n, R]` on the host, and which are valid, bool `[n]`.

        A row is valid if its last write was for the event `identity`; the bytes of other rows are undefined.
        """
        raise NotImplementedError

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite the rows of slots `[n]`, which are invalid afterwards; raises OSError when it cannot."""
        raise NotImplementedError

    def close(self) -> None:
        """Release memory, files and connections."""


class SlowTier(Tier):
    """A tier that is written and read in the background, into rows on the host.

    What is no matter of a cache, whose rows end with the process, does nothing here.
    """

    row_bytes: int
    pinned = False
    """Whether rows are read into pinned memory, for a GPU."""
    file: TierRef | None = None
    """The reference to these slots in a checkpoint; None for a cache."""

    @override
    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        rows_nR = torch.empty((len(slots), self.row_bytes), dtype=torch.uint8, pin_memory=self.pinned)
        return rows_nR, self.read_into(rows_nR, np.arange(len(slots)), slots, identity)

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work, else None; any thread may ask."""
        return None

    def read_into(
        self,
        rows_NR: Tensor,
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        identity: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """Read n rows into positions `[n]` of `rows_NR`, and return which are valid, bool `[n]`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Wait until all writes outlive the process; raises OSError when they do not."""

    def mark_intact(self, number: int, stamp: str, oldest: int) -> None:
        """Record that the rows which are durable after the next `sync` are those of the checkpoint of this number.

        The checkpoint, of this stamp, is published after that; then `oldest` is the first that may be restored. Raises
        OSError when it cannot.
        """

    def mark_named(self) -> None:
        """Record durably that a checkpoint names these slots; raises OSError when it cannot.

        A later start without checkpoints, which may have been moved away, then does not remove the slots.
        """


@dataclass(frozen=True)
class TierContext:
    """Where the slower tiers of one store are.

    Attributes:
        folder: of their files; None where files are impossible.
        keys: the prefix of their keys on a server, and of no others; empty where a server is impossible.
        row_bytes: R.
        pinned: whether rows are read into pinned memory, for a GPU.
        writable: whether a checkpoint's tier is opened for writing.
        name: of the section of `[replay.tiers]`; empty for ours.
    """

    folder: Path | None
    keys: str
    row_bytes: int
    pinned: bool = False
    writable: bool = True
    name: str = ""


class TierFactory:
    """Opens the slower tiers of one kind for one store: its present one, and the one with the payload of a checkpoint.

    A class of `replay.tiers` is called with a `TierSettings`, a `TierContext`, and further keys of its section by name.
    If `[replay]` does not configure the kind, `slots`, `open_primary` and `cache` are not called. The methods with a
    body suit a cache without a server or files, and may be inherited.
    """

    @property
    def slots(self) -> int:
        """The slots that the configured bytes hold."""
        raise NotImplementedError

    def connect(self, opened: ExitStack, *, needed: bool) -> None:
        """Connect to the server, where `[replay]` names one, before any tier is opened.

        Args:
            opened: closes the connection if no store is composed that would close the tiers.
            needed: whether the server must answer now.

        Raises:
            DependencyError: the server cannot be reached, and is needed.
            SettingsError: the server cannot be used.
        """

    def owns(self, _file: TierRef) -> bool:
        """Return whether the reference in a checkpoint is to a tier of this kind."""
        return False

    def open_existing(self, contents: StoreSnapshot) -> SlowTier:
        """Open the tier with the payload of a checkpoint, which it `owns`; raises SettingsError when it is missing."""
        raise NotImplementedError

    def open_primary(self, _slots: int, _source: SlowTier | None) -> SlowTier:
        """Open the primary tier: the checkpoint's where that is of this kind and fits, else a new one.

        Raises:
            SettingsError: it cannot be created.
        """
        raise SettingsError(
            "the slowest tier that [replay] sets stores nothing for a restart, and has to store everything; set "
            "replay.disk or replay.redis too"
        )

    def cache(self, _slots: int, _primary: SlowTier) -> SlowTier:
        """Open a cache of the first slots of the primary tier; raises SettingsError when it cannot be created."""
        raise SettingsError("a tier above the slowest one that [replay] sets is no cache; leave the slower ones out")

    def cleanup_actions(self, *, first: bool) -> list[Callable[[], None]]:  # noqa: ARG002 such a kind has none
        """Return functions that remove files and keys that only checkpoints of earlier processes can name.

        Open tiers are not removed.

        Args:
            first: whether there are no such checkpoints, so that all may be removed at once.
        """
        return []


class TierStats(msgspec.Struct):
    """Running totals. The store's thread counts those of the memory tier, the I/O thread those of slower tiers."""

    row_bytes: int
    """R."""
    read: Annotated[
        dict[str, int],
        Reported("anabranch_replay_read_rows_total", "Events read for samples, by the tier they came from.", "tier"),
    ]
    missed: Annotated[
        dict[str, int],
        Reported(
            "anabranch_replay_missed_rows_total",
            "Events that a cache was to have and had not: they came from a slower tier, and are put back.",
            "tier",
        ),
    ]
    moved: Annotated[
        dict[tuple[str, ...], int],
        Reported(
            "anabranch_replay_moved_bytes_total",
            "Bytes of payload read from a tier for samples, or written to it.",
            "tier",
            "direction",
        ),
    ]
    stall_seconds: Annotated[
        float,
        Reported(
            "anabranch_replay_stall_seconds_total",
            "Time that steps waited for a slower tier, or for what the store had to do before.",
        ),
    ] = 0.0
    demoted: Annotated[
        int,
        Reported("anabranch_replay_demoted_rows_total", "Events in the memory tier that made way for others."),
    ] = 0

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


CHECKSUM = np.dtype("<u8")


def row_sums(
    rows: memoryview, row_bytes: int, positions: Sequence[int], stride: int | None = None
) -> NDArray[np.uint64]:
    """Return the CRC-32C of the rows at n positions; xor the event's identity it is the record's checksum.

    `stride`: bytes from one row to the next, if these are more than `row_bytes`.
    """
    crc, step = crc32c.crc32c, stride or row_bytes
    sums = [crc(rows[at * step : at * step + row_bytes]) for at in positions]
    return np.array(sums, np.uint64)
