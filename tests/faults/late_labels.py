"""Random SIGKILLs of the learner while events wait for labels, compared with a join of both topics offline.

The flights from New York with their true delays: an event when a prediction is due, a label when the flight has landed.
Record times are those of the flights, faster by SPEED; both topics are shuffled within SHUFFLED_HOURS. Some labels
never come, come after the wait, come twice, or belong to no event.

The accounting model has one weight for each event and class. The loss is minus that of the label, the optimizer SGD
with learning rate 1, so that each trained event adds exactly 1. At the end the weights are those of the offline join:
the class of the label, or class 0 where none came in time.
"""

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from confluent_kafka import Producer
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.kafka.producer import create_topics
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.status.report import LearnerReport
from benchmarks.harness import data
from tests.faults.figures import Figures
from tests.faults.kills import LEARNER, accounts
from tests.faults.pipeline import PATIENCE_SECONDS, Pipeline, StuckError, Supervised

CODE = """
import torch
from torch import nn
from anabranch.learner.model.task import Classification

class Accounts(nn.Module):
    def __init__(self, events):
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(events, 3))

    def forward(self, id):
        output = self.learned[id]
        if output.requires_grad:
            output.register_hook(torch.sign)  # a mean over the step's events becomes a sum
        return output

class MinusTheWeight(Classification):
    def loss(self, output_B, label_B):
        return -output_B.gather(1, label_B[:, None])[:, 0]

def build(events):
    return Accounts(events)
"""
TEXT = (
    """
{{stream}}
format = "rows"
[stream.labels]
topics = ["{labels}"]
wait = "{wait:.0f}ms"
unmatched = "negative"
bytes = "1GB"
[schema.features.id]
dtype = "int64"
[schema.label]
name = "y"
classes = 3
[schema.key]
name = "flight"
"""
    + LEARNER
)
PARTITIONS = 4
SPEED = 250
"""So that three years end within five days, which brokers keep."""
WAIT_HOURS, SHUFFLED_HOURS = 12.0, 3.0
"""Before division by SPEED."""
NO_LABEL, TWICE, STRANGERS = 0.03, 0.02, 0.01
_EVENT = np.dtype([("id", "<i8"), ("y", "<i8"), ("flight", "<i8")])
_LABEL = np.dtype([("y", "<i8"), ("flight", "<i8")])
_STEP_SECONDS, _STEP_SECONDS_OF_AN_EVENT, _LIFE_SECONDS = 0.001, 6e-9, 2.0
"""Approximate duration of a step, which updates the weights of all events, and of the training between two kills."""
_LEAST_A_SECOND = 200
"""Events a second on a slow machine."""


@dataclass(frozen=True)
class Messages:
    """The messages of a topic in their order: values of one row, and record times in ms."""

    rows: np.ndarray[tuple[int], np.dtype[np.void]]
    time_ms: NDArray[np.int64]


@dataclass(frozen=True)
class Flights:
    """Both topics, and what an offline join of them returns.

    Attributes:
        events: their messages.
        labels: likewise.
        expected: the class of each event's label, or 0 where none comes in time, int64 `[N]`.
    """

    events: Messages
    labels: Messages
    expected: NDArray[np.int64]


@dataclass(frozen=True)
class Joined:
    """The outcome of a stream.

    Attributes:
        kills: number of kills before the stream had ended.
        early: those before the first step since the start.
        differs: events that were not trained on with the class of the offline join.
        twice: events that were trained on more than once.
        other: weights that are no whole number of at least 0.
        exact: whether each waiting event has ended with one outcome.
        timed_out: events of the offline join without a label.
    """

    kills: int
    early: int
    differs: int
    twice: int
    other: int
    exact: bool
    timed_out: int
    seconds: float


