"""Joins answers with the labels of their events, by the events' identities, in bounded memory.

    event begins to wait --+
    answer is read --------+--> label comes --> outcome of the version that answered

An answer counts if it was written before its label: a version that answers later may have learned from that. Answers,
events and labels may be read in any order. Where there is no space for all, the identity decides which events are left
out, whatever they are: measures of the others have no bias.

Legend: n rows of a call, K numbers of an output.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.identity import identity_hash
from anabranch.ingest.events.schema import Label
from anabranch.learner.checkpoints.part_formats import Covers

_ROWS, _BYTES = 100_000, 64_000_000
_OF_VERSION, _OUTCOMES = 5000, 40_000
_VERSIONS = 64
"""The newest versions of which outcomes are kept: of one version a second few events have labels."""
NONE = -1
"""The version of an event without an answer, and when an event without a label was decided."""
PARTS = 1 << 32
_KEYS = ("key_hash", "group_hash")
_ERASABLE = ("partition", "offset", "key_hash")

Rows = NDArray[np.void]


class AnswerJoin:
    """Events that wait for a label, answers and labels without the other; and outcomes. Used by one thread."""

    def __init__(self, label: Label, outputs: int) -> None:
        """`outputs`: numbers of an output, K."""
        self._dtype = np.dtype(
            [
                ("key", np.uint64),
                ("partition", np.int32),
                ("offset", np.int64),
                ("key_hash", np.uint64),
                ("group_hash", np.uint64),
                ("version", np.int64),
                ("answered_ms", np.int64),
                ("labelled_ms", np.int64),
                ("settled", np.float64),
                ("label", label.dtype, label.shape),
                ("output", np.float32, (outputs,)),
                ("own", np.float32, (outputs,)),
            ]
        )
        self._most = max(100, min(_ROWS, _BYTES // self._dtype.itemsize))
        self.rows: Rows = np.empty(0, self._dtype)
        """In the order of `key`, the hash of the event's identity."""
        self.outcomes: Rows = np.empty(0, self._dtype)
        """Those of which answer and label are known, the newest last. It is replaced, not changed."""
        self.counts = Counter(dict.fromkeys(("matched", "late", "unmatched", "duplicate", "unanswered"), 0))
        """Answers by what became of them, and events without one; over the life of the pipeline."""
        self.part = PARTS
        """Events of which half of the hash is below it are joined: of `PARTS` all."""
        self.least_part = PARTS
        """The smallest that it ever was: of less than `PARTS`, groups lack events."""
        self._added = 0
        """Rows since the part changed."""

    def add_events(self, columns: Mapping[str, Array], base: NDArray[np.uint64]) -> None:
        """Add n events that begin to wait for a label; `base`: of the partition of each."""
        self._merge(self._new(columns, base, _KEYS), _KEYS)

    def add_answers(self, columns: Mapping[str, Array], base: NDArray[np.uint64]) -> None:
        """Add n answers, with `version`, `answered_ms` and `output`; the first one to an event stays."""
        new = self._new(columns, base, ("version", "answered_ms", "output"))
        distinct = np.unique(new["key"], return_index=True)[1]
        at, is_there = self._find(new["key"][distinct])
        repeated = is_there.copy()
        repeated[is_there] = self.rows["version"][at[is_there]] != NONE
        self.counts["duplicate"] += len(new) - len(distinct) + int(np.count_nonzero(repeated))
        self._merge(new[distinct[~repeated]], ("version", "answered_ms", "output"))

    def decide(
        self, columns: Mapping[str, Array], base: NDArray[np.uint64], labelled: NDArray[np.bool_], now: float
    ) -> None:
        """Add `label` and `own` prediction of n events, of those `labelled` at `time_ms`; the others leave."""
        keys = identity_hash(base, columns["offset"].astype(np.int64), columns["row"].astype(np.int32))
        at, is_there = self._find(keys)
        at, labelled = at[is_there], labelled[is_there]
        for name in ("label", "own", *_KEYS):
            self.rows[name][at] = columns[name][is_there]
        self.rows["labelled_ms"][at] = columns["time_ms"][is_there]
        self.rows["settled"][at] = now
        self._remove(at[~labelled], "unmatched")

    def settle(self, first_open: NDArray[np.int64], read_until: float) -> None:
        """Make outcomes of answers that have a label, and let rows leave that will have none.

        Args:
            first_open: by index of the partition, the offset before which no event waits for a label.
            read_until: answers that had been written by then have been read.
        """
        rows, decided = self.rows, self.rows["settled"] != 0
        answered = rows["version"] != NONE
        joined = decided & answered
        in_time = joined & (rows["answered_ms"] < rows["labelled_ms"])
        self.counts["late"] += int(np.count_nonzero(joined & ~in_time))
        self.counts["matched"] += int(np.count_nonzero(in_time))
        unanswered = decided & ~answered & (rows["settled"] < read_until)
        self.counts["unanswered"] += int(np.count_nonzero(unanswered))
        ended = ~decided & (rows["offset"] < first_open[rows["partition"]])
        self.counts["unmatched"] += int(np.count_nonzero(ended & answered))
        if in_time.any():
            new = rows[in_time]
            self._keep([self.outcomes, new[np.argsort(new["labelled_ms"], kind="stable")]])
        if (gone := joined | unanswered | ended).any():
            self.rows = rows[~gone]
        part = self.part
        while len(self.rows) > self._most:
            self.part //= 2  # until too few are left, or none: identities differ
            self.rows = self.rows[self._is_of_part(self.rows)]
        # So many came and left again that twice the part has space.
        if part < PARTS and self._added > self._most // 2 and len(self.rows) <= self._most // 4:
            self.part *= 2
        if self.part != part:
            self.least_part, self._added = min(self.least_part, self.part), 0

    def erase(self, covers: Covers) -> None:
        """Remove the events that an erasure covers, with their answers."""
        self.rows, self.outcomes = (
            rows[~covers({name: rows[name] for name in _ERASABLE})] for rows in (self.rows, self.outcomes)
        )

    def columns(self) -> dict[str, Array]:
        """Return all rows for a checkpoint, outcomes first."""
        rows = np.concatenate([self.outcomes, self.rows])
        outcome = np.arange(len(rows)) < len(self.outcomes)
        return {**{name: np.ascontiguousarray(rows[name]) for name in self._names}, "outcome": outcome}

    def restore(self, columns: Mapping[str, Array], now: float) -> None:
        """Restore the rows of a checkpoint."""
        rows = np.empty(len(columns["key"]), self._dtype)
        for name in self._names:
            rows[name] = columns[name]
        rows["settled"] = np.where(rows["settled"] != 0, now, 0.0)  # a clock of another process
        outcome = columns["outcome"].astype(np.bool_)
        self.outcomes, self.rows = rows[outcome], rows[~outcome]

    @property
    def _names(self) -> tuple[str, ...]:
        assert self._dtype.names is not None
        return self._dtype.names

    def _new(self, columns: Mapping[str, Array], base: NDArray[np.uint64], fields: tuple[str, ...]) -> Rows:
        """Return n new rows with these fields, without those that are not of the part that is joined."""
        new = np.zeros(len(base), self._dtype)
        new["version"] = NONE
        new["key"] = identity_hash(base, columns["offset"].astype(np.int64), columns["row"].astype(np.int32))
        for name in ("partition", "offset", *fields):
            new[name] = columns[name]
        return new if self.part == PARTS else new[self._is_of_part(new)]

    def _is_of_part(self, rows: Rows) -> NDArray[np.bool_]:
        return np.asarray(rows["key"] >> np.uint64(32) < self.part)

    def _find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the position of each of n keys, and whether it is there."""
        at = np.searchsorted(self.rows["key"], keys)
        if not len(self.rows):
            return at, np.zeros(len(keys), np.bool_)
        return at, np.asarray(self.rows["key"].take(at, mode="clip") == keys)

    def _merge(self, new: Rows, fields: tuple[str, ...]) -> None:
        """Set the fields of rows that are there, and add the others."""
        at, is_there = self._find(new["key"])
        for name in fields:
            self.rows[name][at[is_there]] = new[name][is_there]
        if not is_there.all():
            self._added += len(new) - int(np.count_nonzero(is_there))
            rows = np.concatenate([self.rows, new[~is_there]])
            self.rows = rows[np.argsort(rows["key"], kind="stable")]

    def _remove(self, at: NDArray[np.intp], why: str) -> None:
        """Remove rows; `why`: what their answers count as."""
        self.counts[why] += int(np.count_nonzero(self.rows["version"][at] != NONE))
        self.rows = np.delete(self.rows, at)

    def _keep(self, parts: list[Rows]) -> None:
        """Keep the newest outcomes of each of the newest versions."""
        rows = np.concatenate(parts)
        most = max(100, min(_OUTCOMES, _BYTES // self._dtype.itemsize))
        stays = np.zeros(len(rows), np.bool_)
        for version in np.unique(rows["version"])[-_VERSIONS:].tolist():
            stays[np.flatnonzero(rows["version"] == version)[-_OF_VERSION:]] = True
        stays[: max(0, len(rows) - most)] = False
        self.outcomes = rows[stays]
