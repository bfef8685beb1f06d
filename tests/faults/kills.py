"""Random SIGKILLs of the learner during one stream, counted by the weights of the model.

The accounting model has one weight for each event. The loss is minus that weight, the optimizer SGD with learning rate
1; there is neither replay nor a holdout set. The model undoes the mean over the events of a step, so that each trained
event adds exactly 1 to its weight. At the end each weight must be 1: the weight of a lost event is 0, that of an event
trained twice is 2.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from anabranch.learner.checkpoints.format import RANK, Checkpoints
from anabranch.learner.status.report import LearnerReport
from tests.faults.figures import Figures
from tests.faults.pipeline import PATIENCE_SECONDS, Pipeline, Supervised, make_topic, send
from tests.pipelines import adds_up, total

CODE = """
import torch
from torch import nn
from anabranch.learner.model.task import Regression

class Accounts(nn.Module):
    def __init__(self, events):
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(events))

    def forward(self, id):
        output = self.learned[id]
        if output.requires_grad:
            output.register_hook(torch.sign)  # a mean over the step's events becomes a sum
        return output

class MinusTheWeight(Regression):
    def loss(self, output_B, label_B):
        return -output_B

def build(events):
    return Accounts(events)
"""
LEARNER = """[model]
factory = "faulty_model:build"
args = {{events = {events}}}
task = "faulty_model:MinusTheWeight"
{{learner}}
batch_size = {batch}
strategy = "none"
optimizer = {{name = "sgd", lr = 1.0}}
max_grad_norm = inf
precision = "fp32"
device = "cpu"
[versions]
publish_every = "1s"
keep = 2
keep_hourly = 0
[checkpoints]
every = "{checkpoint_every}"
[gate]
holdout_fraction = 0.0
"""
"""The config of a learner that trains on each event once, for a stream that precedes it."""
TEXT = (
    """
{{stream}}
format = "rows"
[schema.features.id]
dtype = "int64"
[schema.label]
name = "y"
dtype = "float32"
"""
    + LEARNER
)
PARTITIONS = 4
ROW = np.dtype([("id", "<i8"), ("y", "<f4")])
_BAD, _MOST_ROWS = 0.05, 30
STEP_SECONDS, LIFE_SECONDS = 0.0008, 0.8
"""Approximate duration of a step, and of the training between two kills."""
LEAST_A_SECOND = 200
"""Events a second after the last kill, on a slow machine."""


@dataclass(frozen=True)
class Account:
    """The outcome of a stream.

    Attributes:
        kills: number of kills.
        early: kills before the first step since the start.
        again: steps that had to be repeated.
        lost: events with weight 0.
        twice: events that were trained more than once.
        other: weights that are neither 0, 1 nor a whole number.
        exact: whether the ledger counts each outcome exactly, and its offsets add up.
    """

    kills: int
    early: int
    again: int
    lost: int
    twice: int
    other: int
    exact: bool
    seconds: float


def killed_again_and_again(
    folder: Path, bootstrap: str, events: int, kills: int, checkpoint_every: str, seed: int
) -> Account:
    """Train on a stream of `events` events while the learner is killed `kills` times.

    Between two kills a separate part of the stream is sent. Steps are small, so that training takes a while. Two kills
    of three are at a random time in the first seconds after the first step since a start, the others during the start.
    """
    dice = random.Random(seed)
    batch = max(2, round(events * STEP_SECONDS / (kills * LIFE_SECONDS)))
    topic = make_topic(bootstrap, "accounts", PARTITIONS)
    text = TEXT.format(events=events, batch=batch, checkpoint_every=checkpoint_every)
    pipeline = Pipeline(folder, bootstrap, topic, CODE, text)
    messages = list(messages_of(events, dice))
    bad = sum(1 for message in messages if len(message) % ROW.itemsize)
    early, again, begin = 0, 0, time.monotonic()
    with Supervised(pipeline) as learner:
        *parts, rest = parts_of(messages, kills + 1)
        for part in parts:
            send(bootstrap, topic, part)
            pid, at_start = learner.pid(), dice.random() < 1 / 3
            if not at_start:
                learner.wait_for(lambda report: report.steps_since_start > 0, "first step")
            time.sleep(dice.uniform(0.0, 3.0 if at_start else 2.0))
            report = pipeline.report()
            stepped = report is not None and report.pid == pid and report.steps_since_start > 0
            early += not stepped
            before = report.steps if report is not None else 0
            learner.kill()
            again += max(0, before - checkpoint_step(pipeline)) if stepped else 0
            learner.until(lambda pid=pid: learner.supervisor.pids().get("learner", pid) != pid, "another learner")
        send(bootstrap, topic, rest)
        left = PATIENCE_SECONDS + events / LEAST_A_SECOND
        last = learner.wait_for(
            lambda report: total(report) >= events + bad, "an outcome for every event", patience=left
        )
    weights = accounts(pipeline)
    finished = pipeline.report()
    return Account(
        kills=kills,
        early=early,
        again=again,
        lost=int((weights == 0).sum()),
        twice=int((weights > 1).sum()),
        other=int((weights != weights.round()).sum() + (weights < 0).sum()),
        exact=is_exact(last, events, bad) and finished is not None and is_exact(finished, events, bad),
        seconds=time.monotonic() - begin,
    )


def accounts(pipeline: Pipeline) -> NDArray[np.float32]:
    """Return the weights of each event in the newest checkpoint, float32 `[events]`, or `[events, classes]`."""
    checkpoints = Checkpoints(pipeline.state_dir / "checkpoints", "", 0)
    tensors = load_file(checkpoints.path / str(checkpoints.numbers()[-1]) / RANK / "model.safetensors")
    weights: NDArray[np.float32] = tensors["learned"].numpy()
    return weights


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `kills`."""
    kills = 8 if quick else 100
    figures.part("kills", f"{kills} SIGKILLs of the learner in a stream of 200,000 events, a checkpoint every second")
    account = killed_again_and_again(folder, bootstrap, 200_000, kills, "1s", seed=int(time.time()))
    figures.add("kills", account.kills, f"{account.early} of them before a first step; {account.seconds:.0f} s")
    figures.add("lost", account.lost)
    figures.add("twice", account.twice)
    figures.add("ledger_exact", account.exact and account.other == 0)
    figures.add("steps_done_again", account.again, "steps that were in no checkpoint when a kill came")