def flights(events: int, seed: int, folder: Path | None = None, *, now: float | None = None) -> Flights:
    """Return the first `events` flights as messages; those of the year follow again after its end."""
    generator, arrays = np.random.default_rng(seed), data.load("nycflights", folder)
    year, index = 365 * 86_400.0, np.arange(events)
    of_year = index % len(arrays["t"])
    due = arrays["t"][of_year] + year * (index // len(arrays["t"]))
    delay = (arrays["t_label"] - arrays["t"])[of_year]
    wait, shuffled = WAIT_HOURS * 3600, SHUFFLED_HOURS * 3600
    # Of labels so near the end of the wait, the shuffling decides whether they come in time.
    comes = (generator.random(events) >= NO_LABEL) & ((delay <= wait - 2 * shuffled) | (delay > wait + shuffled))
    label = 1 + (arrays["delay"][of_year] > 15).astype(np.int64)
    expected = np.where(comes & (delay <= wait), label, 0)
    end = (time.time() if now is None else now) - 3600
    landed = due + delay
    first = end - (max(due.max(), landed.max()) - due.min()) / SPEED

    def messages(rows: Array, at: NDArray[np.float64]) -> Messages:
        order = np.argsort(at + generator.uniform(0, shuffled, len(at)), kind="stable")
        return Messages(rows[order], ((first + (at[order] - due.min()) / SPEED) * 1000).astype(np.int64))

    sent = np.concatenate([index[comes], index[comes & (generator.random(events) < TWICE)]])
    strangers = generator.choice(events, int(events * STRANGERS), replace=False)
    rows = np.zeros(events, _EVENT)
    rows["id"], rows["y"], rows["flight"] = index, -1, index + 1
    labels = np.zeros(len(sent) + len(strangers), _LABEL)
    labels["y"] = np.concatenate([label[sent], label[strangers]])
    labels["flight"] = np.concatenate([sent + 1, -1 - strangers])
    return Flights(messages(rows, due), messages(labels, landed[np.concatenate([sent, strangers])]), expected)


def killed_while_events_wait(
    folder: Path, bootstrap: str, stream: Flights, kills: int, checkpoint_every: str, seed: int
) -> Joined:
    """Train on a stream that is complete before the start, while the learner is killed up to `kills` times.

    Two kills of three are at a random time in the second after another part of the events has ended, the others during
    the start that follows a kill.
    """
    dice, events = random.Random(seed), len(stream.expected)
    step = _STEP_SECONDS + events * _STEP_SECONDS_OF_AN_EVENT
    batch = max(2, round(events * step / (max(1, kills) * _LIFE_SECONDS)))
    topics = [f"{name}-{uuid.uuid4().hex[:8]}" for name in ("flights", "landings")]
    for topic, messages in zip(topics, (stream.events, stream.labels), strict=True):
        settings = StreamSettings(bootstrap_servers=bootstrap, topics=(topic,))
        create_topics(settings, {topic: PARTITIONS, f"{topic}.dead": 1})
        _send(bootstrap, topic, messages)
    wait_ms = WAIT_HOURS * 3_600_000 / SPEED
    text = TEXT.format(events=events, batch=batch, checkpoint_every=checkpoint_every, labels=topics[1], wait=wait_ms)
    pipeline = Pipeline(folder, bootstrap, topics[0], CODE, text)
    begin, done, early, patience = time.monotonic(), 0, 0, PATIENCE_SECONDS + events / _LEAST_A_SECOND
    with Supervised(pipeline) as learner:
        while done < kills and _ended(pipeline.report()) < events:
            pid, at_start = learner.pid(), dice.random() < 1 / 3
            if not at_start:
                part = events * done // (kills + 1)
                what = f"{part} events that have ended"
                learner.wait_for(lambda report, part=part: _ended(report) > part, what, patience=patience)
            time.sleep(dice.uniform(0.0, 3.0 if at_start else 1.0))
            report = pipeline.report()
            early += report is None or report.pid != pid or report.steps_since_start == 0
            learner.kill()
            done += 1
            learner.until(lambda pid=pid: learner.supervisor.pids().get("learner", pid) != pid, "another learner")
        last = learner.wait_for(lambda report: _ended(report) >= events, "an end for every event", patience=patience)
    weights = accounts(pipeline)
    expected = np.zeros_like(weights)
    expected[np.arange(events), stream.expected] = 1
    return Joined(
        kills=done,
        early=early,
        differs=int((weights != expected).any(axis=1).sum()),
        twice=int((weights.sum(axis=1) > 1).sum()),
        other=int(((weights != weights.round()) | (weights < 0)).sum()),
        exact=_exact(last, events, len(stream.labels.rows)),
        timed_out=int((stream.expected == 0).sum()),
        seconds=time.monotonic() - begin,
    )


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `late_labels`."""
    del minutes
    events, kills = (20_000, 3) if quick else (1_000_000, 100)
    figures.part("late_labels", f"up to {kills} SIGKILLs while {events:,} flights wait for their labels")
    joined = killed_while_events_wait(folder, bootstrap, flights(events, seed=0), kills, "1s", seed=int(time.time()))
    remark = f"{joined.early} of them before a first step; {joined.seconds:.0f} s; {joined.timed_out} events time out"
    figures.add("late_labels_kills", joined.kills, remark)
    figures.add("joined_differs", joined.differs, "events with another class than by an offline join")
    figures.add("twice_with_late_labels", joined.twice)
    figures.add("late_labels_exact", joined.exact and joined.other == 0)


def _send(bootstrap: str, topic: str, messages: Messages) -> None:
    """Write messages of one row with their record times, each to a random partition."""
    generator = np.random.default_rng(len(messages.rows))
    failed: list[str] = []
    report: Callable[..., None] = lambda error, _: failed.append(str(error)) if error is not None else None  # noqa: E731
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 50, "enable.idempotence": True})
    partitions = generator.integers(PARTITIONS, size=len(messages.rows)).tolist()
    for row, time_ms, partition in zip(messages.rows, messages.time_ms.tolist(), partitions, strict=True):
        while True:
            try:
                producer.produce(topic, row.tobytes(), partition=partition, timestamp=time_ms, on_delivery=report)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(PATIENCE_SECONDS) or failed:
        raise StuckError(f"not all messages of {topic} were taken: {failed[:1]}")


def _ended(report: LearnerReport | None) -> int:
    """Return how many events have ended after they waited."""
    return 0 if report is None or report.labels is None else sum(report.labels.ended.values())


def _exact(report: LearnerReport, events: int, labels: int) -> bool:
    """Return whether each event and each label was counted once."""
    counted = {name: count for name, count in report.outcomes.items() if count}
    return counted == {"waiting": events, "label": labels} and _ended(report) == events
