"""What happened to a pipeline, as marks on the time axis: swaps, refused versions, drift, restarts and others."""

from collections import deque
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Literal, get_args

import msgspec

from anabranch.learner.settings.search import shown
from anabranch.learner.status.report import LearnerReport, SearchReport, UndoReport
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.rollout.version_list import VersionLine

EventKind = Literal["swap", "refused", "drift", "restart", "checkpoint", "lag", "undo", "search"]
KINDS: tuple[EventKind, ...] = get_args(EventKind)

KEPT = 200
"""Events of each kind that are kept: frequent swaps do not push out a rare drift."""
_REMEMBERED = 1000
MERGE_SECONDS = 10.0
"""Two events of a kind within this time become one with a count."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event, or some of one kind that followed each other closely."""

    kind: EventKind
    time: float
    """Seconds since 1970, of the first."""
    until: float
    """Of the last; for `lag`, as long as the lag policy holds; for `undo`, until the stream is learned again."""
    count: int = 1
    text: str
    """One sentence on the last of them."""


class EventLog:
    """The newest events of each kind, in fixed memory. Any thread may call."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: dict[EventKind, deque[Event]] = {kind: deque(maxlen=kept) for kind in KINDS}
        self._lock = Lock()

    def add(self, kind: EventKind, time: float, text: str) -> None:
        """Add an event, merged with the one before it of its kind where that is at most ten seconds older."""
        self._record(kind, time, text, 1)

    def extend(self, kind: EventKind, time: float, text: str) -> None:
        """Let the newest event of a kind last until `time`; add one where there is none to go on."""
        self._record(kind, time, text, 0)

    def _record(self, kind: EventKind, time: float, text: str, more: int) -> None:
        with self._lock:
            events = self._events[kind]
            last = events[-1] if events else None
            if last is None or not 0 <= time - last.until <= MERGE_SECONDS:
                events.append(Event(kind=kind, time=time, until=time, text=text))
            else:
                events[-1] = msgspec.structs.replace(last, until=time, count=last.count + more, text=text)

    def since(self, time: float) -> list[Event]:
        """Return the events that ended at `time` or later, by the time at which they began."""
        with self._lock:
            events = [event for events in self._events.values() for event in events if event.until >= time]
        return sorted(events, key=lambda event: event.time)


class EventDetector:
    """Finds events by comparing each report with the one before. Used by one thread."""

    def __init__(self, log: EventLog, began: float) -> None:
        """Compare from `began` on, in seconds since 1970: what happened before is no event."""
        self._log = log
        self._began = began
        self._learner: LearnerReport | None = None
        self._serving: ServingReport | None = None
        self._refused: set[int] = set()

    def update(
        self, now: float, learner: LearnerReport | None, serving: ServingReport, versions: Sequence[VersionLine]
    ) -> None:
        """Add what happened since the last call."""
        if learner is not None:
            self._update_learner(now, learner)
        before, self._serving = self._serving, serving
        if serving.version is not None and (before is None or before.version != serving.version):
            self._log.add("swap", serving.version_since or now, f"Version {serving.version} was swapped in.")
        self._update_refused(now, versions)

    def _update_learner(self, now: float, learner: LearnerReport) -> None:
        before, self._learner = self._learner, learner
        if before is not None and learner.started != before.started:
            self._log.add("restart", learner.started, "The learner was restarted.")
        elif before is not None and learner.drifts > before.drifts:
            step = "" if learner.drift_step is None else f" at step {learner.drift_step:,}"
            self._log.add("drift", learner.time, f"The stream drifted{step}.")
        if learner.search is not None and before is not None and before.search is not None:
            self._update_search(learner.time, before.search, learner.search)
        if learner.checkpoint is not None and (before is None or learner.checkpoint != before.checkpoint):
            time = learner.time if learner.checkpoint_time is None else learner.checkpoint_time
            if time >= self._began:
                self._log.add("checkpoint", time, f"Checkpoint {learner.checkpoint} was written.")
        if learner.behind:
            self._log.extend("lag", now, "The learner lags, and the lag policy holds.")
        self._update_undo(now, learner.undo, None if before is None else before.undo, began=before is None)

    def _update_undo(self, now: float, undo: UndoReport | None, before: UndoReport | None, *, began: bool) -> None:
        """Let an undo last until it is over; `began`: there was no report before this one."""
        if undo is None:
            return
        without = f"undo {undo.number}, without {undo.offsets:,} offsets"
        if undo.left:
            self._log.extend("undo", now, f"The learner learns again from checkpoint {undo.checkpoint}: {without}.")
        elif not began and (before is None or before.left or before.number != undo.number):
            self._log.extend("undo", now, f"The stream was learned again: {without}.")

    def _update_search(self, time: float, before: SearchReport, search: SearchReport) -> None:
        known = {each.number for each in before.history}
        for each in search.history:
            if each.outcome in ("promoted", "better") and each.number not in known:
                then = "its settings are the model's now" if each.outcome == "promoted" else "it waits for promote"
                gain = f"by {each.difference:+.4f} over {each.steps:,} steps"
                what = f"Challenger {each.number} with {shown(each.values)} is better"
                self._log.add("search", time, f"{what}, {gain}: {then}.")

    def _update_refused(self, now: float, versions: Iterable[VersionLine]) -> None:
        refused = {line.number: line for line in versions if line.fate in ("refused", "rolled back")}
        for number in sorted(refused.keys() - self._refused):
            line = refused[number]
            # A version can be withdrawn or rejected long after it was published.
            recent = line.time is None or now - line.time <= MERGE_SECONDS
            time = line.time if recent and line.time is not None else now
            if time >= self._began and (line.time is None or line.time >= self._began):
                what = "refused" if line.fate == "refused" else "rejected by a person"
                reason = f": {line.reason}" if line.reason else ""
                self._log.add("refused", time, f"Version {number} was {what}{reason}.")
        self._refused = set(sorted(self._refused | refused.keys())[-_REMEMBERED:])
