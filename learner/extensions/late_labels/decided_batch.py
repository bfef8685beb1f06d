"""The batch of a round on events that have waited for their label. Legend: N events whose fate is decided."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import IDENTITY_COLUMNS, Array, Outcome, SkipReason
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.learner.extensions.late_labels.decisions import Ready, Resolution
from anabranch.learner.model.examples import EARLY, Early
from anabranch.learner.stream.batch import Batch, Decided, Span, step_ends
from anabranch.replay.reservoir.reservoir import WAITED

_PENDING, _STORED_ONLY, _HELD_OUT, _TRAINED, _SKIPPED, _TIMED_OUT = (
    np.uint8(outcome)
    for outcome in (
        Outcome.PENDING,
        Outcome.STORED_ONLY,
        Outcome.HELD_OUT,
        Outcome.TRAINED,
        Outcome.SKIPPED,
        Outcome.TIMED_OUT,
    )
)


def decided_batch(
    ready: Ready,
    settings: LabelStreamSettings,
    held_out: NDArray[np.bool_],
    step_size: int,
    *,
    stores_only: bool = False,
) -> Batch:
    """Return the batch of N events: those to train on, to store only, and to hold out.

    Args:
        ready: the events.
        settings: `[stream.labels]`.
        held_out: bool `[N]`, which go to the holdout set if they have a label.
        step_size: of how many events, in their order, a step has those to train on.
        stores_only: whether events to train on are stored without training, save those of which a negative was
            trained on: that is corrected.
    """
    columns, timed_out, taken_back = dict(ready.columns), ready.resolution == Resolution.TIMED_OUT, ready.taken_back
    labelled = ~timed_out
    if settings.unmatched == "negative" and timed_out.any():
        columns["label"] = np.where(timed_out, np.zeros(1, columns["label"].dtype), columns["label"])
        columns["labelled"] = labelled = np.ones_like(timed_out)
    # How an event ends that is trained on, and how the others end: PENDING are those that are.
    final, outcome = np.where(timed_out, _TIMED_OUT, _TRAINED), np.zeros(len(ready), np.uint8)
    reason, early = np.zeros(len(ready), np.uint8), np.zeros(len(ready), np.uint8)
    ended, relabelled = ~taken_back, np.zeros(len(ready), np.bool_)
    # What was trained on is not held out, should the choice have changed since.
    held_out = held_out & labelled & ~ready.early & ~ready.damaged
    only_stored = settings.unmatched == "store"
    outcome[~labelled] = _STORED_ONLY if only_stored else _SKIPPED
    reason[~labelled] = np.uint8(SkipReason.NONE if only_stored else SkipReason.TIMED_OUT)
    if stores_only:
        outcome[labelled & ~ready.early] = _STORED_ONLY
    if ready.early.any() or (ready.resolution == Resolution.CORRECTED).any():
        positive = labelled & (columns["label"] == 1)
        early[ready.early & positive] = np.uint8(Early.CORRECTED)
        early[taken_back & positive] = np.uint8(Early.TAKEN_BACK)
        # Trained on as a negative when it came, and it is one: nothing is left but to store it with its label.
        negative = ready.early & ~positive
        outcome[negative] = final[negative]
        undone = np.where(ready.stored, _STORED_ONLY, _PENDING)
        outcome[taken_back] = np.where(positive & ~held_out, undone, _SKIPPED)[taken_back]
        relabelled = held_out & taken_back & positive
        held_out = held_out & ended
    outcome[held_out] = _HELD_OUT
    outcome[ready.damaged], reason[ready.damaged] = _SKIPPED, np.uint8(SkipReason.DAMAGED)
    early[ready.damaged] = np.uint8(Early.PLAIN)

    trained = outcome == _PENDING
    stored = (outcome == _STORED_ONLY) | (ended & ~trained & (outcome == final))
    identity = {name: columns[name].copy() for name in IDENTITY_COLUMNS}
    identity |= {"outcome": outcome, "reason": reason, "time_ms": np.add(columns["time_ms"], ready.waited_ms)}
    waited = {**columns, WAITED: np.ones(len(ready), np.bool_), **({EARLY: early} if early.any() else {})}
    return Batch(
        new=_of(waited, trained),
        stored_only=_of(waited, stored),
        held_out=_of(columns, held_out),
        spans=[],
        decided=Decided(
            span=Span(identity, trained, {}, {}, {}, {}),
            outcome=final,
            ended=ended,
            predictions=ready.predictions,
            label=columns["label"],
            scored=labelled & ended & ~held_out & ~ready.damaged,
            corrects=trained & (early != Early.PLAIN),
        ),
        relabelled=_of(columns, relabelled),
        ends=np.cumsum(trained)[np.array(step_ends(len(ready), step_size)) - 1].tolist(),
    )


def scored_rows(decided: Decided) -> NDArray[np.bool_]:
    """Return which of N events have a label with which their prediction is compared, bool `[N]`."""
    return np.asarray(decided.scored & (decided.span.columns["reason"] == SkipReason.NONE))


def _of(columns: Mapping[str, Array], rows: NDArray[np.bool_]) -> dict[str, Array]:
    """Return contiguous copies of the selected rows, bool `[N]`; no columns if there are none."""
    if rows.all():
        return {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return {name: column[rows] for name, column in columns.items()} if rows.any() else {}
