"""The time from a SIGKILL of the learner to its next training step, with a store of 1 GB, under the supervisor.

Half of the kills are with a standby that is ready, half without a standby.
"""

import contextlib
import random
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from anabranch.ingest.kafka.producer import EventProducer
from anabranch.replay.tiers.disk import DiskTier
from tests.faults.figures import Figures
from tests.faults.pipeline import POLL_SECONDS, Pipeline, Supervised, make_topic, producer
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
standby = true
[replay]
capacity = {capacity}
device_bytes = "64MB"
disk = {{bytes = {disk_bytes}}}
[checkpoints]
every = "10s"
[versions]
publish_every = "1s"
keep = 2
keep_hourly = 0
"""
ROW_BYTES = 784 * 4 + 8
_ROWS_A_MESSAGE = 50
_AHEAD = 10_000
_READY = "learner is ready as standby"
_ALONE = {"ANABRANCH__LEARNER__STANDBY": "false"}
_SLOTS = 1.12
"""Slots of the file for each event: a freed slot is written again only after a checkpoint."""


def disk_bytes(rows: int) -> int:
    """Return the size of a file for `rows` events."""
    return int(rows * _SLOTS) * DiskTier.bytes_of(ROW_BYTES)


def seconds_to_next_step(
    folder: Path, bootstrap: str, stored_bytes: int, kills: int, seed: int
) -> tuple[list[float], list[float]]:
    """Fill a store, kill the learner `kills` times with a standby that is ready, then as often without one.

    Returns:
        The recovery times of both halves, in seconds.
    """
    rows = stored_bytes // ROW_BYTES
    topic = make_topic(bootstrap, "recovery")
    text = TEXT.format(capacity=rows, disk_bytes=disk_bytes(rows))
    pipeline = Pipeline(folder, bootstrap, topic, CODE, text)
    dice, done = random.Random(seed), threading.Event()
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(producer(bootstrap, topic))
        with Supervised(pipeline) as learner:
            _fill(pipeline, sender, rows * 11 // 10, seed)
            trickle = threading.Thread(target=_trickle, args=(sender, done))
            trickle.start()
            stack.callback(trickle.join)
            stack.callback(done.set)
            learner.wait_for(lambda report: report.replay_rows.get("disk", 0) >= rows * 0.98, "a store that is full")
            filled = time.time()
            learner.wait_for(lambda report: (report.checkpoint_time or 0) > filled, "a checkpoint of the full store")
            with_standby = _killed(pipeline, learner, kills, dice, standby=True)
        with Supervised(pipeline, **_ALONE) as learner:
            return with_standby, _killed(pipeline, learner, kills, dice, standby=False)


def _killed(pipeline: Pipeline, learner: Supervised, kills: int, dice: random.Random, *, standby: bool) -> list[float]:
    """Kill the learner `kills` times, each at a random time after its first step; return the recovery times in seconds.

    With `standby` that is after a standby is ready, some seconds after that step.
    """
    recovered: list[float] = []
    for kill in range(kills):
        learner.wait_for(lambda report: report.steps_since_start > 0, "a step")
        if standby:
            learner.until(lambda kill=kill: learner.log.read_text().count(_READY) > kill, "a standby")
        time.sleep(dice.uniform(0.0, 3.0))
        learner.kill()
        begin = time.monotonic()
        learner.until(lambda: pipeline.steps() is None, "the end of the killed learner")
        learner.until(lambda: (pipeline.steps() or 0) > 0, "the next step")
        recovered.append(time.monotonic() - begin)
    return recovered


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `recovery`."""
    kills = 3 if quick else 20
    what = f"{kills} SIGKILLs of a learner with 1 GB stored on disk and a standby, {kills} without a standby"
    figures.part("recovery", f"{what}, until its next step")
    for seconds, alone in zip(
        seconds_to_next_step(folder, bootstrap, 1_000_000_000, kills, int(time.time())), ("", "_alone"), strict=True
    ):
        figures.add(f"recovery_seconds_p95{alone}", float(np.quantile(seconds, 0.95, method="higher")))
        figures.add(f"recovery_seconds_median{alone}", statistics.median(seconds))


def _fill(pipeline: Pipeline, sender: EventProducer, rows: int, seed: int) -> None:
    """Send `rows` events, not far ahead of the learner, since the broker is on the same disk."""
    generator = np.random.default_rng(seed)
    for sent in range(0, rows, _ROWS_A_MESSAGE):
        while sent > _AHEAD + (total(report) if (report := pipeline.report()) is not None else 0):
            time.sleep(POLL_SECONDS)
        sender.send(_message(generator))
    sender.flush()


def _message(generator: np.random.Generator) -> bytes:
    rows = np.zeros(_ROWS_A_MESSAGE, [("x", "<f4", (784,)), ("y", "<i8")])
    rows["x"] = generator.random((_ROWS_A_MESSAGE, 784), np.float32)
    rows["y"] = generator.integers(0, 10, _ROWS_A_MESSAGE)
    return rows.tobytes()


def _trickle(sender: EventProducer, done: threading.Event) -> None:
    """Send a hundred events a second, so that there is always something to train on."""
    generator = np.random.default_rng(0)
    while not done.wait(0.5):
        sender.send(_message(generator))
