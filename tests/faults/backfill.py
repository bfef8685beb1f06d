"""SIGKILLs of the learner while it reads Parquet files and then the topic, which have events in common.

The model counts as in `kills`: each event has its own weight, which must be 1 at the end. Files and topic are what a
sink of Kafka Connect leaves behind: each file has events of one partition, with their topic, partition and offset, and
the topic has deleted all but the newest tenth of them. The events after the files' are sent while the learner runs.
"""

import random
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from kafka import KafkaAdminClient, TopicPartition

from anabranch.learner.status.report import LearnerReport
from tests.faults import kills as counted
from tests.faults.figures import Figures
from tests.faults.pipeline import PATIENCE_SECONDS, Pipeline, Supervised, make_topic, send_in_order
from tests.pipelines import adds_up, total

PARTITIONS = 4
_HISTORY = """format = "rows"
buffer_bytes = "2MB"
[stream.backfill]
files = ["{folder}/*.parquet"]
identity = {{topic = "topic", partition = "partition", offset = "offset"}}
"""
"""With a small buffer, so that ingest is not far ahead of the learner when it switches to the topic."""
_FILES = 5
"""Of each partition."""
_LIFE_SECONDS = 2.0
"""Approximate duration of the training between two kills in the history."""
_STEP_SECONDS, _STEP_SECONDS_AN_EVENT = 0.0008, 5e-9
"""Approximate duration of a step: each goes over the weights of all events."""
_LAST_ROWS = 0.85
_LEAST_A_SECOND = 1000
"""Events a second after the last kill, on a slow machine."""


@dataclass(frozen=True)
class Backfilled:
    """The outcome of a history and the stream after it.

    Attributes:
        kills: number of kills.
        before: kills while the history was read.
        lost: events with weight 0.
        twice: events that were trained more than once.
        other: weights that are no whole number, or negative.
        exact: whether the ledger counts each event, and its offsets add up.
    """

    kills: int
    before: int
    lost: int
    twice: int
    other: int
    exact: bool
    seconds: float


