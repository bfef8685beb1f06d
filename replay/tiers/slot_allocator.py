"""Allocates slots that neither the store nor a checkpoint names.

If the payload outlives the process, a checkpoint contains slots, not rows. A store that is restored from it must find
the same rows in these slots. So the slot of a removed event is *retired*, with the number of the last checkpoint that
may name it, and is written again once that checkpoint is gone. A slot that was taken since the last checkpoint began is
named by none, and is free at once.
"""

import numpy as np
from numpy.typing import NDArray


class SlotAllocator:
    """The slots `[0, count)` of a tier.

    Args:
        count: how many there are.
        durable: whether checkpoints name slots; if not, slots must keep their rows only while a checkpoint is being
            written.
    """

    def __init__(self, count: int, *, durable: bool) -> None:
        self._durable = durable
        self._free = np.arange(count, dtype=np.int32)[::-1].copy()
        self._retired: list[tuple[int, NDArray[np.int32]]] = []
        self._unnamed = np.zeros(count, np.bool_)
        self._last_checkpoint = 0
        self._in_snapshot = False
        self.free_at_once = True
        """Whether the slots of removed events may be written at once: no checkpoint names them."""
        self.waiting = 0
        """Slots that were released since the last checkpoint began, and stay retired until it is gone."""

    def _update(self) -> None:
        """Update the attributes, which each step reads."""
        self.free_at_once = not self._in_snapshot and not (self._durable and self._last_checkpoint)
        since = [slots for last, slots in self._retired if last == self._last_checkpoint] if self._durable else []
        self.waiting = sum(map(len, since))

    @property
    def free(self) -> int:
        """Slots that may be written now."""
        return len(self._free)

    @property
    def retired(self) -> int:
        """Released slots that are free once enough checkpoints were written."""
        return sum(len(slots) for _, slots in self._retired)

    def take(self, n: int) -> NDArray[np.int32]:
        """Return n free slots."""
        taken, self._free = self._free[len(self._free) - n :], self._free[: len(self._free) - n]
        self._unnamed[taken] = True
        return taken

    def release(self, slots: NDArray[np.int32]) -> None:
        """Release the slots of removed events."""
        if not self.free_at_once:
            unnamed = self._unnamed[slots]
            self._retired.append((self._last_checkpoint, slots[~unnamed]))
            self._update()
            slots = slots[unnamed]
        self._free = np.concatenate([self._free, slots])

    def begin_snapshot(self, number: int) -> NDArray[np.int64]:
        """Begin checkpoint `number`: slots keep their rows until `end_snapshot`.

        Returns:
            int64 `[P, 2]`, the retired slots, each after the number of the last checkpoint that may name it.
        """
        assert not self._in_snapshot
        assert number > self._last_checkpoint
        self._in_snapshot, self._last_checkpoint = True, number
        self._unnamed[:] = False
        self._update()
        pairs = [np.stack([np.full(len(slots), last), slots], axis=1) for last, slots in self._retired]
        return np.concatenate([np.empty((0, 2), np.int64), *pairs])

    def end_snapshot(self, oldest: int | None) -> None:
        """End the snapshot; `oldest`: the number of the oldest checkpoint that may be restored; None without one."""
        self._in_snapshot = False
        stays = [oldest is not None and self._durable and last >= oldest for last, _ in self._retired]
        freed = [slots for (_, slots), stay in zip(self._retired, stays, strict=True) if not stay]
        self._retired = [pair for pair, stay in zip(self._retired, stays, strict=True) if stay]
        self._free = np.concatenate([self._free, *freed])
        self._update()

    def restore(self, used: NDArray[np.int32], retired: NDArray[np.int64], last_checkpoint: int) -> None:
        """Restore the slots that a checkpoint names, those that were retired, and its number."""
        self._last_checkpoint = last_checkpoint
        taken = np.zeros(len(self._free), np.bool_)
        taken[used] = True
        taken[retired[:, 1]] = True
        self._free = np.flatnonzero(~taken)[::-1].astype(np.int32)
        self._retired = [
            (last, retired[retired[:, 0] == last, 1].astype(np.int32)) for last in np.unique(retired[:, 0]).tolist()
        ]
        self._update()
