"""Chooses which held events each step samples, some steps ahead, and keeps these plans until the steps use them.

Plans and samples are msgspec structs: creating one takes a tenth of the time of a frozen dataclass, and each step
creates both.

Legend: n events chosen, R bytes of a row.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.replay.erasure.erased_events import ErasedEvents
from anabranch.replay.reservoir.admission import importance
from anabranch.replay.reservoir.embeddings import EventEmbeddings
from anabranch.replay.reservoir.event_table import FIELDS, RECORD, columns_of
from anabranch.replay.reservoir.reservoir import Reservoir
from anabranch.replay.row_layout import LONG, PackedRows, RowLayout
from anabranch.replay.sampling.base import Sampler
from anabranch.replay.snapshot import PLANNED, SavedPlan
from anabranch.replay.tiers.hierarchy import TierHierarchy
from anabranch.replay.tiers.staged_rows import LazyRows, StagedRows


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
        sizes: how many are of each step, where the sample is of some steps.
    """

    columns: Mapping[str, Tensor]
    importance: Tensor
    slots: NDArray[np.int32]
    records: NDArray[np.void]
    sizes: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.slots)

    def first(self, n: int) -> "Sample":
        """Return the first n events, or all when there are fewer; arrays share memory with this one's."""
        return self if n >= len(self) else self.part(slice(n))

    def part(self, rows: slice) -> "Sample":
        """Return consecutive events; arrays share memory with this one's."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Sample(columns, self.importance[rows], self.slots[rows], self.records[rows])

    def of(self, which: NDArray[np.bool_]) -> "Sample":
        """Return a copy with only the events that `which` marks, bool `[n]`."""
        marks = torch.from_numpy(which).to(self.importance.device)
        columns = {name: column[marks] for name, column in self.columns.items()}
        return Sample(columns, self.importance[marks], self.slots[which], self.records[which])

    def copy(self) -> "Sample":
        """Return a sample with copied columns."""
        columns = {name: column.clone() for name, column in self.columns.items()}
        return Sample(columns, self.importance, self.slots, self.records)


def fetch_sample(
    plans: Sequence[SamplePlan], layout: RowLayout, tiers: TierHierarchy, counts: Sequence[int | None]
) -> Sample:
    """Wait for the first events of each plan, as many as `counts` says, or all; fewer when some cannot be read."""
    staged = [plan.rows for plan in plans]
    if len(plans) == 1 or (rows := LazyRows.gather_all(staged, counts)) is None:
        taken = zip(staged, counts, strict=True)
        rows = _joined([each.rows(n) if each.missing is None else tiers.wait(each, n) for each, n in taken])
    which = [each.which(n) for each, n in zip(staged, counts, strict=True)]
    columns = layout.unpack(rows)
    label = columns["label"]
    weights = _ones(label.shape[0], label.device)
    weighted, corrected = plans[0].rates is not None, any(plan.correction is not None for plan in plans)
    if weighted or corrected:
        names = (("rates", "shares") if weighted else ()) + (("correction",) if corrected else ())
        on_device = tiers.memory.upload([_factor(name, plans, which) for name in names])
        if weighted:
            weights = importance(columns["weight"], *on_device[:2])
        if corrected:
            weights = weights * on_device[-1].float()
    slots = [plan.slots[each] for plan, each in zip(plans, which, strict=True)]
    records = [plan.records[each] for plan, each in zip(plans, which, strict=True)]
    if len(plans) == 1:
        return Sample(columns, weights, slots[0], records[0])
    # Numpy would copy each field of each record: bytes take a tenth of the time.
    joined = np.concatenate([each.view(np.int64) for each in records]).view(RECORD)
    return Sample(columns, weights, np.concatenate(slots), joined, [*map(len, slots)])


def _factor(name: str, plans: Sequence[SamplePlan], which: Sequence[slice | NDArray[np.intp]]) -> NDArray[np.float64]:
    """Return a factor of the importance of the events of plans; those of a checkpoint have a correction, maybe of 1."""
    values = [getattr(plan, name) for plan in plans]
    ones = [np.ones(len(plan)) if each is None else each for plan, each in zip(plans, values, strict=True)]
    return np.concatenate([each[rows] for each, rows in zip(ones, which, strict=True)])


def _joined(parts: Sequence[PackedRows]) -> PackedRows:
    """Join the rows of plans: those of a checkpoint may be a tensor where the others are an array."""
    return parts[0] if len(parts) == 1 else torch.cat([*map(torch.as_tensor, parts)])


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
        plan.step, slots, records, rate if weighted else None, share if weighted else None, correction, rows
    )


_WORD = 2**64 - 1


class StepRng:
    """A generator whose numbers are a pure function of (seed, step). Used by one thread.

    Philox is a counter under a key (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so each step
    has its own key. Other generators would have to be seeded again, which takes as long as choosing a sample.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed & _WORD, 0], np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._begin = self._bits.state

    def for_step(self, step: int) -> np.random.Generator:
        """Return the generator of a step; it is valid until the next call."""
        self._begin["state"]["key"][1] = step
        self._bits.state = self._begin
        return self._generator


