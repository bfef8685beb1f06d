"""A store at a step boundary, which a checkpoint is written of while the store goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from replay.payload.hierarchy import TierHierarchy
from replay.plan import SamplePlan, planned_rows
from replay.snapshot import StoreDelta, StoreState


@dataclass(frozen=True)
class CapturedStore:
    """What `Store.hold` copied; the payload of its events is not written over until `Store.let_go`."""

    standing: StoreState
    change: StoreDelta
    identity: NDArray[np.uint64]
    plans: Sequence[SamplePlan]

    def contents(self, tiers: TierHierarchy) -> tuple[StoreState, StoreDelta]:
        """Return it with the payload, or once that is durable; raises OSError when it cannot be made so."""
        change = self.change
        if tiers.durable:
            tiers.sync()
        else:
            payload, _ = tiers.read(change.index["slot"].astype(np.int64), self.identity)
            change = replace(change, payload=payload)
        plans = [planned_rows(plan) for plan in self.plans]
        return replace(self.standing, plans=plans, stale=tiers.stale_caches), change
