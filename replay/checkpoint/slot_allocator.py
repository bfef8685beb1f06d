"""Which slots may be written: those that neither the store nor a checkpoint names.

A checkpoint of a store whose payload outlives the process holds slots, not rows. After a crash the store goes on from a
checkpoint, and must find in its slots what they held when it was made: so a slot that an event has left is *retired*,
with the number of the last checkpoint that may name it, and written again when that checkpoint is gone. One that was
taken since the last checkpoint began is named by none, and is free at once.
"""

import numpy as np
from numpy.typing import NDArray


class SlotAllocator:
    """The slots `[0, count)` of a tier.

    Args:
        count: how many there are.
        durable: whether checkpoints name slots; if not, what a slot holds matters only while a checkpoint is being
            written.
    """

    def __init__(self, count: int, *, durable: bool) -> None:
        self._durable = durable
        self._free = np.arange(count, dtype=np.int32)[::-1].copy()
        self._retired: list[tuple[int, NDArray[np.int32]]] = []
        self._unnamed = np.zeros(count, np.bool_)
        self._last_checkpoint = 0
        self._holding = False

    @property
    def free(self) -> int:
        """Slots that may be written now."""
        return len(self._free)

    @property
    def free_at_once(self) -> bool:
        """Whether slots that events leave may be written at once: no checkpoint names them."""
        return not self._holding and not (self._durable and self._last_checkpoint)

    @property
    def waiting(self) -> int:
        """Slots left since the last checkpoint began, which wait for it to be gone."""
        return sum(len(slots) for last, slots in self._retired if last == self._last_checkpoint) if self._durable else 0

    def take(self, n: int) -> NDArray[np.int32]:
        """Return n free slots."""
        taken, self._free = self._free[len(self._free) - n :], self._free[: len(self._free) - n]
        self._unnamed[taken] = True
        return taken

    def leave(self, slots: NDArray[np.int32]) -> None:
        """Give back the slots of events that have left."""
        if not self.free_at_once:
            unnamed = self._unnamed[slots]
            self._retired.append((self._last_checkpoint, slots[~unnamed]))
            slots = slots[unnamed]
        self._free = np.concatenate([self._free, slots])

    def begin_snapshot(self, number: int) -> NDArray[np.int64]:
        """Begin the checkpoint `number`: what slots hold now stays until `end_snapshot` says otherwise.

        Returns:
            int64 `[P, 2]`, the retired slots, each after the number of the last checkpoint that may name it.
        """
        assert not self._holding
        assert number > self._last_checkpoint
        self._holding, self._last_checkpoint = True, number
        self._unnamed[:] = False
        pairs = [np.stack([np.full(len(slots), last), slots], axis=1) for last, slots in self._retired]
        return np.concatenate([np.empty((0, 2), np.int64), *pairs])

    def end_snapshot(self, oldest: int | None) -> None:
        """End a hold, now that the oldest checkpoint that may be resumed is number `oldest`; None: there is none."""
        self._holding = False
        stays = [oldest is not None and self._durable and last >= oldest for last, _ in self._retired]
        freed = [slots for (_, slots), stay in zip(self._retired, stays, strict=True) if not stay]
        self._retired = [pair for pair, stay in zip(self._retired, stays, strict=True) if stay]
        self._free = np.concatenate([self._free, *freed])

    def restore(self, used: NDArray[np.int32], retired: NDArray[np.int64], last_checkpoint: int) -> None:
        """Take up a checkpoint: the slots that it names, those that were retired, and its number."""
        self._last_checkpoint = last_checkpoint
        taken = np.zeros(len(self._free), np.bool_)
        taken[used] = True
        taken[retired[:, 1]] = True
        self._free = np.flatnonzero(~taken)[::-1].astype(np.int32)
        self._retired = [
            (last, retired[retired[:, 0] == last, 1].astype(np.int32)) for last in np.unique(retired[:, 0]).tolist()
        ]
