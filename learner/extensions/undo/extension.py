"""Takes events out of what was learned: a start returns to a checkpoint from before them, and skips them from then on.

`anabranch undo` writes a record into `undo.json`. A learner that runs notices it and ends; the next start, under its
lock, sets the checkpoints aside that have seen the events. All steps of that can be repeated: a crash leaves a state
from which the next start does the rest.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.failures import state_errors
from anabranch.ingest.events.block import Block, Outcome, SkipReason
from anabranch.ingest.events.identity import partition_base, partition_name
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.errors import MisfitError, UndoRequestedError, VersionError
from anabranch.learner.extension import Extension
from anabranch.learner.state_dir.undo_file import (
    NAME,
    UNDONE,
    UndoRecord,
    WentBack,
    changing,
    read_undo,
    record_return,
    stamp_of,
)
from anabranch.learner.status.report import UndoReport
from anabranch.learner.stream.batches import BlockSource
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.learner.versions.tainted import (
    beginning,
    check_beginning,
    checkpoints_by_taint,
    names_in,
    seen_by_checkpoint,
    seen_by_version,
)
from anabranch.replay.erasure.erased_events import ByRange, ErasedEvents

_LEFT_ALONE = tuple(np.uint8(outcome) for outcome in (Outcome.DEAD_LETTERED, Outcome.SKIPPED))
"""Outcomes that stay: among them are tombstones, whose erasures are not undone."""
_EVERY_SECONDS = 0.1

log = logging.getLogger(__name__)


class Undo(Extension):
    """Reads the stream without undone events, and ends the learner once more of them are to be undone."""

    name = UNDONE

    def __init__(self, state_dir: Path, undone: "UndoneEvents") -> None:
        self._state_dir = state_dir
        self._undone = undone
        self.number = undone.number
        """The last record that is applied."""
        self._ledger: Ledger | None = None
        self._stamp: object = None
        self._due = 0.0

    @override
    def attach(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @override
    def source(self, source: BlockSource) -> BlockSource:
        return WithoutUndone(source, self._undone) if self._undone.records else source

    @override
    def run_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY_SECONDS
            self.check()

    def check(self) -> None:
        """Compare the file with what is applied; called before anything is published. Any thread may call it.

        Raises:
            UndoRequestedError: there is a record that is not applied.
            SettingsError: the file is damaged.
            DependencyError: it cannot be read for now.
        """
        stamp = stamp_of(self._state_dir)
        if stamp == self._stamp:
            return
        records = read_undo(self._state_dir)
        if records and records[-1].number > self.number:
            raise UndoRequestedError(
                f"undo {records[-1].number} was requested: this learner ends without a checkpoint, and its next start "
                "returns to one from before the events"
            )
        self._stamp = stamp

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Let no undo be ordered while a checkpoint is deleted, to which it may return, or a version appears.

        Raises as `check`, and OSError.
        """
        with changing(self._state_dir):
            self.check()
            yield

    @override
    def state(self) -> int:
        return self.number

    @override
    def restore(self, state: int) -> None:
        if state > self.number:
            raise MisfitError(
                f"the checkpoint was made after undo {state}, which {NAME} in state_dir does not have; put the file "
                "back from a backup, or what was undone would be learned again"
            )

    @override
    def report(self) -> Mapping[str, Any]:
        return {} if self._ledger is None else {"undo": self._undone.report(self._ledger.partitions)}


class UndoneEvents:
    """The events of all records of an `undo.json`. Used by one thread."""

    def __init__(self, records: Sequence[UndoRecord] = ()) -> None:
        self.records = records
        self.number = records[-1].number if records else 0
        """The last record."""
        self._events = ErasedEvents(
            [
                ByRange(time=record.time, by="undo", partition=name, first=first, last=last)
                for record in records
                for name, ranges in record.ranges.items()
                for first, last in zip(ranges.firsts, ranges.lasts, strict=True)
            ]
        )
        self._partitions: Sequence[Partition] = ()
        self._bases: NDArray[np.uint64] = np.empty(0, np.uint64)

    def skip_in(self, block: Block, partitions: Sequence[Partition]) -> None:
        """Set the outcome of the block's undone events to SKIPPED; `partitions` are those that its rows index."""
        if partitions is not self._partitions:
            self._partitions = partitions
            self._bases = np.array([partition_base(each.name) for each in partitions], np.uint64)
        outcome, reason = block.columns["outcome"], block.columns["reason"]
        undone = self._events.covers(self._bases, block.columns) & ~np.isin(outcome, _LEFT_ALONE)
        outcome[undone] = np.uint8(Outcome.SKIPPED)
        reason[undone] = np.uint8(SkipReason.UNDONE)

    def report(self, accounts: Sequence[PartitionLedger]) -> UndoReport | None:
        """Return how far the stream is learned again since the last record; None without one.

        Partitions that are not read any more have nothing left that could be.
        """
        if not self.records or (went_back := self.records[-1].went_back) is None:
            return None
        record = self.records[-1]
        now = {partition_name(each.name): each.position.offset for each in accounts if each.read}
        left = total = 0
        for name in now.keys() & record.until.keys():
            until, begin = record.until[name], went_back.positions.get(name, record.until[name])
            total += max(0, until - begin)
            left += max(0, until - max(begin, now[name]))
        return UndoReport(
            number=record.number,
            checkpoint=went_back.checkpoint,
            offsets=sum(ranges.count for ranges in record.ranges.values()),
            left=left,
            fraction=1 - left / total if total else 1.0,
        )


