"""A store at a step boundary, which a checkpoint is written of while the store goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from replay.plan import Plan, planned_rows
from replay.snapshot import Change, Standing
from replay.tiers.hierarchy import Tiers


@dataclass(frozen=True)
class Held:
    """What `Store.hold` copied; the payload of its events is not written over until `Store.let_go`."""

    standing: Standing
    change: Change
    identity: NDArray[np.uint64]
    plans: Sequence[Plan]

    def contents(self, tiers: Tiers) -> tuple[Standing, Change]:
        """Return it with the payload, or once that is durable; raises OSError when it cannot be made so."""
        change = self.change
        if tiers.durable:
            tiers.sync()
        else:
            payload, _ = tiers.read(change.index["slot"].astype(np.int64), self.identity)
            change = replace(change, payload=payload)
        plans = [planned_rows(plan) for plan in self.plans]
        return replace(self.standing, plans=plans, stale=tiers.stale_caches), change
