"""Plans and samples: the old events chosen for a step in advance, and their arrays.

Both are msgspec structs: creating one takes a tenth of the time of a frozen dataclass, and each step creates both.

Legend: n events chosen, R bytes of a row.
"""

import functools
from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.payload.hierarchy import TierHierarchy
from replay.reservoir.admission import importance
from replay.reservoir.event_table import FIELDS, RECORD
from replay.row_layout import RowLayout
from replay.snapshot import PLANNED, SavedPlan
from replay.tiers.staged_rows import StagedRows


class SamplePlan(msgspec.Struct, frozen=True, eq=False):
    """The events chosen for one step, and their rows, which are being read.

    Attributes:
        step: the step of the sample.
        slots: of the events when they were chosen, int32 `[n]`; -1 for an event that a restart did not find.
        records: of the events, RECORD `[n]`.
        rates: the importance is computed from these and `shares`, float64 `[n]`; None if events have no weights.
        shares: see `rates`; float64 `[n]`, or None.
        correction: a factor of their importance, float64 `[n]`; None: 1.
        rows: their payload.
    """

    step: int
    slots: NDArray[np.int32]
    records: NDArray[np.void]
    rates: NDArray[np.float64] | None
    shares: NDArray[np.float64] | None
    correction: NDArray[np.float64] | None
    rows: StagedRows

    def __len__(self) -> int:
        return len(self.slots)


class Sample(msgspec.Struct, frozen=True, eq=False):
    """n events as arrays on the learner's device.

    Attributes:
        columns: of the payload, each `[n, ...]`.
        importance: the weight of each event, which corrects for admission and sampling, float32 `[n]`.
        slots: int32 `[n]` on the host; `Store.update_priorities` needs these and `records`.
        records: RECORD `[n]` on the host.
    """

    columns: Mapping[str, Tensor]
    importance: Tensor
    slots: NDArray[np.int32]
    records: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.slots)

    def first(self, n: int) -> "Sample":
        """Return the first n events, or all when there are fewer; arrays share memory with this one's."""
        if n >= len(self):
            return self
        columns = {name: column[:n] for name, column in self.columns.items()}
        return Sample(columns, self.importance[:n], self.slots[:n], self.records[:n])

    def of(self, which: NDArray[np.bool_]) -> "Sample":
        """Return a copy with only the events that `which` marks, bool `[n]`."""
        marks = torch.from_numpy(which).to(self.importance.device)
        columns = {name: column[marks] for name, column in self.columns.items()}
        return Sample(columns, self.importance[marks], self.slots[which], self.records[which])

    def copy(self) -> "Sample":
        """Return a sample with copied columns."""
        columns = {name: column.clone() for name, column in self.columns.items()}
        return Sample(columns, self.importance, self.slots, self.records)


def fetch_sample(plan: SamplePlan, layout: RowLayout, tiers: TierHierarchy, n: int | None) -> Sample:
    """Wait for the first n events of a plan, or for all; fewer when the rows of some cannot be read."""
    staged = plan.rows
    rows = staged.rows(n) if staged.missing is None else tiers.wait(staged, n)
    which = staged.which(n)
    columns = layout.unpack(rows)
    label = columns["label"]
    weights = _ones(label.shape[0], label.device)
    if plan.rates is not None or plan.correction is not None:
        numbers = [values for values in (plan.rates, plan.shares, plan.correction) if values is not None]
        on_device = tiers.upload([values[which] for values in numbers])
        if plan.rates is not None:
            weights = importance(columns["weight"], *on_device[:2])
        if plan.correction is not None:
            weights = weights * on_device[-1].float()
    return Sample(columns, weights, plan.slots[which], plan.records[which])


@functools.lru_cache(maxsize=8)
def _ones(n: int, device: torch.device) -> Tensor:
    """Return the importance of n events without weights; it must not be changed."""
    return torch.ones(n, device=device)


def saved_plan(plan: SamplePlan) -> SavedPlan:
    """Return a plan for a checkpoint, once its rows have arrived; rows that could not be read are left out.

    The rows are copied: an erasure overwrites the rows of the plan, but not a file whose digest is being computed. The
    erasure reads the checkpoint after it is written.
    """
    plan.rows.wait()
    events = np.zeros(len(plan), PLANNED)
    for name in FIELDS:
        events[name] = plan.records[name]
    events["slot"] = plan.slots
    for name, values in (("rate", plan.rates), ("share", plan.shares), ("correction", plan.correction)):
        events[name] = 1.0 if values is None else values
    return SavedPlan(plan.step, plan.rows.host_copy(), events[plan.rows.which()])


def restore_plan(plan: SavedPlan, rows: StagedRows, slots: NDArray[np.int32], *, weighted: bool) -> SamplePlan:
    """Return a plan of a checkpoint, whose events are in n slots now; -1 for events that are not held any more."""
    events = plan.events
    records = np.empty(len(events), RECORD)
    for name in FIELDS:
        records[name] = events[name]
    rate, share, correction = (events[name].copy() for name in ("rate", "share", "correction"))
    return SamplePlan(
        *(plan.step, slots, records, rate if weighted else None, share if weighted else None, correction, rows)
    )
