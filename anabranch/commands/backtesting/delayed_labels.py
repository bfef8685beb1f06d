"""Runs of a backtest in which labels come later than their events.

Legend: B events of a batch, W events that wait, n events of a call.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.commands.backtesting.runs import ReplayedTraining
from ingest.events.block import Array
from learner.build import LearnerSpec
from learner.evaluation.prequential import scored
from learner.model.factory import forward
from learner.strategies.base import eval_mode
from learner.strategies.early_negatives import EARLY, Early, check_early

Policy = Literal["wait", "negative", "negative-then-correct"]
"""What is trained on before the label comes: nothing; the event as a negative, and again as a positive when its label
says so; the same with the importance weights of fake negatives."""
POLICIES: tuple[Policy, ...] = ("wait", "negative", "negative-then-correct")

_DUE, _IN_TIME, _OUTPUT = "due", "in_time", "output"


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


class DelayedRun:
    """A run in which an event is scored when it comes, and trained on when the policy says so.

    Time is that of the events. It moves with each batch: labels up to the time of the first event of a batch are known
    before it is scored.
    """

    def __init__(self, spec: LearnerSpec, device: torch.device, policy: Policy, delay: LabelDelay) -> None:
        """Raises SettingsError where the policy does not fit the labels or the strategy."""
        self._training = ReplayedTraining(spec, device)
        self.points = self._training.points
        self._policy, self._delay, self._batch_size = policy, delay, spec.learner.batch_size
        setup, strategy = self._training.setup, spec.learner.strategy
        if policy != "wait":
            check_early(setup.task, setup.schema.label, setup.strategy, strategy.name)
        self._clock = -np.inf
        self._waiting: dict[str, Array] = {}
        self._queue: deque[dict[str, Array]] = deque()
        """Events to train on, in parts."""
        self.labelled = self.timed_out = 0
        """Events whose label came in time, and others that have waited in vain."""

    def add(self, columns: Mapping[str, Array]) -> None:
        """Train on the events whose label has come, score the new ones, and train on those too if they are early."""
        time_B = columns["time"].astype(np.float64)
        self._clock = max(self._clock, float(time_B[0]))
        final = self._decided()
        self._train()
        if final:
            self._store(final)
        output_B = self._predict(columns)
        self._training.measure(len(time_B), scored(self._training.setup.task, output_B, columns["label"]))
        self._wait(columns, time_B, output_B)
        if self._policy != "wait":
            self._enqueue(_relabelled(columns, 0), Early.NEGATIVE)
            self._train()
        self._clock = max(self._clock, float(time_B.max()))

    def _predict(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the model's output for the events as it is now, in evaluation mode."""
        new = self._training.trainer.examples(columns)
        with eval_mode(self._training.trainer.model), torch.no_grad():
            output_B: NDArray[np.float32] = forward(self._training.trainer.model, new.features).float().cpu().numpy()
        return output_B

    def _wait(self, columns: Mapping[str, Array], time_B: NDArray[np.float64], output_B: NDArray[np.float32]) -> None:
        """Let B events wait until their label comes, or their time is up."""
        label_B = columns[self._delay.column].astype(np.float64)
        last_B = time_B + self._delay.wait_seconds
        in_time_B = (label_B > 0) & (label_B <= last_B)
        due_B = np.where(in_time_B, label_B, last_B)
        new = {**columns, _DUE: due_B, _IN_TIME: in_time_B, _OUTPUT: output_B}
        self._waiting = _joined(self._waiting, new) if self._waiting else new

    def _decided(self) -> dict[str, Array]:
        """Remove the events that are due, enqueue those to train on, and return those with their final label."""
        if not self._waiting:
            return {}
        due_W = self._waiting[_DUE].astype(np.float64) <= self._clock
        if not due_W.any():
            return {}
        order = np.flatnonzero(due_W)[np.argsort(self._waiting[_DUE][due_W], kind="stable")]
        due = {name: column[order] for name, column in self._waiting.items()}
        self._waiting = {name: column[~due_W] for name, column in self._waiting.items()}
        in_time = due[_IN_TIME].astype(np.bool_)
        self.labelled += int(in_time.sum())
        self.timed_out += int((~in_time).sum())
        negative = self._policy != "wait" or self._delay.unmatched == "negative"
        if negative:
            due["label"][~in_time] = 0
        final = due if negative else {name: column[in_time] for name, column in due.items()}
        if self._policy == "wait":
            self._enqueue(final, Early.PLAIN)
        else:
            positive = final["label"] == 1
            self._enqueue({name: column[positive] for name, column in final.items()}, Early.CORRECTED)
        return final

    def _enqueue(self, columns: Mapping[str, Array], kind: Early) -> None:
        names = [name for name in columns if name not in (_DUE, _IN_TIME, _OUTPUT)]
        rows = {name: columns[name] for name in names}
        if self._policy == "negative-then-correct":
            rows[EARLY] = np.full(len(rows["label"]), kind, np.uint8)
        if len(rows["label"]):
            self._queue.append(rows)

    def _train(self) -> None:
        """Train on the enqueued events in steps of a full batch; the others wait for more."""
        size = self._batch_size
        count = sum(len(part["label"]) for part in self._queue)
        if count < size:
            return
        rows = dict(self._queue[0]) if len(self._queue) == 1 else _joined(*self._queue)
        self._queue.clear()
        last = count - count % size
        for begin in range(0, last, size):
            part = {name: column[begin : begin + size] for name, column in rows.items()}
            self._training.step(self._training.trainer.examples(part))
        if last < count:
            self._queue.append({name: column[last:] for name, column in rows.items()})

    def _store(self, final: Mapping[str, Array]) -> None:
        """Hold events for replay with their final label."""
        trainer = self._training.trainer
        if len(final["label"]):
            output = torch.from_numpy(np.ascontiguousarray(final[_OUTPUT])).to(trainer.device)
            self._training.store(trainer.examples(final), output)


def _relabelled(columns: Mapping[str, Array], label: int) -> dict[str, Array]:
    return {**columns, "label": np.full_like(columns["label"], label)}


def _joined(*parts: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
