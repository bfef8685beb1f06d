"""Erasure in a learner at work: what the log says is applied to everything that it holds.

Tombstones are written into the log before the batch that has them is learned. From then on nothing that a record covers
is trained on or stored; between steps, a few times a second, what is held is looked through.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import DependencyError
from ingest.events.block import Array, Outcome, SkipReason
from ingest.events.identity import partition_base, partition_name
from ingest.events.partition import TopicPartition, latest_incarnations
from ingest.reader.cursors import Partition
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erase_checkpoints import Eraser
from learner.checkpointing.tombstones import Positions, Tombstones
from learner.evaluation.holdout import HoldoutSet
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoints
from learner.stream.batches import Batch, Span
from replay.background_store import BackgroundStore
from replay.erasure.erased_events import ErasedEvents, Record
from replay.erasure.erasure_log import ErasureLog, now
from replay.erasure.log_file import Applied
from replay.payload.hierarchy import TierHierarchy

_EVERY_SECONDS = 0.2
_SHARE = 20
"""Looking through what is held may take one part in so many of the time, when tombstones come without end."""
_ERASED_AT_ONCE = 4096
_RETRY_SECONDS = 10.0
_WRITE_SECONDS = 1.0
"""Between two tries to write down what could not be written."""

log = logging.getLogger(__name__)


@dataclass
class _Count:
    store: int = 0
    holdout: int = 0


class Erasure:
    """What the log covers, kept out of a learner. Used by the loop's thread, between steps."""

    def __init__(
        self,
        written: ErasureLog,
        checkpoints: Checkpoints,
        folder: Path,
        background_store: BackgroundStore | None,
        holdout: HoldoutSet,
        checkpointer: Checkpointer,
    ) -> None:
        """Take a log that was read, and parts that hold nothing of what it covers.

        Args:
            written: the log.
            checkpoints: of the learner.
            folder: where the disk tier's files lie.
            background_store: of the learner's store.
            holdout: of the learner.
            checkpointer: whose thread rewrites checkpoints.
        """
        self._log = written
        self._checkpoints = checkpoints
        self._folder = folder
        self._background_store = background_store
        self._holdout = holdout
        self._checkpointer = checkpointer
        self._excluded = written.count
        self._erased = written.through
        self._count = _Count()
        self._names: Sequence[TopicPartition] = ()
        self._partitions: Sequence[Partition] = ()
        self._positions: Positions = dict
        self._bases: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._tombstones = Tombstones()
        self._unwritten: list[Record] = []
        self._said_by: set[str] = set()
        self._uncovered = ErasedEvents()
        """What the log does not know yet: all that is not written."""
        self._write_at = 0.0
        self._work: Iterator[None] | None = None
        self._retry_at: float | None = None
        self._due = 0.0
        self.problem: str | None = None
        """One sentence when the log cannot be written, or what is erased cannot be erased."""

    @property
    def through(self) -> int:
        """The number of the last record that is applied everywhere."""
        return self._erased

    @property
    def excluded_through(self) -> int:
        """The number of the last record that is applied to the store and the holdout set."""
        return self._excluded

    @property
    def records(self) -> int:
        """How many records there are."""
        return self._log.count

    @property
    def settled(self) -> bool:
        """Whether all tombstones are written down, without which no checkpoint may say that they were read."""
        return not self._unwritten

    def record_erased(self, store: int, holdout: int) -> None:
        """Count the erased events that were removed from the checkpoint at start; checkpoints and tiers may have
        more."""
        self._count = _Count(self._count.store + store, self._count.holdout + holdout)
        if store or holdout:
            self._erased = 0
        if self._erased < self._excluded and self._background_store is not None:
            self._background_store.flush().tiers.mark_stale()

    def register_partitions(self, partitions: Sequence[Partition], positions: Positions) -> None:
        """Set the partitions, by their index; `positions` returns the first event of each without an outcome."""
        self._partitions, self._positions = partitions, positions
        if len(partitions) > len(self._names):
            self._names = [partition.name for partition in partitions]
            self._bases = np.array([partition_base(name) for name in self._names], np.uint64)
            self._tombstones.register_partitions(self._names)

    def exclude(self, batch: Batch) -> Batch:
        """Write the erasures that the tombstones of a batch ask for, and return the batch without erased events.

        The batch must not be settled yet.
        """
        said = [
            record
            for record in self._tombstones.records(batch.spans, self._positions)
            if record.by not in self._said_by and not self._log.knows(record)
        ]
        if said:
            self._uncovered.add(said)
            self._unwritten += said
            self._said_by |= {record.by for record in said}
            self._write_down()
        if not self._log.erased and not self._uncovered:
            return batch
        for span in batch.spans:
            _skip(span, self._covers(span.columns))
        new, stored_only, held_out = (self._rest(rows) for rows in (batch.new, batch.stored_only, batch.held_out))
        return Batch(new, stored_only, held_out, batch.spans)

    def poll_if_due(self) -> None:
        """Apply what was appended to the log, at most a few times a second; go on with what takes longer."""
        if time.monotonic() >= self._due:
            begin = time.monotonic()
            self.poll()
            self._due = time.monotonic() + max(_EVERY_SECONDS, _SHARE * (time.monotonic() - begin))
        self._go_on()

    def poll(self) -> None:
        """Read new records of the log, and remove the events that they erase from the store and the holdout set.

        From then on neither samples nor new checkpoints have these events.

        Raises:
            SettingsError: the log is damaged.
        """
        if self._unwritten:
            self._write_down()
        if self._log.is_behind():
            self._log.refresh()
        new = self._log.since(self._excluded)
        if not new:
            return
        erased = ErasedEvents(new)
        self._excluded = self._log.count
        store = self._background_store.flush().erase(erased) if self._background_store is not None else 0
        holdout = self._holdout.erase(erased, self._bases)
        self._count = _Count(self._count.store + store, self._count.holdout + holdout)
        log.info("erasing %d events of the store and %d of the holdout set (record %d)", store, holdout, self._excluded)

    def finish(self, deadline: Deadline) -> None:
        """Do all that is left to do, before the deadline; the next start does the rest."""
        while self._erased < self._excluded and deadline.left > 0 and self._retry_at is None:
            self._go_on()
            self._checkpointer.wait(deadline)

    def _go_on(self) -> None:
        """Erase in checkpoints and tiers, in pieces between steps."""
        if self._work is None and self._erased < self._excluded:
            if self._checkpointer.busy or (self._retry_at is not None and time.monotonic() < self._retry_at):
                return
            self._work = self._erase(self._excluded)
        if self._work is None and self._log.is_long and (self._retry_at is None or time.monotonic() >= self._retry_at):
            self._work = self._compact()
        if self._work is not None:
            try:
                next(self._work)
            except StopIteration:
                self._work = None

    def _erase(self, through: int) -> Iterator[None]:
        """Take records out of checkpoints and tiers, in an order in which a crash costs nothing; yields between the
        pieces.

        1. Rewrite checkpoints, in the thread that writes them: no checkpoint that is begun later has what was
        erased.
        2. Erase what is left behind where a tier could not be written or erased, and the places of the disk tier that
           no checkpoint names, and of which is not known who has left them.
        3. Wait until the disk has it, and write into the log that it is done. A crash before this does all again.
        """
        self._retry_at = None
        count, self._count = self._count, _Count()
        if self._erased < self._log.through:
            erased = self._log.erased.copy()
        else:
            erased = ErasedEvents(self._log.since(self._erased)[: through - self._erased])
        current = self._background_store.flush().tiers.file if self._background_store is not None else None
        eraser = Eraser(self._checkpoints, self._folder, erased)
        rewriting = _Job(lambda: eraser.run(current.id if current is not None else None).named)
        yield from self._wait_for(rewriting)
        if self._background_store is not None and rewriting.error is None:
            named = np.zeros(self._background_store.flush().tiers.slots, np.bool_)
            if current is not None:
                named[rewriting.result.get(current.id, np.empty(0, np.int64))] = True
            first = 0
            while self._background_store.flush().tiers.erase_stale(first, _ERASED_AT_ONCE):
                first += _ERASED_AT_ONCE
                yield
            while self._background_store.flush().erase_unknown(named, _ERASED_AT_ONCE):
                yield
        tiers = self._background_store.flush().tiers if self._background_store is not None else None
        syncing = _Job(lambda: _sync(tiers))
        yield from self._wait_for(syncing)
        error = rewriting.error or syncing.error
        if error is None and tiers is not None and tiers.unerased:
            error = OSError(tiers.problem or "a tier could not be reached")
        self._end(through, count, error)

    def _compact(self) -> Iterator[None]:
        """Write the log anew, beside the steps, without what it need not say any more."""
        self._retry_at = None
        written, log_starts = self._log.copy(), self._log_starts()
        compacting = _Job(lambda: _compact(written, log_starts, self._checkpoints))
        yield from self._wait_for(compacting)
        if compacting.error is not None:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            log.warning("%s cannot be written anew yet: %s", self._log.path, compacting.error)
        else:
            self._log.refresh()

    def _log_starts(self) -> Mapping[str, int]:
        """Return, by name of the partition, the first offset that may still be read: by Kafka, or in the ring.

        A partition of a topic that was made anew, or whose log lost its end, is as far as the one in its place: after
        beginning anew what both have is read under the first name.
        """
        there, positions = latest_incarnations(partition.name for partition in self._partitions), self._positions()
        found = {}
        for place, each in enumerate(self._partitions):
            last = there[each.name.topic, each.name.partition]
            first = self._partitions[last].log_start
            if first is not None and each.name in positions:
                read = first if last != place else positions[each.name].offset
                found[partition_name(each.name)] = min(first, read)
        return found

    def _wait_for(self, job: "_Job") -> Iterator[None]:
        while not self._checkpointer.run(job.run):
            yield
        while not job.done:
            yield

    def _end(self, through: int, count: _Count, error: OSError | None) -> None:
        try:
            if error is not None:
                raise error
            self._log.append(Applied(time=now(), through=through, store=count.store, holdout=count.holdout))
        except OSError as exc:
            self._count = _Count(self._count.store + count.store, self._count.holdout + count.holdout)
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._say(f"what was erased cannot be erased everywhere yet: {exc.strerror or exc}")
            return
        self._erased, self.problem = through, None

    def _write_down(self) -> None:
        if time.monotonic() < self._write_at:
            return
        try:
            self._log.append(self._unwritten)
        except OSError as exc:
            self._write_at = time.monotonic() + _WRITE_SECONDS
            self._say(f"{self._log.path} cannot be written: {exc.strerror}; no checkpoint is made until it can")
            return
        self._unwritten, self._said_by, self._uncovered, self.problem = [], set(), ErasedEvents(), None

    def _rest(self, columns: dict[str, Array]) -> dict[str, Array]:
        """Return rows without those that are erased; none at all is an empty dict."""
        if not columns:
            return columns
        covered = self._covers(columns)
        if not covered.any():
            return columns
        return {} if covered.all() else {name: column[~covered] for name, column in columns.items()}

    def _covers(self, columns: Mapping[str, Array]) -> NDArray[np.bool_]:
        covered = self._log.erased.covers(self._bases, columns)
        return covered | self._uncovered.covers(self._bases, columns) if self._uncovered else covered

    def _say(self, sentence: str) -> None:
        if self.problem != sentence:
            log.error("%s", sentence)
        self.problem = sentence


