"""The state of a store at a step boundary, which a checkpoint writes while the store is in use."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anabranch.core.failures import out_of_memory
from replay.payload.hierarchy import TierHierarchy
from replay.sample_plan import SamplePlan, saved_plan
from replay.snapshot import StoreDelta, StoreState


@dataclass(frozen=True)
class CapturedStore:
    """The state that `Store.begin_snapshot` copied; slots keep the payload of its events until `Store.end_snapshot`."""

    state: StoreState
    change: StoreDelta
    identity: NDArray[np.uint64]
    plans: Sequence[SamplePlan]

    def contents(self, tiers: TierHierarchy) -> tuple[StoreState, StoreDelta]:
        """Return the state with the payload, or once that is durable.

        Raises:
            OSError: it cannot be made durable, or there is no memory to read it now.
        """
        change = self.change
        try:
            if tiers.durable:
                tiers.sync()
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
