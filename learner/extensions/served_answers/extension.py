"""Measures each version by what it has really answered, as labels come. Legend: n rows of a call.

Nothing is counted twice: answers that wait, outcomes and the positions in the topic are in checkpoints together.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.ingest.events.block import Array, Outcome, SkipReason
from anabranch.ingest.events.identity import partition_base
from anabranch.ingest.events.partition import latest_incarnations
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.part_formats import Covers
from anabranch.learner.evaluate.measures import Estimate, Measure, Outcomes
from anabranch.learner.evaluate.outcomes import Estimates, predicted_by
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.served_answers.join import PARTS, AnswerJoin, Rows
from anabranch.learner.extensions.served_answers.topic import AnswerDecoder, AnswersReader, ReadAnswers
from anabranch.learner.extensions.served_answers.watch import ServedWatch
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.status.report import LiveReport, ServedReport
from anabranch.learner.stream.batch import Batch
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.versions.gate import QualityGate

_EVERY_SECONDS = 0.5
_SHARE = 50
"""Estimates take at most 1 / `_SHARE` of a processor, in the reader's thread."""
_ALL = "all"
_MOST_ALL, _REPORTED = 5000, 8
_KEPT = ("partition", "offset", "row", "key_hash", "group_hash")
_HELD_OUT, _NONE = np.uint8(Outcome.HELD_OUT), np.uint8(SkipReason.NONE)


