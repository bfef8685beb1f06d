"""Columns and dead letters of rows of the history.

Legend: K rows.
"""

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.backfill.history_rows import HistoryRows
from anabranch.ingest.events.block import Array, BlockLayout, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Reject
from anabranch.ingest.kafka.client import Messages


def history_columns(rows: HistoryRows, partition: NDArray[np.int32], layout: BlockLayout) -> dict[str, Array]:
    """Return all columns of K rows. Rejected ones are dead-lettered, and those left to the topics skipped.

    `partition` is int32 `[K]`, the index of each row's partition.
    """
    total, decoded = len(rows), rows.decoded
    if len(decoded.message) == total:
        columns = dict(decoded.columns)
    else:
        columns = layout.empty(total)
        for name, column in decoded.columns.items():
            columns[name][decoded.message] = column
    outcome, reason = np.zeros(total, np.uint8), np.zeros(total, np.uint8)
    outcome[[reject.message for reject in decoded.rejects]] = Outcome.DEAD_LETTERED
    if rows.left is not None:
        outcome[rows.left], reason[rows.left] = Outcome.SKIPPED, SkipReason.LEFT_TO_TOPICS
    columns |= {"partition": partition, "offset": rows.offset, "row": np.zeros(total, np.int32)}
    return columns | {"outcome": outcome, "reason": reason}


def skip_repeated(columns: dict[str, Array], again: NDArray[np.bool_]) -> None:
    """Mark rows that are read again, bool `[K]`: those to train on have the reason `REPEATED`, by which no store adds
    them; all others, which have their outcome already, are skipped for it.
    """
    if not again.any():
        return
    trained = (columns["outcome"] == Outcome.PENDING) & columns["labelled"].astype(np.bool_)
    columns["outcome"][again & ~trained] = np.uint8(Outcome.SKIPPED)
    columns["reason"][again & (columns["reason"] == SkipReason.NONE)] = np.uint8(SkipReason.REPEATED)


def empty(partition: TopicPartition) -> Messages:
    """Return no messages of a partition."""
    return Messages(partition, (), (), (), (), (), 0)


def message_of(rows: HistoryRows, row: int, partition: TopicPartition) -> Messages:
    """Return a row as the only message of a partition, for its dead letter."""
    offset, time_ms = int(rows.offset[row]), int(rows.time_ms[row])
    return Messages(partition, [offset], [time_ms], [None], [rows.text(row)], [()], offset + 1)


def whole(reject: Reject) -> Reject:
    """Return a reject as that of the only message."""
    return Reject(0, WHOLE_MESSAGE, reject.reason)
