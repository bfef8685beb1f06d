"""From a SIGKILL of the learner to its next training step, with a store of 1 GB, under the supervisor."""

import random
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from ingest.producer import EventProducer
from tests.faults.figures import Figures
from tests.faults.pipeline import LOOK_SECONDS, Pipeline, Supervised, make_topic, producer
from tests.pipelines import total

CODE = "from torch import nn\ndef build():\n    return nn.Linear(784, 10)\n"
TEXT = """
{{stream}}
format = "rows"
[schema.features.x]
dtype = "float32"
shape = [784]
[schema.label]
name = "y"
classes = 10
[model]
factory = "faulty_model:build"
{{learner}}
batch_size = 256
device = "cpu"
[replay]
capacity = {capacity}
device_bytes = "64MB"
disk = {{bytes = {disk_bytes}}}
[cuts]
every = "10s"
[versions]
publish_every = "1s"
keep = 2
keep_hourly = 0
"""
ROW_BYTES = 784 * 4 + 8
_ROWS_A_MESSAGE = 50
_AHEAD = 10_000
_ROOM = 1.3
"""Bytes of the file for each of what is stored: places that were left wait for cuts before they are written again."""


def seconds_to_next_step(folder: Path, bootstrap: str, stored_bytes: int, kills: int, seed: int) -> list[float]:
    """Fill a store, kill the learner so many times, each at a random moment after its first step, and time each."""
    rows = stored_bytes // ROW_BYTES
    topic = make_topic(bootstrap, "recovery")
    text = TEXT.format(capacity=rows, disk_bytes=int(stored_bytes * _ROOM))
    pipeline = Pipeline(folder, bootstrap, topic, CODE, text)
    dice, done = random.Random(seed), threading.Event()
    with Supervised(pipeline) as learner, producer(bootstrap, topic) as sender:
        _fill(pipeline, sender, rows * 11 // 10, seed)
        trickle = threading.Thread(target=_trickle, args=(sender, done))
        trickle.start()
        try:
            learner.wait_for(lambda report: report.replay_rows.get("disk", 0) >= rows * 0.98, "a store that is full")
            filled = time.time()
            learner.wait_for(lambda report: (report.cut_time or 0) > filled, "a cut of the full store")
            found = []
            for _ in range(kills):
                learner.wait_for(lambda report: report.steps_since_start > 0, "a step")
                time.sleep(dice.uniform(0.0, 3.0))
                learner.kill()
                begin = time.monotonic()
                learner.until(lambda: pipeline.steps() is None, "the end of what was killed")
                learner.until(lambda: (pipeline.steps() or 0) > 0, "the next step")
                found.append(time.monotonic() - begin)
        finally:
            done.set()
            trickle.join()
    return found


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Say how long it takes."""
    kills = 5 if quick else 40
    figures.title("recovery", f"{kills} SIGKILLs of a learner with 1 GB stored on disk, till its next step")
    found = seconds_to_next_step(folder, bootstrap, 1_000_000_000, kills, seed=int(time.time()))
    figures.say("recovery_seconds_p95", float(np.quantile(found, 0.95, method="higher")))
    figures.say("recovery_seconds_median", statistics.median(found))


def _fill(pipeline: Pipeline, sender: EventProducer, rows: int, seed: int) -> None:
    """Send so many events, not far ahead of the learner: the broker shares the disk with it."""
    generator = np.random.default_rng(seed)
    for sent in range(0, rows, _ROWS_A_MESSAGE):
        while sent > _AHEAD + (total(report) if (report := pipeline.report()) is not None else 0):
            time.sleep(LOOK_SECONDS)
        sender.send(_message(generator))
    sender.flush()


def _message(generator: np.random.Generator) -> bytes:
    rows = np.zeros(_ROWS_A_MESSAGE, [("x", "<f4", (784,)), ("y", "<i8")])
    rows["x"] = generator.random((_ROWS_A_MESSAGE, 784), np.float32)
    rows["y"] = generator.integers(0, 10, _ROWS_A_MESSAGE)
    return rows.tobytes()


def _trickle(sender: EventProducer, done: threading.Event) -> None:
    """Go on with the stream, a hundred events a second: there is always something to learn from."""
    generator = np.random.default_rng(0)
    while not done.wait(0.5):
        sender.send(_message(generator))
