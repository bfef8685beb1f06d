"""Outcomes of a model's outputs, from which measures follow: of held-out events, and of new ones before training.

Legend: B events, G held-out ones, C classes, K columns of an outcome.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Label, Schema
from anabranch.learner.evaluate.measures import (
    Estimate,
    FadedCounts,
    Kind,
    Measure,
    Outcomes,
    Window,
    fault_of,
    measure_of,
    measures_of,
    own_measure,
)
from anabranch.learner.model.answers import LEAST, Answers
from anabranch.learner.model.task import Classification, MultiLabel, Regression, Task, TaskMeasure

_MOST_LABELS = 256
"""With more classes of several labels there are no measures: an outcome has a number for each."""
_TOP = 5
_WINDOW, _MOST_LABELLED = 5000, 100_000
"""Events of the window, of several labels also times their classes: estimates pause the loop for so long."""
_HALF_LIFE = 50_000.0
_WAITING, _WAITING_BYTES = 5000, 8 << 20
"""Events whose predictions are copied to the host at once, and bytes on the device that they take at most."""
_RECENT, _RECENT_BYTES = 10_000, 8 << 20
"""Events whose outputs are kept for a calibration, and the most bytes: of more than 209 classes these are fewer."""
_SHARE = 800
"""Estimates take at most 1 / `_SHARE` of a processor."""


log = logging.getLogger(__name__)


def kind_of(task: Task, classes: int | None) -> Kind | None:
    """Return what a task predicts; None where no measure is known for it, as for one label at each position."""
    if isinstance(task, Classification):
        return "two-classes" if classes == 2 else "classes"
    if isinstance(task, MultiLabel):
        return "labels" if classes is not None and classes <= _MOST_LABELS else None
    return "number" if isinstance(task, Regression) else None


def predicted_by(kind: Kind, output_B: Tensor, label_B: Tensor) -> Tensor:
    """Return the predictions of `Outcomes`, float32 `[B, K]`, from an output and labels on the same device."""
    output = output_B.detach().float()
    if kind == "two-classes":
        return output[:, 1:2] - output[:, 0:1]
    if kind != "classes":
        return output.reshape(len(output), -1)
    log_BC = output.log_softmax(dim=1)
    best_B, class_B = log_BC.max(dim=1)
    of_label_B1 = log_BC.gather(1, label_B.long()[:, None])
    above_B = (log_BC >= of_label_B1).sum(dim=1) - 1
    return torch.stack([class_B.float(), best_B.exp(), of_label_B1[:, 0], above_B.float()], dim=1)


class TaskMeasures:
    """The measures of a pipeline's task, and the user's own of them. Immutable, but for `warning`."""

    def __init__(self, task: Task, label: Label, *, groups: bool = False, named: Iterable[str] = ()) -> None:
        """Take the usual ones, the user's own, and those that `gate.measures` names; `groups`: whether the schema has a
        group.

        Raises:
            SettingsError: the task has no such measure, or one of the user's cannot be one.
        """
        self.kind = kind_of(task, label.classes)
        self.columns = {"two-classes": 1, "classes": 4, "number": 1, "labels": label.classes or 0, None: 0}[self.kind]
        """K; 0 where the task has no measures."""
        self.each: dict[str, Measure] = {}
        names = measures_of(self.kind, groups=groups) if self.kind is not None else ()
        if self.kind == "classes" and (label.classes or 0) <= _TOP:
            names = tuple(name for name in names if name != f"top_{_TOP}")  # it is always 1
        own = self._own(getattr(task, "measures", ()))
        for name in dict.fromkeys([*names, *named]):
            if name in own:
                continue
            if self.kind is None:
                raise SettingsError(f'gate.measures: "{name}" is no measure of this task, which has none; remove it')
            try:
                self.each[name] = measure_of(name, self.kind, groups=groups, others=own)
            except ValueError as exc:
                raise SettingsError(f"gate.measures: {exc}") from exc
        self.each |= own
        self._groups = groups
        self.warning: str | None = None
        """One sentence where a measure of the user's was not defined on the held-out events. Any thread may read it."""

    def _own(self, given: Any) -> dict[str, Measure]:
        """Return the measures that the user's task has, by name."""
        if not isinstance(given, list | tuple) or not all(isinstance(each, TaskMeasure) for each in given):
            raise SettingsError("model.task: measures of the task has to be a list of TaskMeasure")
        if given and self.kind is None:
            raise SettingsError(
                "model.task: the task has measures, which need predictions of classes or numbers, and of several "
                'labels at most 256; derive it from "classification", "multilabel" or "regression", or remove them'
            )
        found = dict[str, Measure]()
        for each in given:
            if each.name in found:
                raise SettingsError(f'model.task: two measures of the task are called "{each.name}"')
            try:
                found[each.name] = own_measure(each.name, each.of, higher=each.higher, relative=each.relative)
            except ValueError as exc:
                raise SettingsError(f"model.task: {exc}") from exc
        return found

    def values(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the value of each measure on the held-out events that is defined, and set `warning`."""
        values = {name: measure.value(outcomes) for name, measure in self.each.items()}
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        own = [each for name, each in self.each.items() if each.own is not None and name not in known]
        before, self.warning = self.warning, next(filter(None, (fault_of(each, outcomes) for each in own)), None)
        if self.warning is not None and before is None:
            log.warning("%s", self.warning)
        return known

    @classmethod
    def of(cls, task: Task, schema: Schema, named: Iterable[str] = ()) -> "TaskMeasures":
        """Return those of a task and a schema; raises as the constructor does."""
        return cls(task, schema.label, groups=bool(schema.group), named=named)

    def outcomes(self, predicted_GK: NDArray[Any], columns: Mapping[str, Array]) -> Outcomes:
        """Return the outcomes of G events, columns `[G, ...]`; those that are not finite are among them."""
        assert self.kind is not None
        group = columns["group_hash"].astype(np.uint64) if self._groups else None
        return Outcomes(self.kind, predicted_GK, columns["label"], group)


class Predictions(NamedTuple):
    """Outputs for B events before training on them, in parts on any device, and their labels."""

    kind: Kind
    outputs: Sequence[Tensor]
    label_B: NDArray[Any]
    group_B: NDArray[Any] | None


def predictions_of(
    task: Task, outputs: Sequence[Tensor], label_B: NDArray[Any], group_B: NDArray[Any] | None = None
) -> tuple[Predictions, ...]:
    """Return the predictions of B events; none where no measure is known for the task."""
    if not len(label_B):
        return ()
    kind = kind_of(task, outputs[0].shape[1] if outputs[0].ndim == 2 else None)
    return () if kind is None else (Predictions(kind, outputs, label_B, group_B),)


def _joined(parts: Sequence[Predictions]) -> Outcomes:
    """Return the outcomes of predictions of one kind, at least of one, which are copied to the host together."""
    kind = parts[0].kind
    output = torch.cat([output for part in parts for output in part.outputs]).detach()
    label = np.concatenate([part.label_B for part in parts])
    groups = [np.zeros(len(p.label_B), np.uint64) if p.group_B is None else p.group_B for p in parts]
    with torch.no_grad():
        on_device = torch.from_numpy(label).to(output.device) if kind == "classes" else output
        predicted = predicted_by(kind, output, on_device).cpu().numpy()
    return Outcomes(kind, predicted, label, np.concatenate(groups))


def log_probabilities(parts: Sequence[Predictions]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the log-probabilities of classes `[N, C]`, and the labels `[N]`, without events that are not finite."""
    if not parts:
        return np.empty((0, 2), np.float32), np.empty(0, np.int64)
    with torch.inference_mode():
        output = torch.cat([each.float() for part in parts for each in part.outputs])
        log_NC = output.log_softmax(dim=1).clamp_min(LEAST).cpu().numpy()
    finite_N = np.isfinite(log_NC).all(axis=1)
    return log_NC[finite_N], np.concatenate([part.label_B for part in parts]).astype(np.int64)[finite_N]


def class_counts(outcomes: Outcomes, classes: int) -> NDArray[np.int64] | None:
    """Return of each class how many events have it, how many of these were found, and how often it was the answer.

    int64 `[C, 3]`; None where an event has no single class. Of two classes, log-odds above 0 are the answer 1.
    """
    if outcomes.kind not in ("two-classes", "classes"):
        return None
    first_G = outcomes.predicted[:, 0]
    answer_G = (first_G > 0).astype(np.int64) if outcomes.kind == "two-classes" else first_G.astype(np.int64)
    label_G = outcomes.label.astype(np.int64)
    of_each = label_G, label_G[answer_G == label_G], answer_G
    return np.stack([np.bincount(numbers, minlength=classes) for numbers in of_each], axis=1)


class StreamOutcomes:
    """The outcomes of new events before training on them: of the newest ones, and faded counts of two classes.

    Predictions wait until the measures are read, and leave once there are 5,000 newer ones; those of two classes are
    added then, since the faded counts need all. The window is not in checkpoints: it begins again. Used by
    one thread.
    """

    def __init__(self, *, keep: bool = False) -> None:
        """`keep`: whether outputs of classes are kept as they are, from which versions learn how to answer."""
        self._recent: deque[Predictions] | None = deque() if keep else None
        self._recent_rows = 0
        self.answers: Answers | None = None
        """By which later predictions are answered; measures are of the answers. None: as the model outputs them."""
        self._waiting = deque[Predictions]()
        self._rows = self._bytes = 0
        self._window: Window | None = None
        self.faded = FadedCounts(_HALF_LIFE)

    def add(self, new: Sequence[Predictions]) -> None:
        """Add the predictions of new events, of one kind in all calls."""
        for each in map(self._answered, new):
            self._waiting.append(each)
            self._rows += len(each.label_B)
            self._bytes += _bytes_of(each)
            if each.kind != "two-classes":
                while self._rows - len(self._waiting[0].label_B) >= _WINDOW:
                    oldest = self._waiting.popleft()
                    self._rows -= len(oldest.label_B)
                    self._bytes -= _bytes_of(oldest)
            elif self._rows >= _WAITING:
                self.settle()
        if self._bytes >= _WAITING_BYTES:
            self.settle()

    @property
    def recent(self) -> tuple[Predictions, ...] | None:
        """The outputs of the newest 10,000 events; None where they are not kept."""
        return None if self._recent is None else tuple(self._recent)

    def _answered(self, new: Predictions) -> Predictions:
        """Return predictions as they are answered, and keep those of the model."""
        if self._recent is None or new.kind not in ("two-classes", "classes"):
            return new
        outputs = [output.detach() for output in new.outputs]
        most = min(_RECENT, _RECENT_BYTES // max(4 * output.shape[1] for output in outputs))
        self._recent.append(new._replace(outputs=outputs))
        self._recent_rows += len(new.label_B)
        while self._recent_rows - len(self._recent[0].label_B) >= most:
            self._recent_rows -= len(self._recent.popleft().label_B)
        if self.answers is None:
            return new
        with torch.no_grad():
            answers = self.answers.to(outputs[0].device)
            return new._replace(outputs=[answers(output) for output in outputs])

    def settle(self) -> None:
        """Add what waits to be added."""
        if not self._waiting:
            return
        new, self._rows, self._bytes = _joined(self._waiting), 0, 0
        self._waiting.clear()
        if self._window is None:
            columns = new.predicted.shape[1]
            rows = min(_WINDOW, _MOST_LABELLED // columns) if new.kind == "labels" else _WINDOW
            self._window = Window(new.kind, columns, new.label.shape[1:], rows)
        self._window.add(new)
        if new.kind == "two-classes":
            self.faded.add(new)

    @property
    def newest(self) -> Outcomes | None:
        """The outcomes of the newest 5,000 events of this process; None before the first."""
        self.settle()
        return None if self._window is None else self._window.outcomes

    def estimate(self, window: str, measure: Measure) -> Estimate | None:
        """Return a measure of the window `now`, of the newest events, or `faded`; None where it is not known."""
        self.settle()
        if window == "faded":
            return self.faded.estimate(measure)
        return None if (newest := self.newest) is None else measure.estimate(newest)

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        self.settle()
        return self.faded.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.faded.restore(state)


def _bytes_of(predictions: Predictions) -> int:
    return sum(output.nbytes for output in predictions.outputs)


class Estimates:
    """Estimates of measures by window, of which one is renewed after the other. Used by one thread; any may read."""

    def __init__(self, windows: Iterable[str], measures: Iterable[Measure], share: int = _SHARE) -> None:
        """`share`: they take at most 1 / `share` of a processor."""
        self._measures, self._share = tuple(measures), share
        self._turns = deque[tuple[str, Measure]]()
        self._rested_at = 0.0
        self.now: Mapping[tuple[str, str], Estimate] = {}
        """By the name of the measure and the window; it is replaced, not changed."""
        self.follow(windows)

    def follow(self, windows: Iterable[str]) -> None:
        """Estimate these windows from now on: new ones after those that wait for their turn."""
        windows = dict.fromkeys(windows)
        before = {window for window, _ in self._turns}
        new = [(window, measure) for window in windows if window not in before for measure in self._measures]
        self._turns = deque([*(turn for turn in self._turns if turn[0] in windows), *new])
        self.now = {key: each for key, each in self.now.items() if key[1] in windows}

    def renew(self, estimate: Callable[[str, Measure], Estimate | None]) -> None:
        """Renew estimates, each once at most, until they have taken their share of the time."""
        for _ in range(len(self._turns)):
            if time.monotonic() < self._rested_at:
                return
            window, measure = self._turns[0]
            self._turns.rotate(-1)
            begin = time.thread_time()
            found = estimate(window, measure)
            self._rested_at = time.monotonic() + (self._share - 1) * (time.thread_time() - begin)
            others = {key: each for key, each in self.now.items() if key != (measure.name, window)}
            self.now = others if found is None else {**others, (measure.name, window): found}