class ServedAnswers(Extension):
    """Joins the answers in a topic with late labels. The loop's thread calls its methods."""

    name = "served_answers"

    def __init__(self, spec: PipelineSettings, schema: Schema, gate: QualityGate) -> None:
        """`gate`: of a task that has measures."""
        measures = gate.scorer.measures
        answers, labels, kind = spec.measured_answers, spec.stream.labels, measures.kind
        assert answers is not None
        assert labels is not None
        assert kind is not None
        outputs = 1 if kind == "number" else schema.label.classes or 1
        self._measures, self._outputs = measures, outputs
        self.watch = ServedWatch(gate, self._outcomes_of, lambda: self._outcomes)
        """The extension that comes next to this one."""
        self._join = AnswerJoin(schema.label, outputs)
        decoder = AnswerDecoder(kind, outputs)
        self._reader = AnswersReader(spec.stream, answers.output, labels.wait, decoder, self._estimate)
        self._estimates = Estimates((), measures.each.values(), _SHARE)
        self._outcomes: Rows = self._join.outcomes
        """What the reader's thread measures; replaced, not changed."""
        self._waiting, self._decided = list[dict[str, Array]](), list[dict[str, Array]]()
        self._due = 0.0
        self._ledger = Ledger()
        self._bases, self._of_topic = np.empty(0, np.uint64), np.empty(0, np.bool_)
        """By the index of the partition; what is not of a topic is of a file, whose events are not answered."""
        self._unreadable = 0
        """Messages of the processes before."""

    @override
    def attach(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @override
    def settle(self, batch: Batch) -> None:
        if batch.waiting:
            self._waiting.append({name: np.array(batch.waiting[name]) for name in _KEPT})
        if (decided := batch.decided) is not None:
            columns, ended = decided.span.columns, decided.ended
            held_out = columns["outcome"] == _HELD_OUT
            labelled = (decided.scored | held_out) & (columns["reason"] == _NONE)
            found = {name: columns[name] for name in (*_KEPT, "time_ms")}
            own = decided.predictions[:, : self._outputs]
            found |= {"label": decided.label, "labelled": labelled, "own": own}
            self._decided.append({name: column[ended] for name, column in found.items()})

    @override
    def run_if_due(self) -> None:
        self._reader.start()
        if time.monotonic() >= self._due:
            self._update()
            self._due = time.monotonic() + _EVERY_SECONDS

    @override
    def events(self) -> Mapping[str, Array]:
        self._update()
        return self._join.columns()

    @override
    def restore_events(self, events: Mapping[str, Array]) -> None:
        self._join.restore(events, time.monotonic())
        self._outcomes = self._join.outcomes

    @override
    def state(self) -> Any:
        return {
            "positions": sorted(self._reader.positions.items()),
            "counts": self._counts,
            "parts": [self._join.part, self._join.least_part],
        }

    @override
    def restore(self, state: Any) -> None:
        self._reader.restore(dict(state["positions"]))
        counts = dict(state["counts"])
        self._unreadable = counts.pop("unreadable")
        self._join.counts.update(counts)
        self._join.part, self._join.least_part = state["parts"]

    @override
    def erase(self, covers: Covers) -> int:
        self._update()
        self._join.erase(covers)
        self._outcomes = self._join.outcomes
        return 0

    @property
    @override
    def problem(self) -> str | None:
        return self._reader.problem

    @property
    @override
    def warning(self) -> str | None:
        counts = self._counts
        bad, late, matched = (counts.get(name, 0) for name in ("unreadable", "late", "matched"))
        if bad > matched:
            return f"{bad:,} messages of the topic of answers are no answers of this task: let only servers write to it"
        if late > matched:
            return (
                f"{late:,} answers were written after the labels of their events had come, and are not measured: "
                "servers are behind, or record times of labels are wrong"
            )
        return None

    @override
    def report(self) -> Mapping[str, LiveReport]:
        rows, found = self._outcomes, self._estimates.now
        reports = {}
        for window in _windows(rows):
            each = {measure: estimate for (measure, of), estimate in found.items() if of == window}
            reports[window] = ServedReport(
                rows=len(_of_window(rows, window)),
                value={name: estimate.value for name, estimate in each.items()},
                lower={name: estimate.low for name, estimate in each.items()},
                upper={name: estimate.high for name, estimate in each.items()},
            )
        join = self._join
        report = LiveReport(served=reports, answers=self._counts, waiting=len(join.rows), part=join.part / PARTS)
        return {"live": report}

    @override
    def close(self) -> None:
        self._reader.stop()

    @property
    def _counts(self) -> dict[str, int]:
        return {**self._join.counts, "unreadable": self._unreadable + self._reader.unreadable}

    def _update(self) -> None:
        """Join what has come since the last call: events, then answers, then labels."""
        ledger, join = self._ledger, self._join
        if not ledger.partitions:
            return
        if len(self._bases) < len(ledger.partitions):
            self._bases = np.array([partition_base(each.name) for each in ledger.partitions], np.uint64)
            self._of_topic = np.array([not each.name.history for each in ledger.partitions])
        for columns in self._joined(self._waiting):
            join.add_events(columns, self._bases[columns["partition"]])
        read_until = float("-inf")
        if self._of_topic.any():  # else answers wait for the end of the history
            answers, read_until = self._reader.take()
            self._add_answers(answers)
        for columns in self._joined(self._decided):
            labelled = columns["labelled"].astype(np.bool_)
            join.decide(columns, self._bases[columns["partition"]], labelled, time.monotonic())
        self._waiting, self._decided = [], []
        first_open = np.array([each.position.offset for each in ledger.partitions], np.int64)
        for index, offset in ledger.first_open().items():
            first_open[index] = min(first_open[index], offset)
        join.settle(first_open, read_until)
        self._outcomes = join.outcomes

    def _joined(self, parts: list[dict[str, Array]]) -> list[dict[str, Array]]:
        """Return the columns of several parts as one, of events of topics alone; none where there is no part."""
        if not parts:
            return []
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        of_topic = self._of_topic[columns["partition"]]
        return [columns if of_topic.all() else {name: column[of_topic] for name, column in columns.items()}]

    def _add_answers(self, parts: list[ReadAnswers]) -> None:
        indexes = latest_incarnations(each.name for each in self._ledger.partitions)
        for part in parts:
            index = np.array([indexes.get(source, -1) for source in part.source], np.int32)
            known = index >= 0
            self._join.counts["unmatched"] += int(np.count_nonzero(~known))
            columns: dict[str, Array] = {
                "partition": index,
                "offset": np.array(part.offset, np.int64),
                "row": np.array(part.row, np.int32),
                "version": np.array(part.version, np.int64),
                "answered_ms": np.array(part.time_ms, np.int64),
                "output": part.output_NK,
            }
            if known.any():
                found = {name: column[known] for name, column in columns.items()}
                self._join.add_answers(found, self._bases[index[known]])

    def _estimate(self) -> None:
        """Renew the estimates; called by the reader's thread."""
        rows = self._outcomes
        self._estimates.follow(_windows(rows))
        self._estimates.renew(lambda window, measure: self._measure(_of_window(rows, window), measure))

    def _measure(self, rows: Rows, measure: Measure) -> Estimate | None:
        if not len(rows) or (measure.grouped and self._join.least_part < PARTS):  # groups lack events
            return None
        return measure.estimate(self._outcomes_of(rows, "output"))

    def _outcomes_of(self, rows: Rows, field: str) -> Outcomes:
        kind = self._measures.kind
        assert kind is not None
        with torch.no_grad():
            output, label = (torch.from_numpy(np.ascontiguousarray(rows[name])) for name in (field, "label"))
            predicted = predicted_by(kind, output, label).numpy()
        return self._measures.outcomes(predicted, {"label": rows["label"], "group_hash": rows["group_hash"]})


def _windows(rows: Rows) -> list[str]:
    """Return `all`, and the newest versions of which there are outcomes."""
    return [_ALL, *map(str, np.unique(rows["version"])[-_REPORTED:].tolist())] if len(rows) else []


def _of_window(rows: Rows, window: str) -> NDArray[np.void]:
    return rows[-_MOST_ALL:] if window == _ALL else rows[rows["version"] == int(window)]
