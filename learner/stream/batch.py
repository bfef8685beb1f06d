"""The batch: the new events of a round of steps, and the rows that are settled when it is done.

Legend: B new events of a batch, K rows of a span.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.ingest.events.block import Array, Outcome, SkipReason
from anabranch.ingest.events.position import Fingerprint, Position

PENDING = np.uint8(Outcome.PENDING)
"""As a numpy scalar: a comparison with a member of an enumeration takes numpy ten times as long."""


def trainable(rows: Mapping[str, Array], *, unlabelled: bool) -> NDArray[np.bool_]:
    """Return which rows are to be trained on, bool `[K]`; `unlabelled`: also those without a label."""
    pending: NDArray[np.bool_] = rows["outcome"] == PENDING
    return pending if unlabelled else pending & rows["labelled"].astype(np.bool_, copy=False)


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one block, and how far they move each partition.

    Attributes:
        columns: the identity columns `[K]`, copied. The learner decides the outcome of rows that are PENDING.
        trained: bool `[K]`, the rows that are in the batch.
        positions: the first event without outcome after this span, by index of the partition.
        removed: number of offsets that retention removed before the span, by index of the partition.
        passed: number of offsets that `skip-to-latest` skipped before the span, by index of the partition.
        last: the last record of the span, by index of the partition; only for a span that ends its block.
    """

    columns: Mapping[str, Array]
    trained: NDArray[np.bool_]
    positions: Mapping[int, Position]
    removed: Mapping[int, int]
    passed: Mapping[int, int]
    last: Mapping[int, Fingerprint]


@dataclass(frozen=True)
class Decided:
    """K events that have waited for their label, and whose fate is decided.

    Attributes:
        span: their identity, of which `outcome` and `reason` are final where they are not trained on; `time_ms` is when
            it was decided. It moves no partition.
        outcome: uint8 `[K]`, of those that are trained on: TRAINED with their label, TIMED_OUT as negatives.
        ended: bool `[K]`, which end now; the others have ended before, and their label came after that.
        predictions: what was predicted when each event came, float32 `[K, ...]`, as `EventTimePredictor.record`
            returns it; NaN where there was nothing.
        label: the labels `[K, ...]` that the predictions are compared with.
        scored: bool `[K]`, which have such a label and are not held out.
        corrects: bool `[K]`, which undo a negative that was trained on before.
    """

    span: Span
    outcome: NDArray[np.uint8]
    ended: NDArray[np.bool_]
    predictions: NDArray[np.float32]
    label: Array
    scored: NDArray[np.bool_]
    corrects: NDArray[np.bool_]

    @property
    def ends(self) -> NDArray[np.uint8]:
        """How each event ends once those of the batch are trained on, uint8 `[K]`."""
        return np.where(self.span.trained, self.outcome, self.span.columns["outcome"])


