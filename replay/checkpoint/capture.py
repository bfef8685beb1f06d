"""The state of a store at a step boundary, which a checkpoint stores while the store is in use."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from replay.payload.hierarchy import TierHierarchy
from replay.plan import SamplePlan, planned_rows
from replay.snapshot import StoreDelta, StoreState


@dataclass(frozen=True)
class CapturedStore:
    """The state that `Store.begin_snapshot` copied; the payload of its events stays until `Store.end_snapshot`."""

    standing: StoreState
    change: StoreDelta
    identity: NDArray[np.uint64]
    plans: Sequence[SamplePlan]

    def contents(self, tiers: TierHierarchy) -> tuple[StoreState, StoreDelta]:
        """Return the state with the payload, or once that is durable; raises OSError when it cannot be."""
        change = self.change
        if tiers.durable:
            tiers.sync()
        else:
            payload, _ = tiers.read(change.index["slot"].astype(np.int64), self.identity)
            change = replace(change, payload=payload)
        plans = [planned_rows(plan) for plan in self.plans]
        return replace(self.standing, plans=plans, stale=tiers.stale_caches), change
