"""Partitions that wait for the Schema Registry: the schema of their next message is not there yet."""

from collections.abc import Sequence

from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.worker.partition_table import PartitionTable


class PausedPartitions:
    """Pauses partitions, and resumes all of them whenever the registry has answered: those that still wait pause again.

    The position of a paused partition is its deferred message, from which it is read again.
    """

    def __init__(self, table: PartitionTable, schemas: WriterSchemas | None) -> None:
        self._table = table
        self._schemas = schemas
        self._answers = 0
        self._changed = False

    def add(self, indexes: Sequence[int]) -> None:
        """Pause partitions, by index; `assign_if_changed` makes the client stop fetching them."""
        self._changed |= bool(indexes)
        self._table.paused.update(indexes)

    def assign_if_changed(self) -> None:
        """Assign the partitions again if one was paused; call it when all fetched messages are in blocks."""
        if self._changed:
            self._changed = False
            self._table.assign()

    def resume_if_answered(self) -> None:
        """Resume all paused partitions if the registry has answered; else let it be asked again when that is due."""
        if not self._table.paused or self._schemas is None:
            return
        self._schemas.fetch_if_due()
        if self._answers != self._schemas.answers:
            self._answers = self._schemas.answers
            self.clear()
            self._table.assign()

    def clear(self) -> None:
        """Resume all partitions, once they are assigned again."""
        self._changed = False
        self._table.paused.clear()

    @property
    def problem(self) -> str | None:
        """One sentence on the first partition that is paused, if one is."""
        if not self._table.paused or self._schemas is None:
            return None
        index = min(self._table.paused)
        partition, offset = self._table.partitions[index], self._table.positions[index].offset
        others = len(self._table.paused) - 1
        more = f" (and {others} more partition{'' if others == 1 else 's'})" if others else ""
        why = self._schemas.problem or "the registry has not answered yet"
        name = f"{partition.topic}[{partition.partition}]"
        return f"{name}{more} waits at offset {offset} for the schema of its message: {why}"
