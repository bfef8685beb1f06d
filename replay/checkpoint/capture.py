"""The state of a store at a step boundary, which a checkpoint writes while the store is in use.

Where checkpoints are complete, their segments have the rows of a slower tier as well, in separate files: one is
written with its segment, from the tier, and shared as the segment is. So the rows are twice on the disk. A row is read
by its slot, which keeps it until the checkpoint is written; earlier files are not read, and a host that has the tier
reads none of them.

Legend: n events of a call.
"""

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anabranch.core.failures import out_of_memory
from ingest.events.identity import identity_hash
from replay.payload.hierarchy import TierHierarchy
from replay.row_source import TierRows
from replay.sample_plan import SamplePlan, saved_plan
from replay.snapshot import StoreDelta, StoreState


@dataclass(frozen=True)
class CapturedStore:
    """The state that `Store.begin_snapshot` copied; slots keep the payload of its events until `Store.end_snapshot`."""

    state: StoreState
    change: StoreDelta
    identity: NDArray[np.uint64]
    plans: Sequence[SamplePlan]

    def contents(self, tiers: TierHierarchy, oldest: int = 0) -> tuple[StoreState, StoreDelta]:
        """Return the state with the payload, or once that is durable.

        `oldest`: the first checkpoint that may be restored once this one is written.

        Raises:
            OSError: it cannot be made durable, or there is no memory to read it now.
        """
        change = self.change
        try:
            if tiers.durable:
                with contextlib.suppress(*([] if self.state.row_bytes is not None else [OSError])):
                    tiers.mark_intact(self.state.checkpoint, self.state.stamp, oldest)
                tiers.sync()
                if self.state.row_bytes is not None:
                    change = replace(change, rows=lambda events: self._rows(events, tiers))
            else:
                payload, _ = tiers.read(change.index["slot"].astype(np.int64), self.identity)
                change = replace(change, payload=payload)
            plans = [saved_plan(plan) for plan in self.plans]
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            reason = f"no memory to read the stored events: {str(exc).splitlines()[0]}"
            raise OSError(errno.ENOMEM, reason) from exc
        return replace(self.state, plans=plans, stale=tiers.stale_caches), change

    def _rows(self, events: NDArray[np.void], tiers: TierHierarchy) -> TierRows:
        """Return the rows of n events, ENTRY `[n]`."""
        state = self.state
        assert state.row_bytes is not None
        bases = np.array(state.bases, np.uint64)[events["partition"]]
        identity = identity_hash(bases, events["offset"], events["row"])
        return TierRows(state.row_bytes, events["slot"].astype(np.int64), identity, tiers.read)
