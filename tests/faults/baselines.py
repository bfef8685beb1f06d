"""The same stream with and without kills: the weights are the same bit for bit, with replay from a file on disk."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from anabranch.learner.checkpoints.format import RANK, Checkpoints
from anabranch.learner.status.report import LearnerReport
from tests.faults.figures import Figures
from tests.faults.pipeline import Pipeline, Supervised, make_topic, send

CODE = """
from torch import nn
def build():
    return nn.Sequential(
        nn.Linear(32, 600), nn.ReLU(), nn.Dropout(0.2), nn.Linear(600, 600), nn.BatchNorm1d(600), nn.ReLU(),
        nn.Linear(600, 10)
    )
"""
TEXT = """
{{stream}}
format = "rows"
[schema.features.x]
dtype = "float32"
shape = [32]
[schema.label]
name = "y"
classes = 10
[model]
factory = "faulty_model:build"
{{learner}}
batch_size = {batch}
deterministic = true
device = "cpu"
[replay]
capacity = {capacity}
device_bytes = {memory_bytes}
disk = {{bytes = {disk_bytes}}}
[versions]
publish_every = "500ms"
keep = 2
keep_hourly = 0
[checkpoints]
every = "500ms"
[gate]
holdout_fraction = 0.0
"""
BATCH, MEMORY_BYTES = 16, 20_000
_ROWS_A_MESSAGE = 6, 3, 1
"""Of each partition."""


@dataclass(frozen=True)
class Baselines:
    """How two runs over one stream compare.

    Attributes:
        equal: whether weights and optimizer of both are the same, bit for bit.
        tensors: how many tensors were compared.
        kills: of the second run; fewer than requested if the stream ended before.
        stored_bytes: size of the store, of which at most MEMORY_BYTES are in memory.
    """

    equal: bool
    tensors: int
    kills: int
    stored_bytes: int


def with_and_without_kills(folder: Path, bootstrap: str, events: int, kills: int, seed: int) -> Baselines:
    """Train on one stream twice, the second time while the learner is killed at random times."""
    topic = make_topic(bootstrap, "baselines", len(_ROWS_A_MESSAGE))
    send(bootstrap, topic, _messages(events, seed))
    text = TEXT.format(batch=BATCH, capacity=events // 2, memory_bytes=MEMORY_BYTES, disk_bytes=events * 150)
    dice, ends, stored, killed = random.Random(seed), [], 0, 0
    for name, interrupted in (("whole", False), ("killed", True)):
        pipeline = Pipeline(folder / name, bootstrap, topic, CODE, text)
        with Supervised(pipeline) as learner:
            while interrupted and killed < kills:
                report = learner.wait_for(_is_under_way(events), "some steps")
                if report.steps == events // BATCH:
                    break
                time.sleep(dice.uniform(0.0, 1.0))
                gone = learner.kill()
                killed += 1
                learner.until(lambda gone=gone: learner.supervisor.pids().get("learner", gone) != gone, "another one")
            last = learner.wait_for(lambda report: report.steps == events // BATCH, "the last whole batch")
            stored = last.replay_bytes["disk"]
        ends.append(last_checkpoint(pipeline))
    one, other = ends
    same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return Baselines(same, len(one), killed, stored)


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `baselines`."""
    events, kills = (16_000, 4) if quick else (160_000, 20)
    figures.part("baselines", f"{events} events learned with and without {kills} SIGKILLs, deterministic, with replay")
    comparison = with_and_without_kills(folder, bootstrap, events, kills, seed=int(time.time()))
    figures.add(
        "weights_equal",
        comparison.equal,
        f"{comparison.tensors} tensors of weights and optimizer, {comparison.kills} kills",
    )
    figures.add(
        "stored_over_memory", comparison.stored_bytes / MEMORY_BYTES, "bytes stored on disk over those in memory"
    )


def _is_under_way(events: int) -> Callable[[LearnerReport], bool]:
    """Return whether the learner has made some steps since its start and a checkpoint, or the stream is over."""
    return lambda report: (
        report.steps == events // BATCH or (report.steps_since_start > 5 and (report.checkpoint or 0) > 1)
    )


def last_checkpoint(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Return weights and optimizer of the newest checkpoint."""
    checkpoints = Checkpoints(pipeline.state_dir / "checkpoints", "", 0)
    folder = checkpoints.path / str(checkpoints.numbers()[-1]) / RANK
    parts = {part: load_file(folder / f"{part}.safetensors") for part in ("model", "optimizer")}
    return {f"{part}.{name}": value for part, tensors in parts.items() for name, value in tensors.items()}


def _messages(events: int, seed: int) -> Iterator[bytes]:
    """Yield messages for each partition in turn, of different sizes, so that some partitions end early."""
    generator = np.random.default_rng(seed)
    rows = np.zeros(events, [("x", "<f4", (32,)), ("y", "<i8")])
    rows["x"] = generator.standard_normal((events, 32), np.float32)
    rows["y"] = generator.integers(0, 10, events)
    begin = 0
    for count in itertools.cycle(_ROWS_A_MESSAGE):
        if begin >= events:
            return
        yield rows[begin : begin + count].tobytes()
        begin += count
