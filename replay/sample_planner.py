"""Chooses which held events each step samples, some steps ahead, and keeps these plans until the steps use them.

Legend: n events of a plan.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from replay.erasure.erased_events import ErasedEvents
from replay.payload.hierarchy import TierHierarchy
from replay.policies import Policies
from replay.reservoir.event_table import columns_of
from replay.reservoir.reservoir import Reservoir
from replay.row_layout import RowLayout
from replay.sample_plan import Sample, SamplePlan, fetch_sample, restore_plan
from replay.sampling.step_rng import StepRng
from replay.snapshot import SavedPlan

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
        policies: Policies,
        reservoir: Reservoir,
        layout: RowLayout,
        tiers: TierHierarchy,
        seed: int,
        *,
        weighted: bool,
    ) -> None:
        """Create a planner without plans; `weighted`: events have weights, so that plans compute their importance."""
        self._sampler = policies.sampler
        self._tracker = policies.tracker
        self._reservoir = reservoir
        self._layout = layout
        self._tiers = tiers
        self._rng = StepRng(seed)
        self._weighted = weighted
        self._plans: deque[SamplePlan] = deque()
        self._captured_through = -1
        """The last step whose plan is part of the checkpoint that is being written."""

    @property
    def plans(self) -> Sequence[SamplePlan]:
        """The unused plans."""
        return self._plans

    @property
    def planned_through(self) -> int:
        """The last step that is planned; -1 without plans."""
        return self._plans[-1].step if self._plans else -1

    def planned(self, step: int) -> int:
        """Return how many events can be sampled for a step."""
        return next((len(plan.slots) for plan in self._plans if plan.step == step), 0)

    def blocks(self, step: int, through: int, n: int | Callable[[int], int]) -> list[Request]:
        """Return the requests that are missing for AHEAD steps from `step` on, when steps up to `through` are planned.

        Args:
            step: the next step.
            through: the last step that is planned.
            n: events for each step, or a function of the step.
        """
        requests, first = list[Request](), max(step, through + 1)
        block = BLOCK if self._sampler.divisible else 1
        while first < step + AHEAD:
            steps = range(first, (first // block + 1) * block)
            requests.append([(planned, n if isinstance(n, int) else n(planned)) for planned in steps])
            first = steps.stop
        return requests

    def plan(self, request: Request) -> list[SamplePlan]:
        """Choose events for each step of a request, or all held events when fewer are held, and prefetch their rows."""
        total = sum(n for _, n in request)
        if total > len(self._reservoir) and len(request) > 1:
            return [plan for single in request for plan in self.plan([single])]
        if self._tracker is not None:
            self._tracker.select_answer(request[0][0])
        choice = self._sampler.sample(total, self._rng.for_step(request[0][0]))
        events, slots = self._reservoir.event_table, choice.slots.astype(np.int64)
        records, rates, shares = events.records(choice.slots), None, None
        if self._weighted:
            clusters = np.zeros(len(slots), np.int16) if self._tracker is None else self._tracker.clusters(choice.slots)
            rates, shares = self._reservoir.rates(records, clusters)
        plans, end = [], 0
        for step, n in request:
            part = slice(end, end := end + n)
            rows = self._tiers.prefetch(slots[part], events.identity)
            rate, share, correction = (_part(values, part) for values in (rates, shares, choice.correction))
            plans.append(SamplePlan(step, choice.slots[part], records[part], rate, share, correction, rows))
        return plans

    def append(self, request: Request) -> None:
        """Plan the steps of a request, which follow those that are planned."""
        self._plans += self.plan(request)

    def sample(self, step: int, n: int) -> Sample | None:
        """Return the first n events of the plan for a step, and drop it and earlier plans; None without a plan.

        The caller owns the columns and may write into them. After an error, such as of a device without free memory,
        the plan is still there.
        """
        self.drop_before(step)
        plan = self._plans[0] if self._plans else None
        if plan is None or plan.step != step:
            return None
        sample = self.fetch(plan, n)
        if step <= self._captured_through:
            sample = sample.copy()
        self._plans.popleft()
        if self._plans and self._tiers.gathers_ahead:
            self._plans[0].rows.prefetch()
        return sample

    def fetch(self, plan: SamplePlan, n: int | None = None) -> Sample:
        """Return the first n events of a plan, or all; fewer when the rows of some cannot be read."""
        return fetch_sample(plan, self._layout, self._tiers, n)

    def drop_before(self, step: int) -> None:
        """Drop the plans for steps before this one: such a step may have sampled nothing."""
        while self._plans and self._plans[0].step < step:
            self._plans.popleft()

    def materialize(self) -> None:
        """Gather the rows of all plans, so that their slots may be written again."""
        for plan in self._plans:
            plan.rows.materialize()

    def replace_erased(self, erased: ErasedEvents) -> None:
        """Overwrite the rows of each plan that names an erased event, and plan its step again."""
        for index, plan in enumerate(self._plans):
            if erased.covers(self._reservoir.event_table.bases, columns_of(plan.records)).any():
                plan.rows.clear()
                (self._plans[index],) = self.plan([(plan.step, len(plan))])

    def begin_snapshot(self) -> Sequence[SamplePlan]:
        """Return the plans for a checkpoint; until `end_snapshot` their rows are copied for the steps that use them."""
        self._captured_through = self.planned_through
        return tuple(self._plans)

    def end_snapshot(self) -> None:
        """Allow steps to use the rows of their plans without a copy again."""
        self._captured_through = -1

    def restore(self, plans: Sequence[SavedPlan], *, moved: bool) -> None:
        """Replace the plans by those of a checkpoint; `moved`: its events are in other slots now."""
        self._plans.clear()
        for plan in plans:
            # A checkpoint that has the payload may name slots of several processes.
            slots = self._reservoir.event_table.find(plan.events) if moved else plan.events["slot"].copy()
            self._plans.append(restore_plan(plan, self._tiers.staged(plan.rows), slots, weighted=self._weighted))


def _part(values: NDArray[np.float64] | None, part: slice) -> NDArray[np.float64] | None:
    return None if values is None else values[part]