AHEAD = 4
"""The fewest steps planned in advance: the time that slower tiers have to read the rows of a sample."""

BLOCK = 8
"""Steps that are planned together if the sampler can divide one choice among them."""

Request = Sequence[tuple[int, int]]
"""Steps that are planned together, as (step, number of events)."""


class SamplePlanner:
    """The plans for coming steps, in the order of the steps. Used by one thread."""

    def __init__(
        self,
        sampler: Sampler,
        embeddings: EventEmbeddings,
        reservoir: Reservoir,
        layout: RowLayout,
        tiers: TierHierarchy,
        seed: int,
        *,
        weighted: bool,
    ) -> None:
        """Create a planner without plans; `weighted`: events have weights, so that plans compute their importance."""
        self._sampler = sampler
        self._embeddings = embeddings
        self._reservoir = reservoir
        self._layout = layout
        self._tiers = tiers
        self._rng = StepRng(seed)
        self._weighted = weighted
        self.plans: deque[SamplePlan] = deque()
        """The unused plans."""
        self._captured_through = -1
        """The last step whose plan is part of the checkpoint that is being written."""

    @property
    def planned_through(self) -> int:
        """The last step that is planned; -1 without plans."""
        return self.plans[-1].step if self.plans else -1

    def planned(self, step: int) -> int:
        """Return how many events can be sampled for a step."""
        return next((len(plan.slots) for plan in self.plans if plan.step == step), 0)

    def blocks(self, step: int, through: int, n: int | Callable[[int], int], ahead: int = AHEAD) -> list[Request]:
        """Return the requests that are missing for some steps from `step` on, when steps up to `through` are planned.

        Args:
            step: the next step.
            through: the last step that is planned.
            n: events for each step, or a function of the step.
            ahead: how many steps.
        """
        requests, first = list[Request](), max(step, through + 1)
        block = BLOCK if self._sampler.divisible else 1
        while first < step + ahead:
            steps = range(first, (first // block + 1) * block)
            requests.append([(planned, n if isinstance(n, int) else n(planned)) for planned in steps])
            first = steps.stop
        return requests

    def plan(self, request: Request) -> list[SamplePlan]:
        """Choose events for each step of a request, or all held events when fewer are held, and prefetch their rows."""
        total = sum(n for _, n in request)
        if total > len(self._reservoir) and len(request) > 1:
            return [plan for single in request for plan in self.plan([single])]
        self._embeddings.select_answer(request[0][0])
        choice = self._sampler.sample(total, self._rng.for_step(request[0][0]))
        events, slots = self._reservoir.event_table, choice.slots.astype(np.int64)
        records, rates, shares = events.by_slot.take(choice.slots), None, None
        if self._weighted:
            rates, shares = self._reservoir.rates(records, self._embeddings.clusters(choice.slots))
        plans, end = [], 0
        staged = self._tiers.prefetch(slots, [n for _, n in request], events.identity)
        for (step, n), rows in zip(request, staged, strict=True):
            part = slice(end, end := end + n)
            rate, share, correction = (_part(values, part) for values in (rates, shares, choice.correction))
            plans.append(SamplePlan(step, choice.slots[part], records[part], rate, share, correction, rows))
        return plans

    def sample(self, step: int, *counts: int) -> Sample | None:
        """Return the first events of the plan for a step, or of those for consecutive ones, as many as each is to have.

        Drops these plans and earlier ones. The caller owns the columns and may write into them. After an error, such as
        of a device without free memory, the plans are still there.

        Returns:
            The events, those of one step after those of another. None without all plans; of several steps also where
            one of them has fewer events, or where rows on the host are so long that they would have left the
            processor's cache when the later steps read them: then each has to be sampled by itself.
        """
        self.drop_before(step)
        if len(counts) > 1 and self._layout.row_bytes >= LONG and not self._tiers.gathers_ahead:
            return None
        plans = [*islice(self.plans, len(counts))]
        if [plan.step for plan in plans] != [*range(step, step + len(counts))]:
            return None
        if len(counts) > 1 and any(len(plan) < n for plan, n in zip(plans, counts, strict=True)):
            return None
        sample = fetch_sample(plans, self._layout, self._tiers, counts)
        if step <= self._captured_through and len(plans) == 1:  # those of several are copies
            sample = sample.copy()
        for _ in plans:
            self.plans.popleft()
        if len(plans) == 1 and self.plans and self._tiers.gathers_ahead:
            self.plans[0].rows.prefetch()  # a round gathers all its rows at once
        return sample

    def fetch(self, plan: SamplePlan, n: int | None = None) -> Sample:
        """Return the first n events of a plan, or all; fewer when the rows of some cannot be read."""
        return fetch_sample([plan], self._layout, self._tiers, [n])

    def drop_before(self, step: int) -> None:
        """Drop the plans for steps before this one: such a step may have sampled nothing."""
        while self.plans and self.plans[0].step < step:
            self.plans.popleft()

    def materialize(self) -> None:
        """Gather the rows of all plans, so that their slots may be written again."""
        for plan in self.plans:
            plan.rows.materialize()

    def replace_erased(self, erased: ErasedEvents) -> None:
        """Overwrite the rows of each plan that names an erased event, and plan its step again."""
        for index, plan in enumerate(self.plans):
            if erased.covers(self._reservoir.event_table.bases, columns_of(plan.records)).any():
                plan.rows.clear()
                (self.plans[index],) = self.plan([(plan.step, len(plan))])

    def begin_snapshot(self) -> Sequence[SamplePlan]:
        """Return the plans for a checkpoint; until `end_snapshot` their rows are copied for the steps that use them."""
        self._captured_through = self.planned_through
        return tuple(self.plans)

    def end_snapshot(self) -> None:
        """Allow steps to use the rows of their plans without a copy again."""
        self._captured_through = -1

    def restore(self, plans: Sequence[SavedPlan], *, moved: bool) -> None:
        """Replace the plans by those of a checkpoint; `moved`: its events are in other slots now."""
        self.plans.clear()
        for plan in plans:
            # A checkpoint that has the payload may name slots of several processes.
            slots = self._reservoir.event_table.find(plan.events) if moved else plan.events["slot"].copy()
            self.plans.append(
                restore_plan(
                    plan, StagedRows(plan.rows, stream=self._tiers.memory.stream), slots, weighted=self._weighted
                )
            )


def _part(values: NDArray[np.float64] | None, part: slice) -> NDArray[np.float64] | None:
    return None if values is None else values[part]
