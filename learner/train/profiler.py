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

    def step(self, step: int) -> None:
        """Start or end the window; called between steps, of which `step` are done."""
        if self._settings is None:
            return
        end = self._settings.start + self._settings.steps
        if self._profile is None and self._settings.start <= step < end:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile, self._begun = profile(activities=activities), step
            self._profile.start()
        elif self._profile is not None and step >= end:
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