def is_exact(report: LearnerReport, events: int, bad: int) -> bool:
    """Return whether a report counts each outcome exactly, and its offsets add up."""
    expected = {"trained": events, "dead_lettered": bad}
    counted = {name: count for name, count in report.outcomes.items() if count}
    parts = report.partitions.values()
    through = all(part.pending == 0 and part.finished == part.end - part.start for part in parts)
    return counted == expected and adds_up(report) and through


def messages_of(events: int, dice: random.Random) -> Iterator[bytes]:
    """Yield messages of one or more rows, and some that lack a byte."""
    rows = np.zeros(events, ROW)
    rows["id"] = np.arange(events)
    begin = 0
    while begin < events:
        end = min(events, begin + dice.randint(1, _MOST_ROWS))
        message = rows[begin:end].tobytes()
        yield message
        if dice.random() < _BAD:
            yield message[:-1]
        begin = end


def parts_of(messages: list[bytes], count: int) -> list[list[bytes]]:
    """Return the messages in `count` parts of the same length."""
    ends = [len(messages) * part // count for part in range(count + 1)]
    return [messages[begin:end] for begin, end in pairwise(ends)]


def checkpoint_step(pipeline: Pipeline) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    checkpoints = Checkpoints(pipeline.state_dir / "checkpoints", "", 0)
    numbers = checkpoints.numbers()
    return checkpoints.manifest(numbers[-1]).step if numbers else 0
