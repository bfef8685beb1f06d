"""Bytes that a pipeline writes to its disk, and their wear."""

from dataclasses import dataclass

import numpy as np

from anabranch.commands.plan.constants import Constants, Load
from anabranch.commands.plan.lines import Line, PlanSection, summed
from anabranch.commands.plan.segment_writes import written_events
from anabranch.commands.plan.store_size import ENTRY_BYTES, PlannedStore, admitted, held_out_bytes
from anabranch.config.pipeline import Pipeline
from anabranch.core.sizes import size_text
from anabranch.learner.settings.storage import StorageSettings
from anabranch.replay.segments import most_events
from anabranch.replay.tiers.disk_files import PAGE

DAY = 86_400.0
TOTAL = "total"
GROWING = TIER, SAVED, WAITING = "disk tier", "events in checkpoints", "events that wait for labels"
"""What may grow with the rate of events."""
_WRITEBACK_SECONDS = 30.0
"""After this time Linux writes a changed page, by default."""
_DAYS_A_YEAR = 365.0


@dataclass(frozen=True)
class DiskWrites:
    """What a pipeline writes at a rate of events."""

    pipeline: Pipeline
    constants: Constants
    load: Load
    store: PlannedStore | None

    def between(self, name: str, begin: float, end: float) -> PlanSection:
        """Return the bytes a day of each part, from second `begin` to second `end` after an empty start."""
        lines = [*self._stored(begin, end), self._checkpoints((begin + end) / 2), self._versions(), self._reports()]
        if (labels := self.pipeline.stream.labels) is not None and self.constants.row_bytes is not None:
            each = self.constants.row_bytes
            formula = f"{self.load.rate:,.0f} events a second x {each:,} B, until their labels come ({labels.wait})"
            lines.append(Line(WAITING, self.load.rate * each * DAY, "bytes/day", formula))
        return PlanSection(name, [*lines, summed(TOTAL, lines, "bytes/day")])

    @property
    def checkpoint_seconds(self) -> float:
        """Time between checkpoints."""
        return max(self.pipeline.checkpoints.every.total_seconds(), self.constants.checkpoint_seconds or 0.0)

    @property
    def publish_seconds(self) -> float:
        """Time between versions."""
        return max(self.pipeline.versions.publish_every.total_seconds(), self.constants.publish_seconds or 0.0)

    def _stored(self, begin: float, end: float) -> list[Line]:
        """Return the writes of the disk tier, and those of events in checkpoints."""
        store, rate = self.store, self.load.rate * (1 - self.pipeline.gate.holdout_fraction)
        if store is None:
            return []
        events = admitted(store, self.pipeline, rate, begin, end)
        filling = max(0.0, min(rate * end, store.events) - rate * begin)
        scale = DAY / (end - begin)
        lines = []
        if store.disk_record_bytes:
            first, last = (admitted(store, self.pipeline, rate, 0.0, moment) for moment in (begin, end))
            # Slots are reused once the checkpoints that name them are gone: until then, one after the other is written.
            kept = (self.pipeline.checkpoints.keep + 1) * (events - filling) / (end - begin) * self.checkpoint_seconds
            fresh = min(store.slots, store.events + kept)
            in_order = max(0.0, min(last, fresh) - min(first, fresh))
            written = in_order * store.disk_record_bytes
            written += self._replaced_pages(store, fresh, events - in_order, end - begin)
            formula = f"{events:,.0f} events x {store.disk_record_bytes:,} B, in pages of {PAGE:,} B that change"
            lines.append(Line(TIER, scale * written, "bytes/day", formula))
        each = ENTRY_BYTES + (0 if self.pipeline.replay.slower and self.pipeline.storage is None else store.row_bytes)
        written = each * written_events(
            lambda first, last: admitted(store, self.pipeline, rate, first, last),
            store.events,
            most_events(each - ENTRY_BYTES),
            self.checkpoint_seconds,
            begin,
            end,
        )
        formula = (
            f"{events:,.0f} events x {each:,} B, each written {written / max(1.0, events * each):.2f} times: "
            "segments are merged"
        )
        return [*lines, Line(SAVED, scale * written, "bytes/day", formula)]

    def _replaced_pages(self, store: PlannedStore, slots: float, events: float, seconds: float) -> float:
        """Return the bytes of pages that change when events are replaced at random ones of `slots` slots.

        A page that changes several times before it is written counts once.
        """
        rounds = max(1.0, seconds / min(_WRITEBACK_SECONDS, self.checkpoint_seconds))
        total = max(1.0, slots * store.disk_record_bytes / PAGE)
        record = store.disk_record_bytes
        touched = record / PAGE if record % PAGE == 0 else 1 + (record - 1) / PAGE
        return float(rounds * PAGE * total * -np.expm1(-events / rounds * touched / total))

    def _checkpoints(self, moment: float) -> Line:
        """Return the writes of checkpoints without stored events; `moment`: seconds since the start."""
        constants, every = self.constants, self.checkpoint_seconds
        if constants.checkpoint_bytes is None:
            return Line("checkpoints", None, "bytes/day", "their size was not measured")
        gate = self.pipeline.gate
        rows = min(gate.holdout_rows, int(gate.holdout_fraction * self.load.rate * moment))
        held_out = rows * held_out_bytes(self.pipeline, constants)
        bits = 0 if self.store is None else self.store.events // 8
        each = constants.checkpoint_bytes + held_out + bits
        formula = (
            f"{DAY / every:,.0f} x ({size_text(constants.checkpoint_bytes)} of state + {size_text(held_out)} "
            f"of held-out events + {size_text(bits)} of marks)"
        )
        return Line("checkpoints", each * DAY / every, "bytes/day", formula)

    def _versions(self) -> Line:
        each, every = self.constants.version_bytes, self.publish_seconds
        if each is None:
            return Line("versions", None, "bytes/day", "their size was not measured")
        return Line("versions", each * DAY / every, "bytes/day", f"{DAY / every:,.0f} x {size_text(each)}")

    def _reports(self) -> Line:
        size = self.constants.report_bytes
        formula = "not measured" if size is None else f"{size:,} B of learner.json and serving.json, once a second"
        return Line("reports, at most", None if size is None else size * DAY, "bytes/day", formula)


def wear(day: Line, load: Load) -> list[Line]:
    """Return the life of a drive; none where its rating is not given."""
    if load.drive_tbw is None:
        return []
    years = None if not day.value else load.drive_tbw * 1e12 / day.value / _DAYS_A_YEAR
    return [Line("life of the drive", years, "years", f"{load.drive_tbw:g} TB / ({day.text} x 365)")]


def uploads(storage: StorageSettings | None, day: PlanSection) -> PlanSection | None:
    """Return the traffic to the object store: at most each checkpoint and version once; None without one."""
    if storage is None:
        return None
    names = (SAVED, "checkpoints", "versions")
    lines = [line for line in day.lines if line.name in names]
    return PlanSection(f"traffic to {storage.url}, at most", [*lines, summed(TOTAL, lines, "bytes/day")])
