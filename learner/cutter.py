"""Makes cuts: a snapshot at a step boundary, everything else in the background."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.background import Background
from learner.config import CutsSettings
from learner.cut import Cut, Cuts
from learner.deadline import Deadline
from learner.metrics import LearnerMetrics
from replay.store import Contents, Held, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """All that a cut is made from, copied at one step boundary; `held` is the store's part, read in the background."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    held: Held | None


class Cutter:
    """Writes cuts in a thread of its own, one at a time. Its methods are called by the loop's thread."""

    def __init__(self, cuts: Cuts, settings: CutsSettings, store: Store | None, metrics: LearnerMetrics) -> None:
        self._cuts = cuts
        self._every = settings.every.total_seconds()
        self._keep = settings.keep
        self._store = store
        self._metrics = metrics
        self._due = time.monotonic() + self._every
        self._background = Background("cutter")
        self.number = self._highest = max(cuts.numbers(), default=0)
        """The newest cut; numbers only grow."""
        self.ill: str | None = None
        """One sentence when the last cut could not be written."""

    def cut_if_due(self, take: Callable[[], Moment]) -> None:
        """Begin a cut when one is due; one that falls due while another is written waits for it.

        When a cut takes so long that the store runs out of slots to fill, this waits, and says so in the metrics.
        """
        if self._store is not None and self._store.reserve < self._store.burst:
            begin = time.perf_counter()
            self._background.wait()
            self._metrics.cut_stall.inc(time.perf_counter() - begin)
        self._end()
        if not self._background.busy and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every
            self._begin(take())

    def cut_last(self, take: Callable[[], Moment], deadline: Deadline) -> None:
        """Cut once more, and wait until it is written."""
        self._background.wait(deadline)
        self._end()
        if not self._background.busy:
            self._begin(take())
            self._background.wait(deadline)
            self._end()

    def _begin(self, moment: Moment) -> None:
        self._background.start(lambda: self._write(moment))

    def _end(self) -> None:
        """Let the store reuse its slots once the cut is written."""
        if not self._background.busy and self._store is not None:
            self._store.let_go()
        self._background.raise_bug()

    def _write(self, moment: Moment) -> None:
        """Write and prune. A full or read-only disk costs this cut, never the training nor the cuts before."""
        number = self._highest = self._highest + 1  # a number that failed is not used again
        try:
            with self._metrics.cut.time():
                self._cuts.write(number, self._cut(moment), time.time())
            self.number = number
            self._cuts.prune(self._keep)
        except OSError as exc:
            what = (
                f"cut {number} could not be written to" if self.number != number else "old cuts cannot be deleted from"
            )
            self.ill = f"{what} {self._cuts.path}: {exc.strerror or exc}"
            log.error("%s", self.ill)  # noqa: TRY400 the sentence says all
        else:
            self.ill = None

    def _cut(self, moment: Moment) -> Cut:
        if self._store is None or moment.held is None:
            return Cut(moment.step, moment.tensors, moment.state)
        contents = self._store.contents(moment.held)
        replay = {"index": torch.from_numpy(contents.index), "payload": contents.payload}
        threshold = contents.threshold
        state = {
            "offered": contents.offered,
            "threshold": None if threshold == float("inf") else threshold,
            "watermarks": [[index, *mark] for index, mark in contents.watermarks.items()],
        }
        return Cut(moment.step, {**moment.tensors, "replay": replay}, {**moment.state, "replay": state})


def replay_contents(cut: Cut) -> Contents | None:
    """Return the store's part of a cut; None when it was made without a store."""
    if "replay" not in cut.tensors:
        return None
    tensors, state = cut.tensors["replay"], cut.state["replay"]
    return Contents(
        tensors["index"].numpy(),
        tensors["payload"],
        float("inf") if state["threshold"] is None else state["threshold"],
        state["offered"],
        {index: (offset, row) for index, offset, row in state["watermarks"]},
    )