def killed_while_backfilling(folder: Path, bootstrap: str, rows: int, kills: int, seed: int) -> Backfilled:
    """Train on `rows` rows of files and then on the topic, while the learner is killed `kills` times.

    Half of the kills are at random times in the history, one when its last rows are read, one when the topic is first
    read, and the others after that, before each of which a part of the stream is sent.
    """
    dice, begin, events = random.Random(seed), time.monotonic(), rows + rows // 10
    topic = make_topic(bootstrap, "backfill", PARTITIONS)
    write_files(folder / "history", topic, rows)
    fill_topic(bootstrap, topic, range(rows))
    delete_before(bootstrap, topic, (rows - rows // 10) // PARTITIONS)
    in_history, before = max(1, kills // 2), 0
    parts = _parts(range(rows, events), max(1, kills - in_history - 1))
    pipeline = Pipeline(folder, bootstrap, topic, counted.CODE, _text(folder, events, rows, in_history))
    with Supervised(pipeline) as learner:
        for kill in range(kills):
            pid = learner.pid()
            if kill < in_history:
                _wait_a_while(learner, dice)
            elif kill == in_history:
                learner.wait_for(lambda report: _fraction(report) >= _LAST_ROWS, "the last rows of the history")
            elif kill == in_history + 1:
                learner.wait_for(lambda report: _fraction(report) == 1, "the switch to the topic")
            else:
                fill_topic(bootstrap, topic, parts.pop(0))
                _wait_a_while(learner, dice)
            report = pipeline.report()
            before += report is None or _fraction(report) < 1
            learner.kill()
            learner.until(lambda pid=pid: learner.supervisor.pids().get("learner", pid) != pid, "another learner")
        for part in parts:
            fill_topic(bootstrap, topic, part)
        left = PATIENCE_SECONDS + events / _LEAST_A_SECOND
        last = learner.wait_for(lambda report: total(report) >= events, "an outcome for every event", patience=left)
    weights, finished = counted.accounts(pipeline), pipeline.report()
    return Backfilled(
        kills=kills,
        before=before,
        lost=int((weights == 0).sum()),
        twice=int((weights > 1).sum()),
        other=int((weights != weights.round()).sum() + (weights < 0).sum()),
        exact=_exact(last, events) and finished is not None and _exact(finished, events),
        seconds=time.monotonic() - begin,
    )


def write_files(folder: Path, topic: str, rows: int) -> None:
    """Write the events `[0, rows)` as a sink of Kafka Connect does: each file has offsets of one partition."""
    folder.mkdir(parents=True)
    last = rows // PARTITIONS
    for partition in range(PARTITIONS):
        for number in range(_FILES):
            offset = np.arange(last * number // _FILES, last * (number + 1) // _FILES)
            columns = {
                "id": offset * PARTITIONS + partition,
                "y": np.zeros(len(offset), np.float32),
                "topic": pa.array([topic] * len(offset)).dictionary_encode(),
                "partition": np.full(len(offset), partition, np.int32),
                "offset": offset,
            }
            pq.write_table(pa.table(columns), folder / f"{topic}+{partition}+{offset[0]:010d}.parquet")


def fill_topic(bootstrap: str, topic: str, ids: range) -> None:
    """Write events, one a message, each to its partition at its offset: event `i` is offset `i // 4` of `i % 4`."""
    values = np.zeros(len(ids), counted.ROW)
    values["id"] = ids
    content, size = values.tobytes(), counted.ROW.itemsize
    send_in_order(
        bootstrap,
        topic,
        ((number % PARTITIONS, content[at * size : (at + 1) * size]) for at, number in enumerate(ids)),
    )


def delete_before(bootstrap: str, topic: str, offset: int) -> None:
    """Delete the messages before an offset of each partition."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        admin.delete_records({TopicPartition(topic, partition): offset for partition in range(PARTITIONS)})
    finally:
        admin.close()


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `backfill`."""
    rows, kills = (200_000, 3) if quick else (10_000_000, 20)
    what = f"{rows:,} rows of Parquet, then a topic with a tenth of them and as many new events, {kills} SIGKILLs"
    figures.part("backfill", f"{what}, one at the switch")
    done = killed_while_backfilling(folder, bootstrap, rows, kills, seed=int(time.time()))
    figures.add("backfill_kills", done.kills, f"{done.before} of them before the switch; {done.seconds:.0f} s")
    figures.add("backfill_lost", done.lost)
    figures.add("backfill_twice", done.twice)
    figures.add("backfill_exact", done.exact and done.other == 0, "the ledger counts each event")


def _text(folder: Path, events: int, rows: int, kills: int) -> str:
    """Return the config: a step has as many events as make the history last for some kills."""
    steps = (kills + 1) * _LIFE_SECONDS / (_STEP_SECONDS + _STEP_SECONDS_AN_EVENT * events)
    text = counted.TEXT.format(events=events, batch=max(8, round(rows / steps)), checkpoint_every="1s")
    return text.replace('format = "rows"\n', _HISTORY.format(folder=folder / "history"))


def _wait_a_while(learner: Supervised, dice: random.Random) -> None:
    """Wait for a random time: a third of the kills are during the start."""
    at_start = dice.random() < 1 / 3
    if not at_start:
        learner.wait_for(lambda report: report.steps_since_start > 0, "first step")
    time.sleep(dice.uniform(0.0, 3.0 if at_start else _LIFE_SECONDS))


def _fraction(report: LearnerReport) -> float:
    return 0.0 if report.backfill is None else report.backfill.fraction


def _exact(report: LearnerReport, events: int) -> bool:
    counted_events = {name: count for name, count in report.outcomes.items() if count}
    return counted_events == {"trained": events} and adds_up(report)


def _parts(ids: range, count: int) -> list[range]:
    ends = [len(ids) * part // count for part in range(count + 1)]
    return [ids[begin:end] for begin, end in pairwise(ends)]
