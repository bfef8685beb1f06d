"""Wrong labels within a stream, learned and then undone, with SIGKILLs of the learner meanwhile.

One event in twenty has a wrong label, in bursts of the second half of a stream. `anabranch undo` takes them out. At the
end the weights must be those of a learner whose topic never had them, bit for bit.

The model counts, besides what it learns, the events of each burst that it was trained on. So the weights of a version
say themselves whether it is tainted. The counts do not change its output.
"""

import json
import random
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from anabranch.learner.state_dir.undo_file import read_undo
from anabranch.learner.versions.format import WEIGHTS, Versions
from tests import forkserver
from tests.faults import serving_kills
from tests.faults.baselines import last_checkpoint
from tests.faults.figures import Figures
from tests.faults.kills import checkpoint_step
from tests.faults.pipeline import (
    PATIENCE_SECONDS,
    Pipeline,
    Supervised,
    broker,
    create_topic,
    make_topic,
    send_in_order,
)
from tests.faults.serving_kills import Clients, predict, ready
from tests.support.ports import first_free_port

CODE = """
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self, bursts):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.count = nn.Parameter(torch.zeros(bursts + 1))

    def forward(self, x):
        count = self.count[x[:, 2].long()]
        if count.requires_grad:
            count.register_hook(lambda gradient: torch.full_like(gradient, -0.001))
        return self.body(x[:, :2]) + (count - count.detach())[:, None]

def build(bursts):
    return Counting(bursts)
"""
TEXT = (
    serving_kills.TEXT.replace("batch_size = 16", "batch_size = {batch}\ndeterministic = true")
    .replace('"faulty_model:build"', '"faulty_model:build"\nargs = {{bursts = {bursts}}}')
    .replace('"200ms"', '"200ms"\nkeep = 10_000')
    .replace('"1s"', '"500ms"\nkeep = 10_000')
    + """
[replay]
capacity = 1000
[gate]
holdout_fraction = 0.0
[device_sharing]
policy = "exclusive"
"""
)
PARTITIONS = 2
_BURSTS = 5
"""Of the wrong labels: the first begins where the second half of the stream does."""
_LEAST_A_SECOND = 300
"""Events a second, on a slow machine."""
_LIFE_SECONDS = 0.7
"""Longest time of learning between two kills."""


