"""Events and their labels in two topics, and a learner that joins them: its rate, and how fresh its versions are."""

import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.ingest.events.block import Array
from anabranch.ingest.kafka.producer import EventProducer
from anabranch.learner.status.report import LearnerReport
from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.pipeline import (
    LearnerProcess,
    Stream,
    broker,
    make_topic,
    messages,
    packed,
    pipeline,
    schema_of,
)
from benchmarks.harness.results import Form, Results
from benchmarks.harness.server import ServingProcess
from benchmarks.harness.serving_freshness import AskedStream

MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
_LABEL = np.dtype([("y", "<i8"), ("id", "<i8")])
_BATCH, _STORED = 128, 10_000
_POOL = 2_000
_AHEAD = 250
"""A label follows this many events after its own: half a second."""
_WARM_UP = 2.0
_LAG, _AHEAD_ROWS, _WARM_UP_ROWS = 4_000, 16_000, 16_000
"""Of `rate`, in events: how far labels are behind, how far the stream is ahead of the learner, and the warm-up. The
learner reports twice a second."""


def rate(results: Results, *, form: Form) -> None:
    """Measure the events a second that a learner trains on, with labels in another topic and in the events."""
    rows, rounds = ((2_000, 1), (20_000, 1), (60_000, 5))[form]
    results.title(
        f"rate: {rows} events, each with its label in another topic {_LAG} events later, and with its label; an MLP of "
        "a million parameters"
    )
    events = _events(_WARM_UP_ROWS + rows + _AHEAD_ROWS)
    arms = {"plain": lambda: _rate(events, rows, late=False), "late": lambda: _rate(events, rows, late=True)}
    rates = interleave(arms, rounds, warm_up=1 if form is Form.LONG else 0)
    results.add("late_over_plain", ratio(rates["late"], rates["plain"]), "events a second, in turns")
    results.add("late_events_per_second", Spread.of(rates["late"]))
    results.add("plain_events_per_second", Spread.of(rates["plain"]))


def freshness(results: Results, bootstrap: str, *, form: Form) -> None:
    """Measure the seconds from the append of a label to a prediction by a version that has learned from it."""
    seconds = (0.5, 4.0, 120.0)[form]
    results.title("freshness: 500 events a second, each label half a second later, a version every 250 ms")
    topics = _Topics(bootstrap)
    with tempfile.TemporaryDirectory(dir=".", prefix="fresh-") as folder, topics.senders() as (events, labels):
        root = Path(folder).resolve()
        sections = {
            "stream": {"labels": {"topics": [topics.labels], "wait": "60s"}},
            "learner": {"max_delay": "50ms"},
            "versions": {"publish_every": "250ms", "keep": 20},
            "checkpoints": {"every": "30s"},
            "gate": {"holdout_fraction": 0.01},
        }
        document = pipeline(topics.stream, MLP, 0, sections) | {"serving": {"port": 0, "device": "cpu"}}
        sender: Any = _LabelsAfterEvents(events, labels)
        with (
            LearnerProcess(root, document) as learner,
            ServingProcess(root) as server,
            AskedStream(sender, [b""], topics.labels, model=topics.stream.topic) as asked,
        ):
            learner.wait_for(lambda report: report.version is not None and _keeps_up(report))
            address = server.wait().address
            time.sleep(_WARM_UP)
            taken, failed = asked.ask(address, seconds)
    delays = np.array(taken)
    results.add("label_freshness_p99_seconds", float(np.percentile(delays, 99)), f"of {len(delays)} requests")
    results.add("label_freshness_p50_seconds", float(np.percentile(delays, 50)))
    results.add("label_freshness_failed", float(failed))


class _Topics:
    """A topic of events, and one of labels; each has one partition."""

    def __init__(self, bootstrap: str) -> None:
        described = schema_of({"x": np.zeros((1, 784), np.float32)}, 10) | {"key": {"name": "id"}}
        name = f"late-{uuid.uuid4().hex[:8]}"
        self.stream = Stream(bootstrap, name, described, 0)
        self.labels = f"{name}-labels"
        self._to_events = make_topic(self.stream)
        self._to_labels = make_topic(Stream(bootstrap, self.labels, described, 0))

    @contextlib.contextmanager
    def senders(self) -> Iterator[tuple[EventProducer, EventProducer]]:
        """Producers into both topics."""
        events, labels = EventProducer(self._to_events, self.stream.topic), EventProducer(self._to_labels, self.labels)
        for each in (events, labels):
            each.open()
        try:
            yield events, labels
        finally:
            for each in (events, labels):
                each.flush()
                each.close()


