"""Makes cuts: a snapshot at a step boundary, everything else in the background."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.background import Background
from learner.config import CutsSettings
from learner.cut import Cut, Cuts
from learner.deadline import Deadline
from learner.metrics import LearnerMetrics
from replay.contents import ENTRY, Contents, PlannedRows, TierFile
from replay.store import Held, Store

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
        self._holding = False
        self.number = self._highest = max(cuts.numbers(), default=0)
        """The newest cut; numbers only grow."""
        self.ill: str | None = None
        """One sentence when the last cut could not be written."""

    def cut_if_due(self, take: Callable[[int], Moment]) -> None:
        """Begin a cut when one is due; one that falls due while another is written waits for it.

        A store whose slots wait for cuts gets one early when many do. When it runs out of slots to fill, this waits
        for cuts, and says so in the metrics, unless they cannot be written: then the store declines events.
        """
        self._end()
        if not self._background.busy and (time.monotonic() >= self._due or self._many_slots_wait()):
            self._due = time.monotonic() + self._every
            self._begin(take)
        if self._store is not None and self._store.slots.free < self._store.burst:
            begin = time.perf_counter()
            self._free_slots(self._store, take)
            self._metrics.cut_stall.inc(time.perf_counter() - begin)

    def _many_slots_wait(self) -> bool:
        """Whether it is time for a cut that lets the store write slots again, after `keep` more."""
        return self._store is not None and self._store.slots.waiting * (self._keep + 2) > self._store.spare

    def _free_slots(self, store: Store, take: Callable[[int], Moment]) -> None:
        """Cut until the store has slots to fill; `keep` cuts free all that can be freed."""
        for _ in range(self._keep + 1):
            self._background.wait()
            self._end()
            if store.slots.free >= store.burst or self.ill is not None:
                return
            self._begin(take)

    def cut_last(self, take: Callable[[int], Moment], deadline: Deadline) -> None:
        """Cut once more, and wait until it is written."""
        self._background.wait(deadline)
        self._end()
        if not self._background.busy:
            self._begin(take)
            self._background.wait(deadline)
            self._end()

    def _begin(self, take: Callable[[int], Moment]) -> None:
        number = self._highest = self._highest + 1  # a number that failed is not used again
        moment = take(number)
        self._holding = self._store is not None
        self._background.start(lambda: self._write(number, moment))

    def _end(self) -> None:
        """Let the store write slots again once the cut is written, or has failed."""
        if not self._background.busy and self._holding and self._store is not None:
            self._holding = False
            self._store.let_go(min(self._cuts.numbers(), default=None))
        self._background.raise_bug()

    def _write(self, number: int, moment: Moment) -> None:
        """Write and prune. A full or read-only disk costs this cut, never the training nor the cuts before."""
        try:
            begin = time.perf_counter()
            self._cuts.write(number, self._cut(moment), time.time())
            self._metrics.cut.observe(time.perf_counter() - begin)  # not of one that failed: the count is of whole cuts
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
        tensors, state = _packed(self._store.contents(moment.held))
        return Cut(moment.step, {**moment.tensors, "replay": tensors}, {**moment.state, "replay": state})


def _packed(contents: Contents) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a store's contents as the tensors and the values of a cut."""
    index = contents.index
    tensors = {
        "index": torch.from_numpy(index.view(np.uint8).reshape(len(index), ENTRY.itemsize)),
        "retired": torch.from_numpy(contents.retired),
        **({} if contents.payload is None else {"payload": contents.payload}),
        **{f"plan.{plan.step}": plan.rows for plan in contents.plans},
    }
    state = {
        "cut": contents.cut,
        "file": None if contents.file is None else [contents.file.name, contents.file.id],
        "offered": contents.offered,
        "threshold": _finite(contents.threshold),
        "watermarks": [[partition, *mark] for partition, mark in contents.watermarks.items()],
        "plans": [[plan.step, _finite(plan.threshold), plan.share] for plan in contents.plans],
    }
    return tensors, state


def replay_contents(cut: Cut) -> Contents | None:
    """Return the store's part of a cut; None when it was made without a store."""
    if "replay" not in cut.tensors:
        return None
    tensors, state = cut.tensors["replay"], cut.state["replay"]
    return Contents(
        cut=state["cut"],
        index=tensors["index"].numpy().reshape(-1).view(ENTRY),
        payload=tensors.get("payload"),
        file=None if state["file"] is None else TierFile(*state["file"]),
        retired=tensors["retired"].numpy(),
        threshold=_threshold(state["threshold"]),
        offered=state["offered"],
        watermarks={index: (offset, row) for index, offset, row in state["watermarks"]},
        plans=[
            PlannedRows(step, tensors[f"plan.{step}"], _threshold(threshold), share)
            for step, threshold, share in state["plans"]
        ],
    )


def _finite(threshold: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(threshold) else threshold


def _threshold(value: float | None) -> float:
    return math.inf if value is None else value
