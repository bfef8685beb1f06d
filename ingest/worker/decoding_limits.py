"""Lets no message end the ingest process again and again, whatever library it makes crash or hang."""

import bisect
import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.transport.decoding_mark import DecodingMark, OffsetRange

REFUSED = "internal: decoding it ended the ingest process twice"
"""Why a message is dead-lettered that was not decoded."""
_TOGETHER_SECONDS = 10.0
_ALONE_SECONDS = 5.0
_BYTES_A_SECOND = 1_000_000
"""Messages get a second more for each of so many bytes."""


class DecodingLimits:
    """Marks what is decoded, bounds its CPU time, and decodes those alone that a process died of.

    Past the bound the process ends by SIGPROF: nothing else interrupts a library that does not return.
    """

    def __init__(
        self,
        mark: DecodingMark,
        suspects: Sequence[OffsetRange] = (),
        refused: Sequence[tuple[int, int]] = (),
        *,
        has_limit: bool = False,
    ) -> None:
        """Take what the learner says of `suspects` and `refused`, as in `Begin`; `has_limit`: CPU time is bounded."""
        self._mark = mark
        self._suspects = {each.partition: (each.begin, each.end) for each in suspects}
        self._refused = set(refused)
        self._has_limit = has_limit

    def split(self, portion: Sequence[Messages], index: dict[TopicPartition, int]) -> Iterator[list[Messages]]:
        """Yield the messages of a portion, in their order: those that are suspected each alone."""
        if not self._suspects:
            yield list(portion)
            return
        for messages in portion:
            first, end = self._suspects.get(index[messages.partition], (0, 0))
            low = bisect.bisect_left(messages.offsets, first)
            high = bisect.bisect_left(messages.offsets, end)
            if low or high == low:
                yield [messages.part(0, low if high > low else len(messages))]
            for at in range(low, high):
                yield [messages.part(at, at + 1)]
            if low < high < len(messages):
                yield [messages.part(high, len(messages))]

    def refusing(self, messages: Messages, partition: int) -> Messages:
        """Return the messages with a fault for each that is not to be decoded."""
        if not self._refused:
            return messages
        faults = {at: REFUSED for at, offset in enumerate(messages.offsets) if (partition, offset) in self._refused}
        return replace(messages, faults={**messages.faults, **faults}) if faults else messages

    def reading_files(self, partition: int, row: int) -> contextlib.AbstractContextManager[None]:
        """Mark that rows of files are read, the first of which is `row` of all files and passes.

        `partition` is the index of a partition of files. Which rows a crash is due to is not known.
        """
        return self._mark.of([OffsetRange(partition, row, row)])

    @contextlib.contextmanager
    def decoding(self, portion: Sequence[tuple[Messages, int]]) -> Iterator[None]:
        """Mark messages, each with the index of its partition, while the block decodes them."""
        ranges = [
            OffsetRange(partition, messages.offsets[0], messages.offsets[-1] + 1)
            for messages, partition in portion
            if len(messages)
        ]
        if not self._has_limit:
            with self._mark.of(ranges):
                yield
            return
        is_alone = len(ranges) == 1 and ranges[0].is_one
        size = sum(len(value or b"") for messages, _ in portion for value in messages.values)
        seconds = (_ALONE_SECONDS if is_alone else _TOGETHER_SECONDS) + size / _BYTES_A_SECOND
        with self._mark.of(ranges):
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
