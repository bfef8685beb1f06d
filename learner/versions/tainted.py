"""Which checkpoints and versions have seen events that are to be undone. Imports no torch.

All events before a position count as seen, also those that were held out, skipped or only stored: the gate has judged
by the first, and the store replays the last. So whether one is tainted depends on its positions alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.state_dir.undo_file import UNDONE, UndoRecord
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.versions.format import Manifest

_NAME = re.compile(r"(.+)#(\d+)\[(\d+)\]")


class Seen(NamedTuple):
    """What a checkpoint or a version has seen of the stream."""

    undone: int
    """The last record whose events it has never seen, whatever its offsets are."""
    offsets: Mapping[str, int]
    """The first offset that it has not seen, by partition as `topic#incarnation[partition]`."""

    def taints(self, record: UndoRecord) -> bool:
        """Return whether it has seen an event of a record."""
        if self.undone >= record.number:
            return False
        return any(ranges.firsts[0] < self.offsets.get(name, 0) for name, ranges in record.ranges.items())

    def tainted_by(self, records: Sequence[UndoRecord]) -> list[int]:
        """Return the numbers of the records of which it has seen an event."""
        return [record.number for record in records if self.taints(record)]


def seen_by_checkpoint(state: Mapping[str, Any]) -> Seen:
    """Return what a checkpoint with this state has seen; a message of which it has seen some events counts."""
    offsets = {}
    for row in state["ledger"]:
        if not row["history"]:
            name = TopicPartition(row["topic"], row["partition"], row["incarnation"])
            offset, of_message = row["position"]
            offsets[partition_name(name)] = offset + (of_message > 0)
    return Seen(state.get(UNDONE, 0), offsets)


def reads_files(state: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint with this state reads files of events of the topics before it reads these."""
    return any(row["history"] and not row["position"][0] for row in state["ledger"])


def seen_by_version(manifest: Manifest, names: Sequence[str], *, torn: bool) -> Seen:
    """Return what a version has seen of some partitions.

    Args:
        manifest: of the version.
        names: of partitions, as `topic#incarnation[partition]`. One of an earlier incarnation than the version names
            counts as seen in full.
        torn: whether a message may hold many events: the one after those that were seen in full may be seen in part.
    """
    offsets = {}
    for name in names:
        match = _NAME.fullmatch(name)
        key = "" if match is None else f"{match[1]}:{match[3]}"
        if match is None or (progress := manifest.trained_through.get(key)) is None:
            continue
        through = progress.offset if manifest.seen_through is None else manifest.seen_through.get(key, progress.offset)
        if progress.incarnation == int(match[2]):
            offsets[name] = through + 1 + torn
        elif progress.incarnation > int(match[2]):
            offsets[name] = 2**62
    return Seen(manifest.undone, offsets)


def names_in(records: Sequence[UndoRecord]) -> list[str]:
    """Return the partitions of which records have ranges."""
    return list(dict.fromkeys(name for record in records for name in record.ranges))


@dataclass(frozen=True)
class CheckpointsByTaint:
    """The checkpoints of a state directory, by what they have seen.

    Attributes:
        clean: the states of those that have seen no event of any record, the newest first.
        tainted: the others, likewise; damaged ones are in neither.
    """

    clean: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    tainted: dict[int, Mapping[str, Any]] = field(default_factory=dict)


def checkpoints_by_taint(checkpoints: Checkpoints, records: Sequence[UndoRecord]) -> CheckpointsByTaint:
    """Return which checkpoints are clean.

    Raises:
        MisfitError: one was made under another schema or by another release, which no restart would resume either.
        OSError: one cannot be read for now.
    """
    found = CheckpointsByTaint()
    for number, state in checkpoints.states():
        (found.tainted if seen_by_checkpoint(state).tainted_by(records) else found.clean)[number] = state
    return found


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
