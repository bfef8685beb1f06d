"""Which checkpoints and versions have seen events that are to be undone. Imports no torch.

All events before a position count as seen, also those that were held out, skipped or only stored: the gate has judged
by the first, and the store replays the last. So whether one is tainted depends on its positions alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingest.events.identity import partition_name
from ingest.events.partition import TopicPartition
from learner.state_dir.undo_file import UNDONE, UndoRecord
from learner.state_dir.version import Manifest

TORN = ("rows", "arrow")
"""Formats of which a message may hold many events."""
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
