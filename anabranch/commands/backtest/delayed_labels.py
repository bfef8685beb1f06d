"""Runs of a backtest in which labels come later than their events.

Legend: B events of a batch, W events that wait, n events of a call.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.commands.backtest.batches import rows_of
from anabranch.commands.backtest.runs import LateArrivals, RunLog
from anabranch.ingest.events.block import Array
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.evaluate.stream_monitor import NOT_SCORED, Scored, StreamMonitor, scored
from anabranch.learner.extension import NextBatch
from anabranch.learner.model.examples import EARLY, Early
from anabranch.learner.model.factory import eval_mode, forward
from anabranch.learner.stream.batch import Batch
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.reservoir.reservoir import WAITED

Policy = Literal["wait", "negative", "negative-then-correct"]
"""What is trained on before the label comes: nothing; the event as a negative, and again as a positive when its label
says so; the same with the importance weights of fake negatives."""
POLICIES: tuple[Policy, ...] = ("wait", "negative", "negative-then-correct")

_DUE, _IN_TIME, _OUTPUT, _GUESS = "due", "in_time", "output", "guess"


@dataclass(frozen=True)
class LabelDelay:
    """When labels come.

    Attributes:
        column: has the time of the label, float64 `[N]` in seconds since 1970; 0 where it never comes.
        wait_seconds: how long an event waits for it.
        unmatched: what becomes of events whose label does not come in time.
    """

    column: str
    wait_seconds: float
    unmatched: Literal["negative", "drop", "store"]


class DelayedLabels(LateArrivals):
    """Lets an event be scored when it comes, and trained on when the policy says so.

    Time is that of the events. It moves with each batch: labels up to the time of the first event of a batch are known
    before it is scored, or up to the middle one of the batch, where that is earlier: no single time decides.
    """

    def __init__(self, policy: Policy, delay: LabelDelay, batch_size: int) -> None:
        """Take when labels come, and the number of events of a step."""
        self._policy, self._delay, self._size = policy, delay, batch_size
        self._clock = -np.inf
        self._waiting: dict[str, Array] = {}
        self._arrived: Batch | None = None
        """Of the stream: they are scored once all that is due before them is trained on."""
        self._queue: deque[dict[str, Array]] = deque()
        """Events to train on, in parts."""
        self._stored: deque[dict[str, Array]] = deque()
        """Events that are stored without training on them, in parts."""
        self._unobserved = NOT_SCORED
        """The scores of events whose label is known since the last step, by their predictions from before."""
        self.labelled = self.timed_out = 0
        """Events whose label came in time, and others that have waited in vain."""

    @override
    def begin(self, setup: TrainingSetup, trainer: Trainer, monitor: StreamMonitor, log: RunLog) -> None:
        self._setup, self._trainer, self._monitor, self._log = setup, trainer, monitor, log

    @property
    @override
    def pending(self) -> bool:
        return self._arrived is not None or bool(self._stored) or self._queued >= self._size

    @override
    def next(self, source: BlockReader, stop: threading.Event, of_stream: NextBatch, steps: int) -> Batch | None:
        """Train on the events whose label has come, score the new ones, and train on those too if they are early."""
        while True:
            if self._queued >= self._size:
                return Batch(self._full_step(), {}, {}, [])  # settled when they came
            if self._stored:
                return Batch({}, self._stored.popleft(), {}, [])
            if (batch := self._arrived) is not None:
                self._arrived = None
                self._score(batch.new)
                return Batch({}, batch.stored_only, batch.held_out, batch.spans)
            batch = of_stream(stop)
            if batch is None or not batch.new:
                return batch
            self._arrived = batch
            time_B = batch.new["time"].astype(np.float64)
            self._clock = min(float(time_B[0]), float(np.sort(time_B)[len(time_B) // 2]))
            self._decide()

    @override
    def scored(self, batch: Batch) -> Scored:
        known, self._unobserved = self._unobserved, NOT_SCORED
        return known

    def _score(self, columns: Mapping[str, Array]) -> None:
        """Score new events, and let them wait; enqueue them if they are early."""
        output_B = self._predict(columns)
        monitor, baselines = self._monitor, self._monitor.baselines
        measured = scored(self._setup.task, output_B, columns["label"], columns["group_hash"])
        guess_BG = baselines.guess(columns["group_hash"])
        measured = replace(measured, baselines=baselines.score(guess_BG, columns["label"]))
        monitor.prequential.add(measured)
        monitor.outcomes.add(measured.predictions)
        self._log.predicted(columns, torch.from_numpy(output_B))
        self._log.add_point()
        time_B = columns["time"].astype(np.float64)
        self._wait({**columns, _OUTPUT: output_B, _GUESS: guess_BG}, time_B)
        if self._policy != "wait":
            self._enqueue(_relabelled(columns, 0), Early.NEGATIVE)

    def _predict(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the model's output for the events as it is now, in evaluation mode."""
        model, new = self._trainer.model, self._trainer.examples(columns)
        with eval_mode(model), torch.no_grad():
            output_B: NDArray[np.float32] = forward(model, new.features).float().cpu().numpy()
        return output_B

    def _wait(self, columns: Mapping[str, Array], time_B: NDArray[np.float64]) -> None:
        """Let B events wait until their label comes, or their time is up."""
        label_B = columns[self._delay.column].astype(np.float64)
        last_B = time_B + self._delay.wait_seconds
        in_time_B = (label_B > 0) & (label_B <= last_B)
        due_B = np.where(in_time_B, label_B, last_B)
        new = {**columns, WAITED: np.ones(len(time_B), np.bool_)}
        new |= {_DUE: due_B, _IN_TIME: in_time_B}
        self._waiting = _joined(self._waiting, new) if self._waiting else new

    def _decide(self) -> None:
        """Remove the events that are due: enqueue those to train on, and store those that are not trained on again."""
        if not self._waiting:
            return
        due_W = self._waiting[_DUE].astype(np.float64) <= self._clock
        if not due_W.any():
            return
        order = np.flatnonzero(due_W)[np.argsort(self._waiting[_DUE][due_W], kind="stable")]
        due = {name: column[order] for name, column in self._waiting.items()}
        self._waiting = {name: column[~due_W] for name, column in self._waiting.items()}
        in_time = due.pop(_IN_TIME).astype(np.bool_)
        output_n, guess_n = due.pop(_OUTPUT).astype(np.float32), due.pop(_GUESS)
        del due[_DUE]
        self.labelled += int(in_time.sum())
        self.timed_out += int((~in_time).sum())
        known = in_time
        if self._policy != "wait" or self._delay.unmatched == "negative":
            due["label"][~in_time], known = 0, np.ones_like(in_time)
        if known.any():
            label, baselines = due["label"][known], self._monitor.baselines
            measured = scored(self._setup.task, output_n[known], label)
            self._unobserved += replace(measured, baselines=baselines.score(guess_n[known], label))
            baselines.learn(label, due["group_hash"][known])
        if self._policy == "wait":
            self._enqueue(rows_of(due, known), Early.PLAIN)
        else:
            positive = due["label"] == 1
            self._enqueue(rows_of(due, positive), Early.CORRECTED)
            self._store(rows_of(due, ~positive))
        if self._delay.unmatched == "store" and not known.all():
            due["labelled"] = known
            self._store(rows_of(due, ~known))

    def _enqueue(self, columns: Mapping[str, Array], kind: Early) -> None:
        if not columns:
            return
        rows = dict(columns)
        if self._policy != "wait":
            rows |= {WAITED: np.ones(len(rows["label"]), np.bool_), EARLY: np.full(len(rows["label"]), kind, np.uint8)}
        self._queue.append(rows)

    @property
    def _queued(self) -> int:
        return sum(len(part["label"]) for part in self._queue)

    def _full_step(self) -> dict[str, Array]:
        """Return the first enqueued events, as many as a step has; the others wait for more."""
        rows = dict(self._queue[0]) if len(self._queue) == 1 else _joined(*self._queue)
        self._queue.clear()
        if len(rows["label"]) > self._size:
            self._queue.append({name: column[self._size :] for name, column in rows.items()})
        return {name: column[: self._size] for name, column in rows.items()}

    def _store(self, columns: Mapping[str, Array]) -> None:
        """Store events without training on them."""
        if columns:
            self._stored.extend(_split(columns, self._size))


def _split(columns: Mapping[str, Array], size: int) -> Iterator[dict[str, Array]]:
    for begin in range(0, len(columns["label"]), size):
        yield {name: column[begin : begin + size] for name, column in columns.items()}


def _relabelled(columns: Mapping[str, Array], label: int) -> dict[str, Array]:
    return {**columns, "label": np.full_like(columns["label"], label)}


def _joined(*parts: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