@dataclass
class Batch:
    """The events of a round: of one step, or of several where they wait.

    Attributes:
        new: columns of the B events to train on, each `[B, ...]`; of each step in turn.
        stored_only: columns of events that are stored without training on them.
        held_out: columns of events for the holdout set.
        contexts: sampled trace contexts of events of the stream, as `traceparent`.
        relabelled: columns of events that may be in the holdout set as negatives, and whose label came after that.
        spans: all rows that are settled after the round, in order.
        waiting: columns of events that begin to wait for their label.
        labels: columns of labels that have come.
        decided: the events of the batch have waited before, and this is how each ended; `spans` is empty then.
        ends: where each step ends among the B events; empty: they are of one step.
    """

    new: dict[str, Array]
    stored_only: dict[str, Array]
    held_out: dict[str, Array]
    spans: list[Span]
    waiting: dict[str, Array] = field(default_factory=dict)
    labels: dict[str, Array] = field(default_factory=dict)
    decided: Decided | None = None
    relabelled: dict[str, Array] = field(default_factory=dict)
    contexts: Sequence[str] = ()
    ends: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.new["offset"]) if self.new else 0

    @property
    def settled(self) -> Sequence[Span]:
        """All rows that get their outcome after the round: those of the stream, or those that have waited."""
        return self.spans if self.decided is None else (self.decided.span,)

    def skip(self, rows: NDArray[np.bool_], reason: SkipReason | NDArray[np.uint8]) -> None:
        """Remove new events, bool `[B]`, from the batch, and settle them as skipped; `reason`: of all, or of each."""
        begin, reason_B = 0, np.broadcast_to(np.asarray(reason, np.uint8), rows.shape)
        for span in self.settled:
            indices = np.flatnonzero(span.trained)
            own = slice(begin, begin + len(indices))
            begin, skipped = own.stop, indices[rows[own]]
            span.columns["outcome"][skipped] = np.uint8(Outcome.SKIPPED)
            span.columns["reason"][skipped] = reason_B[own][rows[own]]
            span.trained[skipped] = False
        self.leave_out(rows)

    def leave_out(self, rows: NDArray[np.bool_]) -> None:
        """Remove new events, bool `[B]`, from the batch: they are settled already. Each other one stays in its step."""
        if self.ends:
            kept = np.concatenate([[0], np.cumsum(~rows)])
            self.ends = kept[list(self.ends)].tolist()
        self.new = _without(self.new, rows)

    def steps(self) -> "Sequence[Batch]":
        """Return the batch of each step of the round that has new events; of one step: this one.

        Events that leave the batch of a step leave this one with `skip_of_steps`. Events that are only stored are in
        the batch of the last step.
        """
        parts = [(begin, end) for begin, end in zip([0, *self.ends], self.ends, strict=False) if begin < end]
        if len(parts) <= 1:
            return (self,)
        reason_B = np.zeros(len(self), np.uint8)
        steps = []
        for begin, end in parts:
            new = {name: column[begin:end] for name, column in self.new.items()}
            steps.append(StepBatch(new, {}, {}, [], rows=np.arange(begin, end), reason=reason_B))
        steps[-1].stored_only = self.stored_only
        return steps

    def skip_of_steps(self, steps: "Sequence[Batch]") -> None:
        """Skip the events that have left the batches of the steps."""
        first = steps[0]
        if isinstance(first, StepBatch) and first.reason.any():
            self.skip(first.reason > 0, first.reason)


@dataclass
class StepBatch(Batch):
    """The new events of one step of a round, which the batch of the round settles.

    Attributes:
        rows: their indices in the batch of the round, ascending.
        reason: why events of the round are skipped, uint8 of all of them: 0 for those that are not.
    """

    rows: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    reason: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    @override
    def skip(self, rows: NDArray[np.bool_], reason: SkipReason | NDArray[np.uint8]) -> None:
        self.reason[self.rows[rows]] = reason if isinstance(reason, SkipReason) else reason[rows]
        self.rows = self.rows[~rows]
        self.new = _without(self.new, rows)


def without_raised(columns: dict[str, Array], steps: Sequence[Batch]) -> dict[str, Array]:
    """Return the new events of a round without those on which the model has raised in one of its steps."""
    first = steps[0]
    if not isinstance(first, StepBatch) or not (raised := first.reason == np.uint8(SkipReason.MODEL)).any():
        return columns
    return _without(columns, raised)


def step_ends(count: int, size: int) -> Sequence[int]:
    """Return where each step ends among `count` events, of which a full step has `size`."""
    return [*range(size, count, size), count]


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch of the steps of several batches of the stream, of which no event has waited for its label."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        _concatenated([each.new for each in batches]),
        _concatenated([each.stored_only for each in batches]),
        _concatenated([each.held_out for each in batches]),
        [span for each in batches for span in each.spans],
        contexts=[context for each in batches for context in each.contexts],
        ends=np.cumsum([len(each) for each in batches]).tolist(),
    )


def _concatenated(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    some = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in some]) for name in (some[0] if some else ())}


def _without(columns: dict[str, Array], rows: NDArray[np.bool_]) -> dict[str, Array]:
    return {} if rows.all() else {name: column[~rows] for name, column in columns.items()}