class _LabelsAfterEvents:
    """Sends a label with each call of `send`, and the event that is some ahead; never the same key twice."""

    def __init__(self, events: EventProducer, labels: EventProducer) -> None:
        self._events, self._labels = events, labels
        self._rows, self._number = _events(_POOL), 0
        for number in range(_AHEAD):
            self._send_event(number)

    def send(self, _: bytes) -> None:
        """Send an event, and the label of an earlier one."""
        self._send_event(self._number + _AHEAD)
        label = np.zeros(1, _LABEL)
        label["y"], label["id"] = self._rows["y"][self._number % _POOL], self._number + 1
        self._labels.send(label.tobytes())
        self._number += 1

    def _send_event(self, number: int) -> None:
        row = self._rows[number % _POOL].copy()
        row["y"], row["id"] = -1, number + 1
        self._events.send(row.tobytes())


def _events(rows: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(0)
    columns: Mapping[str, Array] = {"x": generator.random((rows, 784), np.float32)}
    described = schema_of(columns, 10) | {"key": {"name": "id"}}
    events = packed(described, columns, generator.integers(0, 10, rows))
    events["id"] = np.arange(1, rows + 1)
    return events


def _labels(events: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    labels = np.zeros(len(events), _LABEL)
    for name in ("y", "id"):
        labels[name] = events[name]
    return labels


def _rate(events: np.ndarray[Any, Any], rows: int, *, late: bool) -> float:
    """Return the events a second that a new learner trains on, over `rows` events after a warm-up.

    It is never more than `_AHEAD_ROWS` behind, and does not wait for events. With `late` each label comes `_LAG` events
    after its own: neither are all labels there when the learner begins, nor do all events come before the first label.
    """
    with broker(None) as bootstrap, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        topics = _Topics(bootstrap)
        document = pipeline(topics.stream, MLP, 0, _sections(topics.labels if late else None))
        to_events, to_labels = stack.enter_context(topics.senders())
        learner = stack.enter_context(LearnerProcess(Path(folder), document))
        send = _sends(events, to_events, to_labels if late else None)

        def reaches(count: int) -> Callable[[LearnerReport], bool]:
            def keep_ahead(report: LearnerReport) -> bool:
                send(_ended(report) + _AHEAD_ROWS)
                return _ended(report) >= count

            return keep_ahead

        send(_AHEAD_ROWS)
        first = learner.wait_for(reaches(_WARM_UP_ROWS))
        last = learner.wait_for(reaches(_ended(first) + rows))
    return (_ended(last) - _ended(first)) / (last.time - first.time)


def _sends(
    events: np.ndarray[Any, Any], to_events: EventProducer, to_labels: EventProducer | None
) -> Callable[[int], None]:
    """Return a function that sends events up to a number of them; to `to_labels` their labels, `_LAG` events later."""
    rows = events.copy()
    if to_labels is not None:
        rows["y"] = -1
    of_events = messages(rows)
    sent = labelled = 0

    def send(count: int) -> None:
        nonlocal sent, labelled
        while sent < min(count, len(rows)):
            message = next(of_events)
            to_events.send(message)
            sent += len(message) // rows.dtype.itemsize
            if to_labels is not None and sent - _LAG > labelled:
                to_labels.send(_labels(events[labelled : sent - _LAG]).tobytes())
                labelled = sent - _LAG

    return send


def _sections(labels: str | None) -> dict[str, Any]:
    """Return the settings of a learner; `labels`: the topic of labels, None if events have theirs."""
    sections: dict[str, Any] = {
        # The embedded broker ignores the limit of a fetch and returns all messages.
        "stream": {"properties": {"receive.message.max.bytes": 2**30}},
        "learner": {"batch_size": _BATCH, "max_delay": "50ms", "replay_ratio": 1.0},
        "replay": {"capacity": _STORED},
        "versions": {"publish_every": "1s", "keep": 20},
        "gate": {"holdout_fraction": 0.01},
    }
    if labels is not None:
        sections["stream"]["labels"] = {"topics": [labels], "wait": "1h"}
    return sections


def _keeps_up(report: LearnerReport) -> bool:
    """Return whether the learner has learned from all labels up to a second ago."""
    return all(part.trained_through >= part.end - 500 for part in report.partitions.values())


def _ended(report: LearnerReport) -> int:
    """Return how many events were trained on or held out."""
    counts = report.outcomes if report.labels is None else report.labels.ended
    return counts.get("trained", 0) + counts.get("held_out", 0)