class WithoutUndone(BlockSource):
    """The blocks of a source, in which undone events are skipped."""

    def __init__(self, source: BlockSource, undone: UndoneEvents) -> None:
        self._source, self._undone = source, undone

    @property
    @override
    def partitions(self) -> Sequence[Partition]:
        return self._source.partitions

    @override
    def poll(self, timeout: timedelta) -> Block | None:
        block = self._source.poll(timeout)
        if block is not None:
            self._undone.skip_in(block, self._source.partitions)
        return block

    @override
    def release(self, block: Block) -> None:
        self._source.release(block)


def go_back(state_dir: Path, checkpoints: Checkpoints, versions: Versions, *, torn: bool) -> UndoneEvents:
    """Apply the records of `undo.json`, and return the events that may not be learned again.

    1. If all checkpoints are tainted, write one that begins the stream again.
    2. Set the tainted checkpoints aside, the newest first.
    3. Fail the tainted versions, so that no server takes one, whatever became of the command.
    4. Record the checkpoint in the file.

    Args:
        state_dir: the state directory, whose lock the caller holds.
        checkpoints: its checkpoints.
        versions: its versions.
        torn: as in `seen_by_version`.

    Raises:
        SettingsError: the file cannot be used, or a person has to change a folder.
        DependencyError: a file cannot be read or written for now.
    """
    records = read_undo(state_dir)
    if not records:
        return UndoneEvents()
    with state_errors(f"the state in {state_dir} cannot be changed to undo {records[-1].number}"):
        checkpoints.storage.clean()
        found = checkpoints_by_taint(checkpoints, records)
        if not found.clean and found.tainted:
            _begin_again(checkpoints, next(iter(found.tainted.values())))
        for number in found.tainted:
            log.warning("checkpoint %d has seen events that were undone: it is set aside", number)
            checkpoints.storage.set_aside(number)
        _fail_versions(versions, records, torn=torn)
        if any(record.went_back is None for record in records):
            number, state = next(checkpoints.states(), (0, {"ledger": []}))  # the tainted ones are set aside
            offsets = seen_by_checkpoint(state).offsets
            record_return(state_dir, WentBack(checkpoint=number, time=time.time(), positions=dict(offsets)))
            log.warning("undo %d: learning again from checkpoint %d, without its events", records[-1].number, number)
    return UndoneEvents(read_undo(state_dir))


def undone_with_storage(state_dir: Path) -> UndoneEvents:
    """Return the events that may not be learned again, of records that were applied before there was `[storage]`.

    Raises:
        SettingsError: the file cannot be used, or has a record that is not applied.
        DependencyError: it cannot be read for now.
    """
    records = read_undo(state_dir)
    if any(record.went_back is None for record in records):
        raise SettingsError(
            f"undo {records[-1].number} does not go with [storage], whose checkpoints are not set aside; take the "
            "section out, start once, and put it back"
        )
    return UndoneEvents(records)


def _begin_again(checkpoints: Checkpoints, state: Mapping[str, Any]) -> None:
    check_beginning(checkpoints, state)
    number = checkpoints.highest() + 1
    log.warning("every checkpoint has seen events that were undone: checkpoint %d begins the stream again", number)
    checkpoints.write(number, beginning(state), time.time())


def _fail_versions(versions: Versions, records: Sequence[UndoRecord], *, torn: bool) -> None:
    """Replace the verdicts of tainted versions; one that is damaged is not served anyway."""
    names = names_in(records)
    for number in versions.numbers():
        try:
            tainted = seen_by_version(versions.manifest(number), names, torn=torn).tainted_by(records)
            failed = undone_verdict(tainted[-1]) if tainted else None
            if failed is not None and versions.verdict(number) != failed:
                versions.write_verdict(number, failed)
        except (VersionError, FileNotFoundError) as exc:
            log.warning("version %d is not marked: %s", number, exc)


def undone_verdict(record: int) -> Verdict:
    """Return the verdict of a version that has seen events of a record."""
    return Verdict("fail", [f"it has seen events that were undone (undo {record})"])
