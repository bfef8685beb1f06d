"""Returns to the newest checkpoint that has seen none of the events to be undone, before a learner reads it.

A learner does this at each start, under its lock. All steps can be repeated: a crash leaves a state from which the next
start does the rest.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.core.errors import SettingsError
from anabranch.core.failures import state_errors
from ingest.events.position import PartitionFingerprint, Position
from learner.errors import CheckpointError, MisfitError, VersionError
from learner.state_dir.checkpoint import Checkpoint, Checkpoints
from learner.state_dir.undo_file import UndoRecord, WentBack, read_undo, record_return
from learner.state_dir.version import Verdict, Versions
from learner.stream.partition_ledger import PartitionLedger
from learner.undo.tainted import names_in, seen_by_checkpoint, seen_by_version
from learner.undo.undone_events import UndoneEvents

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sorted:
    """The checkpoints of a state directory, by what they have seen.

    Attributes:
        clean: the states of those that have seen no event of any record, the newest first.
        tainted: the others, likewise; damaged ones are in neither.
    """

    clean: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    tainted: dict[int, Mapping[str, Any]] = field(default_factory=dict)


def sort_checkpoints(checkpoints: Checkpoints, records: Sequence[UndoRecord]) -> Sorted:
    """Return which checkpoints are clean.

    Raises:
        MisfitError: one was made under another schema or by another release, which no restart would resume either.
        OSError: one cannot be read for now.
    """
    found = Sorted()
    for number in checkpoints.by_age()[::-1]:
        try:
            manifest = checkpoints.manifest(number)
            checkpoints.check(manifest)
            state = checkpoints.state(manifest)
        except MisfitError:
            raise
        except CheckpointError as exc:
            log.warning("%s; it is not used", exc)
            continue
        (found.tainted if seen_by_checkpoint(state).tainted_by(records) else found.clean)[number] = state
    return found


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
        checkpoints.clean()
        found = sort_checkpoints(checkpoints, records)
        if not found.clean and found.tainted:
            _begin_again(checkpoints, next(iter(found.tainted.values())))
        for number in found.tainted:
            log.warning("checkpoint %d has seen events that were undone: it is set aside", number)
            checkpoints.set_aside(number)
        _fail_versions(versions, records, torn=torn)
        if any(record.went_back is None for record in records):
            number, state = next(iter(sort_checkpoints(checkpoints, records).clean.items()), (0, {"ledger": []}))
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


def beginning(state: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint of where the stream begins, from the state of a later one."""
    rows = []
    for row in state["ledger"]:
        before = PartitionLedger.from_state(row)
        account = PartitionLedger(before.name, before.start)
        account.position = account.counted = Position(before.start)
        account.mark = PartitionFingerprint(before.mark.topic_id)
        rows.append(account.state())
    return Checkpoint(0, {}, {"ledger": rows})


def check_beginning(checkpoints: Checkpoints, state: Mapping[str, Any]) -> None:
    """Raise SettingsError where the stream cannot be begun again, given the state of a checkpoint of it."""
    if any(row["history"] for row in state["ledger"]):
        raise SettingsError(
            f"every checkpoint in {checkpoints.location} has seen events that are undone, and the history of "
            "[stream.backfill] would be learned again; begin again by moving the checkpoints away, or restore an older "
            "one from a backup"
        )


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
