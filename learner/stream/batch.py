"""The batch: the new events of one step, and the rows that are settled when it is done.

Legend: B new events of a batch, K rows of a span.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array, Outcome, SkipReason
from ingest.events.position import Fingerprint, Position


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
        predictions: the model's output when each event came, float32 `[K, *output]`, NaN where there was none.
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

    def ends(self, outcome: Outcome) -> NDArray[np.uint8]:
        """Return how each event ends, uint8 `[K]`, where those of the batch are TRAINED or SKIPPED."""
        final = self.outcome if outcome is Outcome.TRAINED else np.uint8(outcome)
        return np.where(self.span.trained, final, self.span.columns["outcome"])


@dataclass
class Batch:
    """The events of one step.

    Attributes:
        new: columns of the B events to train on, each `[B, ...]`.
        stored_only: columns of events that are stored without training on them.
        held_out: columns of events for the holdout set.
        contexts: sampled trace contexts of events of the stream, as `traceparent`.
        relabelled: columns of events that may be in the holdout set as negatives, and whose label came after that.
        spans: all rows that are settled after the step, in order.
        waiting: columns of events that begin to wait for their label.
        labels: columns of labels that have come.
        decided: the events of the batch have waited before, and this is how each ended; `spans` is empty then.
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

    def __len__(self) -> int:
        return len(self.new["offset"]) if self.new else 0

    @property
    def settled(self) -> Sequence[Span]:
        """All rows that get their outcome after the step: those of the stream, or those that have waited."""
        return self.spans if self.decided is None else (self.decided.span,)

    def skip(self, rows: NDArray[np.bool_], reason: SkipReason) -> None:
        """Remove new events, bool `[B]`, from the batch, and settle them as skipped."""
        begin = 0
        for span in self.settled:
            indices = np.flatnonzero(span.trained)
            skipped = indices[rows[begin : begin + len(indices)]]
            begin += len(indices)
            span.columns["outcome"][skipped] = np.uint8(Outcome.SKIPPED)
            span.columns["reason"][skipped] = np.uint8(reason)
            span.trained[skipped] = False
        self.new = {} if rows.all() else {name: column[~rows] for name, column in self.new.items()}
