"""For tests: checkpoints of a store without files."""

import numpy as np
import torch

from replay.checkpoint.capture import CapturedStore
from replay.snapshot import StoreSnapshot
from replay.store import Store


class FakeCheckpoints:
    """The checkpoints of one store, each told as a change of the one before, put together the plain way."""

    def __init__(self, store: Store, before: StoreSnapshot | None = None) -> None:
        self._store = store
        self._before = before

    def checkpoint(self, number: int, oldest: int | None = None) -> StoreSnapshot:
        """Checkpoint the store, and let go of what only checkpoints before `oldest` need; all, when none is given."""
        contents = self.finish(self._store.begin_snapshot(number))
        self._store.end_snapshot(number if oldest is None else oldest)
        return contents

    def finish(self, held: CapturedStore) -> StoreSnapshot:
        """Return all that was held; `end_snapshot` is the caller's."""
        standing, change = self._store.contents(held)
        index, payload = change.index, change.payload
        if change.base is not None:
            assert self._before is not None
            assert self._before.standing.checkpoint == change.base
            index = np.concatenate([self._before.index[change.alive], index])
            if payload is not None and self._before.payload is not None:
                payload = torch.cat([self._before.payload[torch.from_numpy(change.alive)], payload])
        self._before = StoreSnapshot(standing, index, payload)
        return self._before
