"""The trace contexts that producers sent in the headers of records, and the rows that they belong to."""

from bisect import bisect_left
from operator import itemgetter

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
            sampled = list(sampled_contexts(each.messages.headers))
            sent = [each.messages.offsets[index] for index, _ in sampled]
            found = np.searchsorted(offsets, sent).tolist()
            for row, offset, (_, context) in zip(found, sent, sampled, strict=True):
                if row < rows and offsets[row] == offset:  # else it has an outcome from before
                    contexts.append((begin + row, context))
        begin += rows
    return contexts


def of_block(contexts: RowContexts, begin: int, end: int) -> tuple[RowContexts, int]:
    """Return those of rows `[begin, end)`, with their rows from `begin` on, and how many were too many.

    Quick however many there are, since `contexts` ascend.
    """
    first, after = (bisect_left(contexts, row, key=itemgetter(0)) for row in (begin, end))
    own = contexts[first : min(after, first + MOST_LINKS)]
    return [(row - begin, context) for row, context in own], after - first - len(own)