@dataclass
class _Job:
    """Work in another thread, and what came of it."""

    work: Callable[[], Mapping[str, NDArray[np.int64]]]
    result: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    error: OSError | None = None
    done: bool = False

    def run(self) -> None:
        """Do it; a full or read-only disk is kept for whoever looks."""
        try:
            self.result = self.work()
        except OSError as exc:
            self.error = exc
        self.done = True


def _compact(
    written: ErasureLog, log_starts: Mapping[str, int], checkpoints: Checkpoints
) -> Mapping[str, NDArray[np.int64]]:
    try:
        written.compact(log_starts, checkpoints.clean_of(written.through) if log_starts else 0)
    except DependencyError as exc:  # it cannot be read now, which the next try may
        raise OSError(str(exc)) from exc
    return {}


def _sync(tiers: TierHierarchy | None) -> Mapping[str, NDArray[np.int64]]:
    if tiers is not None:
        tiers.sync()
    return {}


def _skip(span: Span, covered: NDArray[np.bool_]) -> None:
    """Give the rows of a span that are erased, and were to be used, their outcome."""
    used = np.isin(span.columns["outcome"], (Outcome.PENDING, Outcome.HELD_OUT, Outcome.STORED_ONLY)) & covered
    span.columns["outcome"][used] = np.uint8(Outcome.SKIPPED)
    span.columns["reason"][used] = np.uint8(SkipReason.ERASED)
    span.trained[used] = False
