"""Removes events on which the model raises: from a batch, from the replay store, and from the holdout set."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from ingest.events.block import Array, SkipReason
from learner.evaluation.holdout import HoldoutSet
from learner.loop_parts.loop_state import StepState
from learner.model.faulty_events import Raised, RaisingEventsError
from learner.replay_feed import Replay, ReplayFeed
from learner.stream.batch import Batch


class RaisingEvents:
    """Removes, counts and logs events on which the model raises. Used by the loop's thread."""

    def __init__(
        self,
        state: StepState,
        replay: ReplayFeed,
        holdout: HoldoutSet,
        queues: Sequence[deque[tuple[NDArray[np.uint64], str]]],
        metric: Counter,
    ) -> None:
        """Start with no such events.

        Args:
            state: with the partitions and the number of new events so far.
            replay: from whose store old events are removed.
            holdout: from which held-out events are removed.
            queues: hashes of held-out events on which the model raised, with the error; other threads add to them.
            metric: counts events, by where they were removed.
        """
        self._state = state
        self._replay = replay
        self._holdout = holdout
        self.queues = queues
        self._metric = metric
        self.raised = Raised()

    @property
    def problem(self) -> str | None:
        """One sentence when the model raises on too many new events. Any thread may ask."""
        return self.raised.problem(self._seen)

    @property
    def _seen(self) -> int:
        """New events so far: those that were trained on, and those on which the model raised."""
        return self._state.rows_new + self.raised.new

    def remove(self, batch: Batch, replay: Replay, error: RaisingEventsError) -> Replay:
        """Skip the new events that `error` names, and remove the old ones from the store; return the remaining ones."""
        count = len(batch)
        raised = np.zeros(count + sum(map(len, replay.examples)), np.bool_)
        raised[error.indices] = True
        new, old = raised[:count], raised[count:]
        if old.any():
            replay, records = self._replay.remove(replay, old)
            self._metric.labels("replay").inc(len(records))
            self.raised.log("which are replayed no more", self._names(records), error.message)
        if rows := int(new.sum()):
            skipped = {name: batch.new[name][new] for name in ("partition", "offset")}
            batch.skip(new, SkipReason.MODEL)
            self._metric.labels("new").inc(rows)
            self.raised.add(self._seen + rows, rows, error.message)
            self.raised.log("which are skipped", self._names(skipped), error.message)
        return replay

    def clean_holdout(self) -> None:
        """Remove events on which the model raised from the holdout set."""
        for queue in self.queues:
            while queue:
                hashes, message = queue.popleft()
                removed = self._holdout.remove(hashes)
                if removed and (count := len(removed["offset"])):
                    self._metric.labels("held_out").inc(count)
                    self.raised.log("which are held out no more", self._names(removed), message)

    def _names(self, columns: Mapping[str, Array] | NDArray[np.void]) -> list[str]:
        """Return the names of events, as `topic[partition]@offset`."""
        names = [account.name for account in self._state.ledger.partitions]
        events = zip(columns["partition"].tolist(), columns["offset"].tolist(), strict=True)
        return [f"{names[index].topic}[{names[index].partition}]@{offset}" for index, offset in events]
