"""Applies the erasure log in a running learner: to batches, the store, the holdout set, checkpoints and tiers.

Tombstones are appended to the log before their batch is trained on. From then on no event that a record covers is
trained on or stored. New records of the log are applied to the store and the holdout set several times a second.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.block import Array, Outcome, SkipReason
from anabranch.ingest.events.identity import partition_base
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.checkpoints.background_erasure import BackgroundErasure, Positions
from anabranch.learner.checkpoints.part_formats import Covers
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.loop.tombstones import Tombstones
from anabranch.learner.stream.batch import Batch, Span
from anabranch.replay.erasure.erased_events import ByKey, ErasedEvents, Record
from anabranch.replay.erasure.erasure_log import ErasureLog

_EVERY_SECONDS = 0.2
_SHARE = 20
"""Polling takes at most 1 / `_SHARE` of the time, however many tombstones there are."""
_RETRY_SECONDS = 1.0
"""Between two attempts to append to the log."""

log = logging.getLogger(__name__)


class Erasure:
    """Keeps the events that the erasure log covers out of a learner. Used by the loop's thread, between steps."""

    def __init__(
        self,
        written: ErasureLog,
        files: BackgroundErasure,
        holdout: HoldoutSet,
        erase_others: Sequence[Callable[[Covers], int]] = (),
        erase_keys: Callable[[NDArray[np.uint64], int], object] | None = None,
        *,
        keyed: bool = True,
        at_once: bool = False,
    ) -> None:
        """Start with a log that was read.

        Args:
            written: the log.
            files: erases the events from files.
            holdout: the learner's holdout set, without these events.
            erase_others: `Extension.erase` of each extension.
            erase_keys: erases what was learned from the events of these keys alone, by their hashes, after the record
                of this number.
            keyed: whether events have keys; without keys the stream has no tombstones.
            at_once: whether events that a tombstone erases leave the store after its step, and not by a clock.
        """
        self.keyed = keyed
        self._at_once = at_once
        self._log = written
        self._background = files
        self._holdout = holdout
        self._erase_others, self._erase_keys = erase_others, erase_keys
        self.excluded_through = written.count
        """The number of the last record that is applied to the store and the holdout set."""
        self._names: Sequence[TopicPartition] = ()
        self._positions: Positions = dict
        self._bases: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._tombstones = Tombstones() if keyed else None
        self._unwritten: dict[str, Record] = {}
        """Records of tombstones that could not be appended to the log yet, by whom they are."""
        self._uncovered = ErasedEvents()
        """The events that the unwritten records erase."""
        self._write_at = 0.0
        self._poll_at = 0.0
        self.erased = 0
        """Events that were removed since the start, from the store, the holdout set and those that wait for labels."""
        self.due = 0.0
        """When `poll_if_due` has something to do, by the monotonic clock."""
        self._problem: str | None = None

    @property
    def problem(self) -> str | None:
        """One sentence when the log cannot be written, or erased events cannot be removed everywhere."""
        return self._problem or self._background.problem

    @property
    def through(self) -> int:
        """The number of the last record that is applied everywhere."""
        return self._background.through

    @property
    def records(self) -> int:
        """The number of records in the log."""
        return self._log.count

    @property
    def settled(self) -> bool:
        """Whether the log has all tombstones that were read; until then no checkpoint may be written."""
        return not self._unwritten

    def record_erased(self, store: int, holdout: int) -> None:
        """Count the erased events that were removed from the restored checkpoint; files may have more of them."""
        self._background.count(store, holdout)
        if store or holdout:
            self._background.start_over()
        if self.through < self.excluded_through:
            for part in self._background.parts:
                part.mark_unerased()

    def start_over(self) -> None:
        """Apply all records to the files of this host again: the log is from another one."""
        self._background.start_over()

    def register_partitions(self, partitions: Sequence[Partition], positions: Positions) -> None:
        """Set the partitions, by their index; `positions` returns the first event of each without an outcome."""
        self._positions = positions
        self._background.register_partitions(partitions, positions)
        if len(partitions) > len(self._names):
            self._names = [partition.name for partition in partitions]
            self._bases = np.array([partition_base(name) for name in self._names], np.uint64)
            if self._tombstones is not None:
                self._tombstones.register_partitions(self._names)

    def exclude(self, batch: Batch) -> Batch:
        """Write the erasures that the tombstones of a batch ask for, and return the batch without erased events.

        The batch must not be settled yet.
        """
        if self._tombstones is not None:
            self._write_tombstones(self._tombstones.records(batch.spans, self._positions))
        if not self._unwritten and not (self._log.count and self._log.erased):
            return batch
        for span in batch.settled:
            _skip(span, self._covers(span.columns))
        batch = replace(
            batch,
            stored_only=self._without_erased(batch.stored_only),
            held_out=self._without_erased(batch.held_out),
            waiting=self._without_erased(batch.waiting),
            labels=self._without_erased(batch.labels),
        )
        if batch.new and (covered := self._covers(batch.new)).any():
            batch.leave_out(covered)
        return batch

    def _write_tombstones(self, tombstones: Iterable[ByKey]) -> None:
        records = {
            record.by: record
            for record in tombstones
            if record.by not in self._unwritten and not self._log.contains(record)
        }
        if records:
            self._uncovered.add(list(records.values()))
            self._unwritten |= records
            self._append()
            if self._at_once:
                self._poll_at = self.due = 0.0

    def poll_if_due(self) -> None:
        """Poll the log at most a few times a second, and do the next piece of work on checkpoints and tiers."""
        if time.monotonic() >= self._poll_at:
            begin = time.monotonic()
            self.poll()
            self._poll_at = time.monotonic() + max(_EVERY_SECONDS, _SHARE * (time.monotonic() - begin))
        works = self._background.advance(self.excluded_through)
        self.due = 0.0 if works else self._poll_at

    def poll(self) -> None:
        """Read new records of the log, and remove the events that they erase from the store and the holdout set.

        From then on neither samples nor new checkpoints have these events.

        Raises:
            SettingsError: the log is damaged.
        """
        if self._unwritten:
            self._append()
        if self._log.is_behind():
            self._log.refresh()
        new = self._log.since(self.excluded_through)
        if not new:
            return
        erased = ErasedEvents(new)
        try:
            others = sum(erase(lambda columns: erased.covers(self._bases, columns)) for erase in self._erase_others)
        except OSError:  # the extension reports it
            return
        self.excluded_through = through = self._log.count
        store = sum(part.erase(erased) for part in self._background.parts)
        holdout = self._holdout.erase(erased, self._bases)
        self._background.count(store, holdout)
        self.erased += store + holdout + others
        self._erase_features(erased)
        log.info(
            "erasing %d events of the store, %d of the holdout set and %d of extensions (record %d)",
            store,
            holdout,
            others,
            through,
        )

    def restored(self, through: int) -> None:
        """Erase from restored weights what the records after `through` erase; their checkpoint is of before them."""
        if through < self._log.count:
            self._erase_features(self._log.erased)

    def _erase_features(self, erased: ErasedEvents) -> None:
        if self._erase_keys is not None and len(erased.keys):
            self._erase_keys(erased.keys, self._log.count)

    def finish(self, deadline: Deadline) -> None:
        """Apply the records to checkpoints and tiers before the deadline; the next start applies the rest."""
        self._background.finish(self.excluded_through, deadline)

    def _append(self) -> None:
        if time.monotonic() < self._write_at:
            return
        try:
            self._log.append(list(self._unwritten.values()))
        except OSError as exc:
            self._write_at = time.monotonic() + _RETRY_SECONDS
            problem = f"{self._log.path} cannot be written: {exc.strerror}; no checkpoint is made until it can"
            if problem != self._problem:
                log.error("%s", problem)  # noqa: TRY400 the sentence is complete
            self._problem = problem
            return
        self._unwritten, self._uncovered, self._problem = {}, ErasedEvents(), None

    def _without_erased(self, columns: dict[str, Array]) -> dict[str, Array]:
        """Return the rows that are not erased; an empty dict if there are none."""
        if not columns:
            return columns
        covered = self._covers(columns)
        if not covered.any():
            return columns
        return {} if covered.all() else {name: column[~covered] for name, column in columns.items()}

    def _covers(self, columns: Mapping[str, Array]) -> NDArray[np.bool_]:
        covered = self._log.erased.covers(self._bases, columns)
        return covered | self._uncovered.covers(self._bases, columns) if self._uncovered else covered


_USED = (Outcome.PENDING, Outcome.HELD_OUT, Outcome.STORED_ONLY, Outcome.WAITING)


def _skip(span: Span, covered: NDArray[np.bool_]) -> None:
    """Set the outcome of the erased rows of a span that would have been used."""
    used = np.isin(span.columns["outcome"], _USED) & covered
    span.columns["outcome"][used] = np.uint8(Outcome.SKIPPED)
    span.columns["reason"][used] = np.uint8(SkipReason.ERASED)
    span.trained[used] = False
