"""The batch of a step on events that have waited for their label. Legend: N events whose fate is decided."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import IDENTITY_COLUMNS, Array, Outcome, SkipReason
from ingest.label_stream_settings import LabelStreamSettings
from learner.labels.ready import Ready, Resolution
from learner.strategies.early_negatives import EARLY, Early
from learner.stream.batch import Batch, Decided, Span
from replay.reservoir.pending_events import WAITED

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


@dataclass(frozen=True)
class Fate:
    """How N events end.

    Attributes:
        columns: of the events, with the label that they end with.
        outcome: uint8 `[N]`, PENDING for those to train on.
        reason: uint8 `[N]`.
        final: uint8 `[N]`, the outcome of those to train on.
        early: uint8 `[N]`, of `Early`.
        ended: bool `[N]`, which end now: the others have ended when they timed out.
        scored: bool `[N]`, which have a label with which their prediction is compared.
        relabelled: bool `[N]`, which were held out as negatives, and are positives.
    """

    columns: dict[str, Array]
    outcome: NDArray[np.uint8]
    reason: NDArray[np.uint8]
    final: NDArray[np.uint8]
    early: NDArray[np.uint8]
    ended: NDArray[np.bool_]
    scored: NDArray[np.bool_]
    relabelled: NDArray[np.bool_]


def fate_of(
    ready: Ready, settings: LabelStreamSettings, held_out: NDArray[np.bool_], *, stores_only: bool = False
) -> Fate:
    """Return how events end.

    Args:
        ready: the events.
        settings: `[stream.labels]`.
        held_out: bool `[N]`, which go to the holdout set if they have a label.
        stores_only: whether events to train on are stored without training, save those of which a negative was
            trained on: that is corrected.
    """
    columns, timed_out = dict(ready.columns), ready.resolution == Resolution.TIMED_OUT
    labelled = ~timed_out
    if settings.unmatched == "negative" and timed_out.any():
        columns["label"] = np.where(timed_out, np.zeros(1, columns["label"].dtype), columns["label"])
        columns["labelled"] = labelled = np.ones_like(timed_out)
    final = np.where(timed_out, _TIMED_OUT, _TRAINED)
    outcome, reason, early = (np.zeros(len(ready), np.uint8) for _ in range(3))
    # What was trained on is not held out, should the choice have changed since.
    held_out = held_out & labelled & ~ready.early
    stored = settings.unmatched == "store"
    outcome[~labelled] = _STORED_ONLY if stored else _SKIPPED
    reason[~labelled] = np.uint8(SkipReason.NONE if stored else SkipReason.TIMED_OUT)
    if stores_only:
        outcome[labelled & ~ready.early] = _STORED_ONLY
    ended, relabelled = np.ones(len(ready), np.bool_), np.zeros(len(ready), np.bool_)
    if ready.early.any() or (ready.resolution == Resolution.CORRECTED).any():
        positive = labelled & (columns["label"] == 1)
        taken_back = ready.taken_back
        early[ready.early & positive] = np.uint8(Early.CORRECTED)
        early[taken_back & positive] = np.uint8(Early.TAKEN_BACK)
        ended = ~taken_back
        # Trained on as a negative when it came, and it is one: nothing is left but to store it with its label.
        negative = ready.early & ~positive
        outcome[negative] = final[negative]
        undone = np.where(ready.stored, _STORED_ONLY, _PENDING)
        outcome[taken_back] = np.where(positive & ~held_out, undone, _SKIPPED)[taken_back]
        relabelled = held_out & taken_back & positive
        held_out = held_out & ended
    outcome[held_out] = _HELD_OUT
    return Fate(columns, outcome, reason, final, early, ended, labelled & ended & ~held_out, relabelled)


def decided_batch(ready: Ready, fate: Fate) -> Batch:
    """Return the batch of events: those to train on, to store only, and to hold out."""
    trained = fate.outcome == _PENDING
    stored = (fate.outcome == _STORED_ONLY) | (fate.ended & ~trained & (fate.outcome == fate.final))
    identity = {name: fate.columns[name].copy() for name in IDENTITY_COLUMNS}
    identity |= {"outcome": fate.outcome, "reason": fate.reason}
    identity["time_ms"] = np.add(identity["time_ms"], ready.waited_ms)
    columns = {**fate.columns, WAITED: np.ones(len(ready), np.bool_)}
    if fate.early.any():
        columns[EARLY] = fate.early
    new = _of(columns, trained)
    decided = Decided(
        span=Span(identity, trained, {}, {}, {}, {}),
        outcome=fate.final,
        ended=fate.ended,
        predictions=ready.predictions,
        label=fate.columns["label"],
        scored=fate.scored,
        corrects=trained & (fate.early != Early.PLAIN),
    )
    return Batch(
        new=new,
        stored_only=_of(columns, stored),
        held_out=_of(fate.columns, fate.outcome == _HELD_OUT),
        spans=[],
        decided=_with_damaged(decided, ready.damaged),
        relabelled=_of(fate.columns, fate.relabelled),
    )


def _of(columns: Mapping[str, Array], rows: NDArray[np.bool_]) -> dict[str, Array]:
    """Return contiguous copies of the selected rows, bool `[N]`; no columns if there are none."""
    if rows.all():
        return {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return {name: column[rows] for name, column in columns.items()} if rows.any() else {}


def _with_damaged(decided: Decided, damaged: Mapping[str, Array]) -> Decided:
    """Add events whose payload is damaged: they end as skipped, unless they have ended before."""
    count = len(damaged["offset"]) if damaged else 0
    if not count:
        return decided
    skipped, why = (np.full(count, value, np.uint8) for value in (_SKIPPED, SkipReason.DAMAGED))
    fixed: dict[str, Array] = {**damaged, "outcome": skipped, "reason": why}
    columns = {
        name: np.concatenate([column, fixed.get(name, np.zeros(count, column.dtype))])
        for name, column in decided.span.columns.items()
    }

    def longer(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([values, np.zeros((count, *values.shape[1:]), values.dtype)])

    return Decided(
        span=Span(columns, longer(decided.span.trained), {}, {}, {}, {}),
        outcome=longer(decided.outcome),
        ended=np.concatenate([decided.ended, ~damaged["taken_back"].astype(np.bool_)]),
        predictions=longer(decided.predictions),
        label=longer(decided.label),
        scored=longer(decided.scored),
        corrects=longer(decided.corrects),
    )
