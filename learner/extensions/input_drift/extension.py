"""Compares the inputs and predictions of new events, window by window, with those that the model was trained on before.

The reference is the model's training data of late, and fades: a model that goes on learning has learned slow changes,
which need no alert. A column of a window that has drifted is no part of it, until the drift has lasted for a day.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.core.atomic_files import replace_file
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.part_formats import Covers
from anabranch.learner.evaluate.input_drift import (
    FEWEST,
    FILE,
    WINDOW,
    DriftedInput,
    InputColumn,
    InputComparison,
    InputReference,
    InputWindow,
    TimeShare,
    columns_of,
    decode_array,
    drifted,
    encode_array,
    sentence,
    values_of,
)
from anabranch.learner.evaluate.outcomes import kind_of
from anabranch.learner.extension import Extension
from anabranch.learner.model.task import Task
from anabranch.learner.settings.learner import DriftSettings
from anabranch.learner.status.report import InputReport
from anabranch.learner.stream.batch import Batch
from anabranch.learner.train.step_result import StepResult


def remove_reference(state_dir: Path) -> None:
    """Let servers compare nothing: what they would compare requests with is no longer written. Raises OSError."""
    (state_dir / FILE).unlink(missing_ok=True)


PREDICTIONS = "predictions"
_PART = 800
"""Of the time of steps inputs take 1 / `_PART` at most, and predictions as much."""
_REPORTED = 20
"""Columns in reports, those with the largest PSI."""
_ACCEPTED_MS, _ACCEPTED_EVENTS = 86_400_000, 1_000_000
"""How long a drift lasts until it becomes the reference: by record times, or in events."""
_WRITE_SECONDS = 30.0
_AGAINST = "against the events before"

log = logging.getLogger(__name__)


class _Watch:
    """A reference, and the window that is compared with it next. Used by one thread."""

    def __init__(self, columns: Sequence[InputColumn], bound: float) -> None:
        self.columns = columns
        self.reference = InputReference.of(columns, bound)
        self.window = InputWindow(len(columns))
        self.seen = self.events = 0
        """Events of the window, and of all windows."""
        self.found: InputComparison | None = None
        """Of the last window."""
        self._since = dict[int, tuple[int, int]]()
        """Since when a column has drifted: events, and record time."""

    @property
    def drifted(self) -> list[DriftedInput]:
        """What has drifted."""
        return [] if self.found is None else drifted(self.columns, self.found)

    def add(self, values_FN: NDArray[np.float64], time_ms: int) -> bool:
        """Add values of events that were seen, and compare the window if it is full; return whether it was."""
        reference, window = self.reference, self.window
        window.add(values_FN)
        if self.seen < WINDOW or window.rows < (WINDOW if reference.unfitted else FEWEST):
            return False
        self.events += self.seen
        values, counts = window.values, window.count(reference)
        self.found = found = reference.compare(counts)
        reference.add(counts, found)
        self._since = {
            index: self._since.get(index, (self.events, time_ms)) for index in np.flatnonzero(found.drifted).tolist()
        }
        for index, (since, since_ms) in self._since.items():
            if self.events - since >= _ACCEPTED_EVENTS or time_ms - since_ms >= _ACCEPTED_MS:
                reference.windows[index] = -1
        if reference.unfitted and values.shape[1] >= FEWEST:
            reference.fit(values)
        self.window, self.seen = InputWindow(len(self.columns)), 0
        return True

    def drop_values(self) -> None:
        """Keep no single value: those of the window are counted, or gone where no bins are known."""
        if self.reference.fits:
            self.window.count(self.reference)
        else:
            self.window, self.seen = InputWindow(len(self.columns)), 0

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint; without those of the first window, which are of single events."""
        known = self.reference.fits > 0
        found = self.found if known else None
        return {
            "reference": self.reference.encode().decode(),
            "window": encode_array(self.window.count(self.reference, keep=True)) if known else None,
            "seen": self.seen if known else 0,
            "events": self.events,
            "since": list(self._since.items()),
            "found": None if found is None else [encode_array(each) for each in found],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; of other columns it begins again."""
        reference = InputReference.decode(state["reference"])
        if reference is None or list(reference.columns) != list(self.columns):
            return
        reference.bound, shape = self.reference.bound, (len(self.columns),)
        self.reference, self.events, self.seen = reference, state["events"], state["seen"]
        if state["window"] is not None:
            self.window.counts = decode_array(state["window"], self.window.counts.shape).astype(np.int64)
        self._since = {index: (events, time_ms) for index, (events, time_ms) in state["since"]}
        if state["found"] is not None:
            psi, ks, missing, found = (decode_array(each, shape) for each in state["found"])
            self.found = InputComparison(psi, ks, missing, found > 0)


class InputDrift(Extension):
    """Names the features whose values have drifted, and says whether the predictions have."""

    name = "input_drift"

    def __init__(
        self,
        settings: DriftSettings,
        schema: Schema,
        task: Task,
        state_dir: Path,
        *,
        rests: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rests`: whether events are left out so that little time is taken.

        Raises:
            SettingsError: what is to be ignored is no feature.
        """
        self._task, self._classes = task, schema.label.classes
        columns = columns_of(schema, settings.ignored)
        self._inputs = _Watch(columns, settings.psi) if columns else None
        self._predictions = _Watch([InputColumn(PREDICTIONS, PREDICTIONS, 0)], settings.psi)
        part = _PART if rests else 1
        self._input_rest, self._prediction_rest = TimeShare(part, clock), TimeShare(part, clock)
        self._file, self._clock, self._write_at = state_dir / FILE, clock, float("-inf")
        self._warnings: Sequence[str] = ()
        self._logged = set[str]()
        """The columns that had drifted after the last window."""
        self._unwritten: str | None = None

    @override
    def trained(self, batch: Batch, result: StepResult) -> None:
        if result.output_B is not None and (rows := len(batch)):
            self._predictions.seen += rows
            if not self._prediction_rest.rests:
                self._prediction_rest.run(lambda: self._add(self._predictions, self._predicted(result), batch))

    @override
    def settle(self, batch: Batch) -> None:
        if (watch := self._inputs) is not None and len(batch):
            watch.seen += len(batch)
            self._input_rest.run(lambda: self._add(watch, values_of(watch.columns, batch.new, "feature."), batch))

    @override
    def run_if_due(self) -> None:
        if self._write_at <= self._clock() and self._inputs is not None and self._inputs.reference.fits:
            self._write_at = self._clock() + _WRITE_SECONDS
            try:
                replace_file(self._file, self._inputs.reference.encode(), durable=False)
            except OSError as exc:
                self._unwritten = (
                    f"{self._file} cannot be written: {exc.strerror or exc}; until it is, servers compare requests "
                    "with older events"
                )
            else:
                self._unwritten = None

    @property
    @override
    def warnings(self) -> Sequence[str]:
        return [*self._warnings, *([] if self._unwritten is None else [self._unwritten])]

    @override
    def report(self) -> Mapping[str, Any]:
        psi, ks, missing = dict[str, float](), dict[str, float](), dict[str, float]()
        for watch in self._watches:
            if (found := watch.found) is not None:
                for index in np.argsort(-found.psi, kind="stable")[:_REPORTED].tolist():
                    name = watch.columns[index].name
                    each = tuple(round(float(numbers[index]), 4) for numbers in found[:3])
                    psi[name], ks[name], missing[name] = each
        names = [each.name for watch in self._watches for each in watch.drifted]
        return {"inputs": InputReport(psi=psi, ks=ks, missing=missing, drifted=names)}

    @override
    def state(self) -> Any:
        return [watch.state() for watch in self._watches]

    @override
    def restore(self, state: Any) -> None:
        if len(state) == len(self._watches):
            for watch, each in zip(self._watches, state, strict=True):
                watch.restore(each)
            self._renew_warnings()

    @override
    def erase(self, covers: Covers) -> int:
        for watch in self._watches:
            watch.drop_values()
        return 0

    @property
    def _watches(self) -> list[_Watch]:
        return [self._predictions] if self._inputs is None else [self._inputs, self._predictions]

    def _add(self, watch: _Watch, values_FN: NDArray[np.float64] | None, batch: Batch) -> None:
        if values_FN is not None and watch.add(values_FN, int(batch.new["time_ms"].max())):
            self._renew_warnings()

    def _predicted(self, result: StepResult) -> NDArray[np.float64] | None:
        """Return a number for each prediction, float64 `[1, B]`: log-odds, class or value; None where it has more."""
        kind, output = kind_of(self._task, self._classes), result.output_B
        assert output is not None
        output = output.detach().float()
        if kind == "two-classes":
            output = output[:, 1] - output[:, 0]
        elif kind == "classes":
            output = output.argmax(dim=1)
        elif kind != "number" or output.numel() != len(output):
            return None
        return output.reshape(1, -1).double().cpu().numpy()

    def _renew_warnings(self) -> None:
        inputs = [] if self._inputs is None else self._inputs.drifted
        found = [sentence("feature", inputs, _AGAINST)] if inputs else []
        found += [f"predictions have drifted: PSI {each.psi:.2f} {_AGAINST}" for each in self._predictions.drifted]
        names = {each.name for watch in self._watches for each in watch.drifted}
        if names - self._logged:
            log.warning("%s", "; ".join(found))
        self._warnings, self._logged = found, names
