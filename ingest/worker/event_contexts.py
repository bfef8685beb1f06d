"""The trace contexts that producers sent in the headers of records, and the rows that they belong to."""

import numpy as np

from anabranch.core.tracing.context import MOST_LINKS, sampled_contexts
from ingest.worker.block_builder import Assembled

RowContexts = list[tuple[int, str]]


def contexts_of(assembled: Assembled) -> RowContexts:
    """Return the sampled contexts of messages, each with its row, ascending.

    Only the first row of a message that has several gets its context. Messages without headers are passed over in C.
    """
    contexts: RowContexts = []
    begin = 0
    for each, rows in zip(assembled.incoming, assembled.rows, strict=True):
        offsets = assembled.columns["offset"][begin : begin + rows]
        if any(each.messages.headers):
            for index, context in sampled_contexts(each.messages.headers):
                offset = each.messages.offsets[index]
                row = int(np.searchsorted(offsets, offset))
                if row < rows and offsets[row] == offset:  # else it has an outcome from before
                    contexts.append((begin + row, context))
        begin += rows
    return contexts


def of_block(contexts: RowContexts, begin: int, end: int) -> tuple[RowContexts, int]:
    """Return the contexts of rows `[begin, end)` with their rows from `begin` on, and how many were too many."""
    own = [(row - begin, context) for row, context in contexts if begin <= row < end]
    return own[:MOST_LINKS], max(0, len(own) - MOST_LINKS)