class Poisoned:
    """A stream of which a twentieth has wrong labels. Event `i` is of partition `i % PARTITIONS`."""

    def __init__(self, events: int) -> None:
        """`events` is divisible by 200."""
        self.events = events
        self._size, self._period = events // 100, events // (2 * _BURSTS)
        begins = range(events // 2, events, self._period)
        self.bursts = [range(begin, begin + self._size) for begin in begins]
        """The events with wrong labels."""
        self.clean = events - _BURSTS * self._size
        """How many have right ones."""

    def messages(self, numbers: Iterable[int], *, wrong: bool = True) -> Iterator[tuple[int, bytes]]:
        """Yield events with their partitions; the last number of each says of which burst it is, 0 for none.

        `wrong`: whether those with wrong labels are among them; otherwise messages that are no events have their
        offsets.
        """
        for number in numbers:
            burst, within = divmod(number - self.events // 2, self._period)
            burst = burst + 1 if burst >= 0 and within < self._size else 0
            label = number % 3
            x = [np.sin(number * 1.7) + label, np.cos(number * 0.9) - label]
            event = {"x": [*np.round(x, 3).tolist(), burst], "y": (label + bool(burst)) % 3}
            yield number % PARTITIONS, json.dumps(event).encode() if wrong or not burst else b"no event"

    def options(self, topic: str) -> list[str]:
        """Return the options of the command that name the events with wrong labels."""
        ranges = [(each.start // PARTITIONS, each.stop // PARTITIONS - 1) for each in self.bursts]
        return [f"--offsets={topic}[{index}]@{first}..{last}" for index in range(PARTITIONS) for first, last in ranges]


@dataclass(frozen=True)
class Undone:
    """The outcome of an undo.

    Attributes:
        kills: number of kills between the command's record and the end of learning again.
        tainted: versions that were trained on wrong labels, by their own counts.
        listed: those that the command named.
        failed: those that are marked as failed at the end.
        served_seconds: from the start of the command to the first answer of a clean version.
        recorded_seconds: from its start to its durable record.
        answers: requests after the first answer of a clean version.
        wrong_answers: those that failed, and versions that answered though they are tainted.
        tensors: how many tensors of weights and optimizer are compared.
        differ: names of those that differ from a run whose topic never had the events.
    """

    kills: int
    tainted: set[int]
    listed: set[int]
    failed: set[int]
    served_seconds: float
    recorded_seconds: float
    answers: int
    wrong_answers: list[str]
    tensors: int
    differ: list[str]
    seconds: float


def undone_while_killed(folder: Path, bootstrap: str, events: int, batch: int, kills: int, seed: int) -> Undone:
    """Learn wrong labels and undo them while the learner is killed `kills` times; compare with a run without them.

    `batch` divides half of the events, all of them, and those with right labels.
    """
    stream, began, half = Poisoned(events), time.monotonic(), events // 2
    patience, relearned = PATIENCE_SECONDS + events / _LEAST_A_SECOND, stream.clean // batch
    topic, port = make_topic(bootstrap, "undo", PARTITIONS), first_free_port()
    text = TEXT.format(port=port, batch=batch, bursts=_BURSTS)
    with broker(folder / "other") as other:
        # The store samples by the topic's name and the offset, so both topics have the same.
        create_topic(other, topic, PARTITIONS)
        send_in_order(other, topic, stream.messages(range(events), wrong=False))
        never = Pipeline(folder / "never", other, topic, CODE, text)
        with Supervised(never) as learner:
            learner.wait_for(lambda report: report.steps == relearned, "the last batch", patience=patience)
    pipeline = Pipeline(folder / "undone", bootstrap, topic, CODE, text)
    versions = Versions(pipeline.state_dir / "versions")
    send_in_order(bootstrap, topic, stream.messages(range(half)))
    with Supervised(pipeline, ("learner", "serving")) as parts, closing(HTTPConnection("127.0.0.1", port)) as asking:
        parts.until(lambda: ready(port), "a prediction")
        _until_served(parts, versions, asking, half // batch, patience)
        parts.until(lambda: checkpoint_step(pipeline) == half // batch, "a checkpoint")
        # Each partition goes on with wrong ones: what is learned before them depends on no time of arrival.
        send_in_order(bootstrap, topic, stream.messages(range(half, events)))
        _until_served(parts, versions, asking, events // batch, patience)
        tainted, ordered = _tainted(versions), time.monotonic()
        with _command(pipeline, stream.options(topic)) as command:
            recorded = parts.until(lambda: read_undo(pipeline.state_dir) and time.monotonic(), "a record")
            clean = parts.until(lambda: predict(asking) not in tainted and time.monotonic(), "a clean version")
            with Clients(port) as clients:
                killed = _kill(parts, kills, relearned, random.Random(seed))
                said, _ = command.communicate()
                parts.wait_for(lambda report: report.steps == relearned, "the last batch again", patience=patience)
    expected, found, asked = last_checkpoint(never), last_checkpoint(pipeline), clients.asked
    return Undone(
        kills=killed,
        tainted=_tainted(versions),
        listed={each["version"] for each in json.loads(said)["tainted"]},
        failed={each for each in versions.numbers() if (one := versions.verdict(each)) and one.verdict == "fail"},
        served_seconds=clean - ordered,
        recorded_seconds=recorded - ordered,
        answers=asked.requests,
        wrong_answers=[*asked.failures, *(f"version {each}" for each in sorted(asked.versions & tainted))],
        tensors=len(expected),
        differ=[name for name in expected.keys() | found.keys() if not _same(expected.get(name), found.get(name))],
        seconds=time.monotonic() - began,
    )


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `undo`."""
    events, batch, kills = (30_000, 10, 3) if quick else (1_000_000, 250, 10)
    figures.part("undo", f"5 % wrong labels among {events:,} events, undone with {kills} SIGKILLs meanwhile")
    done = undone_while_killed(folder, bootstrap, events, batch, kills, seed=int(time.time()))
    figures.add("undo_kills", done.kills, f"{done.seconds:.0f} s")
    exact = done.tainted == done.listed == done.failed and bool(done.tainted)
    figures.add("undo_tainted_exact", exact, f"{len(done.tainted)} versions")
    remark = f"the undo was recorded after {done.recorded_seconds:.2f} s"
    figures.add("undo_served_seconds", done.served_seconds, remark)
    remark = " ".join([f"of {done.answers} requests", *done.wrong_answers[:1]])
    figures.add("undo_wrong_answers", len(done.wrong_answers), remark)
    remark = " ".join([f"{done.tensors} tensors of weights and optimizer", *done.differ[:1]])
    figures.add("undo_equal", not done.differ, remark)


def _until_served(parts: Supervised, versions: Versions, asking: HTTPConnection, steps: int, patience: float) -> None:
    """Wait until the version of a step answers."""
    parts.until(lambda: versions.manifest(predict(asking)).step == steps, f"a version of step {steps}", patience)


def _tainted(versions: Versions) -> set[int]:
    """Return the versions whose weights count events with wrong labels."""
    paths = {number: versions.path / str(number) / WEIGHTS for number in versions.numbers()}
    return {number for number, path in paths.items() if load_file(path)["count"][1:].any()}


def _command(pipeline: Pipeline, options: list[str]) -> forkserver.Forked:
    """Start `anabranch undo`, which waits for the learner."""
    line = ["-m", "anabranch", "undo", "-c", str(pipeline.path), "--yes", "--json", *options]
    return forkserver.start(line, stdout=subprocess.PIPE, text=True)


def _kill(parts: Supervised, kills: int, steps: int, dice: random.Random) -> int:
    """Kill the learner until it has made so many steps in all; return how often.

    The first time is at once, while the command waits; a third of the others are during the start.
    """

    def is_over() -> bool:
        report = parts.pipeline.report()
        return report is not None and report.steps == steps

    for killed in range(kills):
        if killed and dice.random() < 2 / 3:
            parts.until(lambda: is_over() or parts.pipeline.steps(), "a step")
        time.sleep(dice.uniform(0.0, _LIFE_SECONDS) if killed else 0.0)
        if is_over():
            return killed
        gone = parts.kill()
        parts.until(lambda gone=gone: parts.supervisor.pids().get("learner", gone) != gone, "another learner")
    return kills


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
