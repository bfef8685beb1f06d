"""Writes a trace of a few steps, for a browser: `learner.profile`."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from anabranch.learner.settings.learner import ProfileSettings
from anabranch.learner.state_dir.folders import TRACES

log = logging.getLogger(__name__)


class ProfilerWindow:
    """Traces one window of steps, and writes it as JSON in Chrome's format. Called by the loop's thread."""

    def __init__(self, settings: ProfileSettings | None, state_dir: Path) -> None:
        self._settings = settings
        self._folder = state_dir / TRACES
        self._profile: profile | None = None
        self._begun = 0
        self._last: int | None = None
        """The step after which this was called last: a round may go past the whole window."""

    def step(self, step: int) -> None:
        """Start or end the window; called between rounds, after `step` steps."""
        if self._settings is None:
            return
        start, steps = self._settings.start, self._settings.steps
        before, self._last = step if self._last is None else self._last, step
        if self._profile is None and start <= step and before < start + steps:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile, self._begun = profile(activities=activities), step
            self._profile.start()
        elif self._profile is not None and step >= self._begun + steps:
            self._write(step)

    def close(self) -> None:
        """End a window that the end of the run cuts off."""
        if self._profile is not None:
            self._profile.stop()
            self._profile, self._settings = None, None

    def _write(self, step: int) -> None:
        """Write the trace, while the next step waits. A full disk costs only the trace."""
        assert self._profile is not None
        self._profile.stop()
        path = self._folder / f"steps-{self._begun}-{step}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            log.info("a trace of steps %d to %d is in %s", self._begun, step, path)
        except OSError as exc:
            log.warning("the trace of steps %d to %d cannot be written to %s: %s", self._begun, step, path, exc)
        self._profile, self._settings = None, None
