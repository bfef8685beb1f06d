"""Compares the features of requests with those of the events that the model was trained on, as the learner wrote them.

Legend: F columns, N rows of requests.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.input_drift import (
    FILE,
    WINDOW,
    InputReference,
    InputWindow,
    TimeShare,
    columns_of,
    drifted,
    sentence,
    values_of,
)
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.protocol.tensors import Array

_PART = 200
_READ_SECONDS = 30.0
_REPORTED = 20
"""Columns in reports, those with the largest PSI."""


class RequestSkew:
    """Counts features of requests, a thousand rows at a time. Belongs to the event loop's thread."""

    def __init__(
        self,
        state_dir: Path,
        schema: Schema,
        metrics: ServingMetrics,
        clock: Callable[[], float] = time.monotonic,
        part: int = _PART,
    ) -> None:
        """Take the state directory, where a learner may write a reference; `part`: see `TimeShare`."""
        self._path, self._columns, self._metrics = state_dir / FILE, columns_of(schema), metrics
        self._clock, self._rest = clock, TimeShare(part, clock)
        self._read_at = float("-inf")
        self._read: tuple[int, int] | None = None
        self._reference: InputReference | None = None
        self._window = InputWindow(0)
        self.psi: Mapping[str, float] = {}
        """Of the last thousand rows, of the 20 columns with the largest; empty before that, and without a learner."""
        self.warnings: Sequence[str] = ()
        """One sentence while features have drifted."""

    def add(self, features: Mapping[str, Array]) -> None:
        """Count the features `[N, ...]` of a request, unless that would take more than its share of the time."""
        self._rest.run(lambda: self._add(features))

    def _add(self, features: Mapping[str, Array]) -> None:
        if self._clock() >= self._read_at:
            self._read_at = self._clock() + _READ_SECONDS
            self._refresh()
        if (reference := self._reference) is None:
            return
        window = self._window
        window.add(values_of(reference.columns, {name: column[:WINDOW] for name, column in features.items()}))
        if window.rows < WINDOW:
            return
        found = reference.compare(window.count(reference))
        names, skewed = [each.name for each in reference.columns], drifted(reference.columns, found)
        order = np.argsort(-found.psi, kind="stable")[:_REPORTED].tolist()
        self.psi = {names[index]: round(float(found.psi[index]), 4) for index in order}
        self.warnings = [sentence("request feature", skewed, "against events of training")] if skewed else []
        self._metrics.inputs(dict(zip(names, found.psi.tolist(), strict=True)), {each.name for each in skewed})
        self._window = InputWindow(len(names))

    def _refresh(self) -> None:
        """Read the reference if it was replaced; without one nothing is compared."""
        try:
            written = self._path.stat()
            if (version := (written.st_ino, written.st_mtime_ns)) == self._read:
                return
            found = InputReference.decode(self._path.read_bytes())
        except OSError:
            version, found = None, None
        if found is not None and not set(found.columns) <= set(self._columns):
            found = None  # of another schema: the learner was not started with this one yet
        before, self._reference, self._read = self._reference, found, version
        if found is None or (before is not None and before.columns != found.columns):
            self.psi, self.warnings = {}, ()
            self._metrics.inputs({}, frozenset())
        if found is not None and (before is None or before.fits != found.fits or before.columns != found.columns):
            self._window = InputWindow(len(found.columns))
