"""From a SIGKILL of the learner to its next training step, with a store of 1 GB, under the supervisor.

Half of the kills are of a learner that has another one ready, half of one that is alone.
"""

import contextlib
import random
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from ingest.kafka.producer import EventProducer
from replay.tiers.disk import DiskTier
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
_PLACES = 1.12
"""Records of the file for each event: places that were left wait for checkpoints before they are written again."""


def disk_bytes(rows: int) -> int:
    """Return the bytes of a file that holds so many events."""
    return int(rows * _PLACES) * DiskTier.bytes_of(ROW_BYTES)


def seconds_to_next_step(
    folder: Path, bootstrap: str, stored_bytes: int, kills: int, seed: int
) -> tuple[list[float], list[float]]:
    """Fill a store, kill the learner so many times when another one is ready, then so many times without another.

    Returns:
        How long each kill took, of either half.
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
            found = _killed(pipeline, learner, kills, dice, standby=True)
        with Supervised(pipeline, **_ALONE) as learner:
            return found, _killed(pipeline, learner, kills, dice, standby=False)


def _killed(pipeline: Pipeline, learner: Supervised, kills: int, dice: random.Random, *, standby: bool) -> list[float]:
    """Kill it so many times, each at a random moment after its first step, and return how long each took.

    With `standby` the moment is after another one is ready, which is some seconds after that step.
    """
    found: list[float] = []
    for kill in range(kills):
        learner.wait_for(lambda report: report.steps_since_start > 0, "a step")
        if standby:
            learner.until(lambda kill=kill: learner.log.read_text().count(_READY) > kill, "one that stands by")
        time.sleep(dice.uniform(0.0, 3.0))
        learner.kill()
        begin = time.monotonic()
        learner.until(lambda: pipeline.steps() is None, "the end of what was killed")
        learner.until(lambda: (pipeline.steps() or 0) > 0, "the next step")
        found.append(time.monotonic() - begin)
    return found


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Say how long it takes."""
    kills = 3 if quick else 20
    what = f"{kills} SIGKILLs of a learner with 1 GB stored on disk and another that is ready, {kills} of one alone"
    figures.title("recovery", f"{what}, till its next step")
    for found, alone in zip(
        seconds_to_next_step(folder, bootstrap, 1_000_000_000, kills, int(time.time())), ("", "_alone"), strict=True
    ):
        figures.say(f"recovery_seconds_p95{alone}", float(np.quantile(found, 0.95, method="higher")))
        figures.say(f"recovery_seconds_median{alone}", statistics.median(found))


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
