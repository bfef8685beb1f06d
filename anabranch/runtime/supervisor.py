"""Parts as child processes that are started again when they die: what `anabranch up` and the demo run.

Each child leads a new session, so that Ctrl-C reaches the supervisor alone, which decides when and how
a child stops. Its stdin is a pipe that stays open until the supervisor ends: a child that reads the end of the pipe
stops (`daemon.stop_with_parent`), also after a SIGKILL of the supervisor. A standby replaces its part when it reads a
line from that pipe (`daemon.wait_for_parent`).
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from anabranch.config.loader import Config
from anabranch.core.backoff import Backoff
from anabranch.core.errors import SettingsError
from anabranch.core.failures import away_is_dependency
from anabranch.core.files import number_of
from anabranch.core.logs import log_arguments
from anabranch.learner.device.visible_devices import visible_devices
from anabranch.learner.status.report import REPORT as LEARNER_REPORT
from anabranch.runtime.child_environment import without_admin_token
from anabranch.runtime.child_process import (
    Part,
    PartProgress,
    activate,
    close_pipe,
    describe_end,
    progress_of,
    reap,
    signal_group,
    spawn,
)
from anabranch.runtime.lifecycle import Exit
from anabranch.serving.reporting.report import REPORT as SERVING_REPORT
from anabranch.serving.settings import check_versions_from

_POLL_SECONDS = 0.1
_BEYOND_STOP_TIMEOUT = timedelta(seconds=5)
_LEFTOVERS_SECONDS = 5.0
_FREE_DEATHS = 3
"""Deaths in a row after progress that did not last, after which a part is started again at once."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartPolicy:
    """How long to wait before the n-th start in a row that follows a death without progress."""

    first: timedelta = timedelta(seconds=1)
    longest: timedelta = timedelta(seconds=30)
    lasting: timedelta = timedelta(seconds=60)
    """Progress lasts when the part ran for so long, or wrote a checkpoint."""

    def seconds(self, deaths: int) -> float:
        """Return the delay after `deaths` deaths in a row: nothing after the first, then twice as long each time.

        A random part of up to a half is taken off, so that parts that died together do not start together.
        """
        return Backoff(self.first, self.longest, retry_at_once=True).seconds_after(deaths)


@dataclass
class _Child:
    part: Part
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    deaths: int = 0
    """Deaths in a row, the last counted too when it made no progress."""
    brief: int = 0
    """Deaths in a row after progress that did not last."""
    began: float = 0.0
    """When it was started, in seconds of the clock."""
    checkpoint: int | None = None
    """The newest checkpoint when it died last."""
    due: float = 0.0
    """When to start it again, in seconds of the clock."""
    standby: subprocess.Popen[bytes] | None = None
    standby_start: int = 0
    """The value of `starts` when the last standby was started."""


class Supervisor:
    """Restarts parts until it is stopped or one of them ends in a way that a restart cannot fix.

    Used by one thread.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        backoff: RestartPolicy | None = None,
        on_death: Callable[[Part], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; `on_death` is called for one that has died, before it is started again."""
        self._children = [_Child(part) for part in parts]
        self._backoff = backoff or RestartPolicy()
        self._on_death = on_death
        self._clock = clock
        self._leftovers: dict[int, float] = {}
        self.ended: Part | None = None
        """The part that ended everything, when one did."""

    @property
    def restarts(self) -> dict[str, int]:
        """Return how often each part was started again."""
        return {child.part.name: max(0, child.starts - 1) for child in self._children}

    def pids(self) -> dict[str, int]:
        """Return the pid of each part that runs. Any thread may ask."""
        found = [(child.part.name, child.process) for child in self._children]
        return {name: process.pid for name, process in found if process is not None}

    def run(self, stop: threading.Event) -> Exit:
        """Keep the parts alive until `stop` is set (DONE) or one of them ends everything; all are stopped then."""
        try:
            self.start()
            while not stop.wait(_POLL_SECONDS):
                ended = self.check()
                if ended is not None:
                    return ended
            return Exit.DONE
        finally:
            self.stop()

    def start(self) -> None:
        """Start every part, in order."""
        for child in self._children:
            self._begin(child)

    def check(self) -> Exit | None:
        """Check every child once: handle deaths, start parts that are due again, start standbys.

        Returns:
            The exit code with which all parts are to end, or None: SETTINGS when a child ended with it, DEPENDENCY
            when a child that has not run before ended with it on its first start, before any progress.
        """
        self._kill_leftovers()
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                ended = self._handle_death(child, child.process.pid, code)
                if ended is not None:
                    return ended
            self._update_standby(child)
            if child.process is None and self._clock() >= child.due:
                self._begin(child)
        return None

    def stop(self) -> None:
        """SIGTERM to all children in order, then SIGKILL to those that outlive their `stop_timeout`; wait for all.

        Standbys have no state to save, and are killed. An exception meanwhile, such as that of a second Ctrl-C, kills
        the remaining processes at once.
        """
        running = [(child, child.process) for child in self._children if child.process is not None]
        standbys = [child.standby for child in self._children if child.standby is not None]
        try:
            for process in standbys:
                process.kill()
            for _, process in running:
                process.terminate()
            begin = time.monotonic()
            for child, process in running:
                deadline = begin + child.part.stop_timeout.total_seconds()
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.warning("%s (pid %d) did not stop in time and is killed", child.part.name, process.pid)
                    process.kill()
        finally:
            for process in [*standbys, *(process for _, process in running)]:
                process.kill()
                process.wait()
                close_pipe(process)
                self._leftovers[process.pid] = time.monotonic() + _LEFTOVERS_SECONDS
            for child in self._children:
                child.process = child.standby = None
            self._await_leftovers()

    def _begin(self, child: _Child) -> None:
        _start(child)
        child.began = self._clock()

    def _handle_death(self, child: _Child, pid: int, code: int) -> Exit | None:
        part = child.part
        assert child.process is not None
        close_pipe(child.process)
        child.process = None
        self._end_group(pid)
        report = progress_of(part.report, pid)
        progress = report is not None and report.is_any
        if self._on_death is not None:
            self._on_death(part)
        is_first = child.starts == 1 and not progress and not part.has_run_before
        if code == Exit.SETTINGS or (code == Exit.DEPENDENCY and is_first):
            self.ended = part
            log.error("%s ended with exit code %d, which starting it again cannot fix", part.name, code)
            return Exit(code)
        child.deaths = self._deaths(child, report)
        delay = self._backoff.seconds(child.deaths)
        child.due = self._clock() + delay
        when = f"in {delay:.1f} s" if delay else "now"
        log.warning("%s (pid %d) ended with %s; it is started again %s", part.name, pid, describe_end(code), when)
        return None

    def _deaths(self, child: _Child, report: PartProgress | None) -> int:
        """Count the death of a child that has left this report, and return how many in a row the backoff goes by."""
        if report is None or not report.is_any:
            return child.deaths + 1
        ran = self._clock() - child.began
        lasts = report.checkpoint not in (None, child.checkpoint) or ran >= self._backoff.lasting.total_seconds()
        child.checkpoint = report.checkpoint
        child.brief = 0 if lasts else child.brief + 1
        return max(1, child.brief - _FREE_DEATHS + 1)

    def _update_standby(self, child: _Child) -> None:
        """Handle the death of a standby; start one in each life of the child that makes progress."""
        part, standby, process = child.part, child.standby, child.process
        if standby is not None:
            code = standby.poll()
            if code is not None:
                log.warning("the standby of %s (pid %d) ended with %s", part.name, standby.pid, describe_end(code))
                close_pipe(standby)
                self._end_group(standby.pid)
                child.standby = None
        elif part.standby is None or process is None or child.standby_start == child.starts:
            return
        elif (report := progress_of(part.report, process.pid)) is not None and report.is_any:
            child.standby, child.standby_start = spawn(part, part.standby), child.starts
            log.info("pid %d is the standby of %s", child.standby.pid, part.name)

    def _end_group(self, group: int) -> None:
        """SIGTERM the processes that a dead child has left in its session; `_kill_leftovers` kills them later."""
        if signal_group(group, signal.SIGTERM):
            self._leftovers[group] = time.monotonic() + _LEFTOVERS_SECONDS

    def _kill_leftovers(self) -> None:
        for group, deadline in list(self._leftovers.items()):
            reap(group)
            if not signal_group(group, None):
                del self._leftovers[group]
            elif time.monotonic() > deadline:
                signal_group(group, signal.SIGKILL)
                del self._leftovers[group]

    def _await_leftovers(self) -> None:
        self._kill_leftovers()
        for group in self._leftovers:
            signal_group(group, signal.SIGTERM)
        while self._leftovers:
            time.sleep(_POLL_SECONDS / 10)
            self._kill_leftovers()


def pipeline_parts(config: Config, environment: Mapping[str, str] = os.environ) -> list[Part]:
    """Return learner and serving of a pipeline whose config was loaded with these variables.

    The learner, with its ingest and the user's model, is not given the admin token, which is for serving. A part whose
    device is given by its UUID sees that one alone.

    Raises:
        SettingsError: this machine has no device of a UUID, or serving would copy versions to where the learner
            writes, or wait for versions where it writes none.
    """
    pipeline, storage = config.pipeline, config.pipeline.storage
    check_versions_from(pipeline.serving, storage)
    if pipeline.serving.versions_from == "storage" and storage is not None and storage.mode == "mirror":
        raise SettingsError(
            'serving.versions_from = "storage" is for servers without the learner: here both have one state_dir, so '
            'set serving.versions_from = "state_dir", or start learner and serving with a state_dir for each'
        )
    # The path is made absolute because a part may not be started from the same folder.
    arguments = (*config.arguments(), "--supervised", *log_arguments())
    learner_timeout = pipeline.learner.stop_timeout + _BEYOND_STOP_TIMEOUT
    learner = (sys.executable, "-P", "-m", "anabranch.learner", *arguments)
    has_run_before = _has_versions(config.state_dir)
    return [
        Part(
            "learner",
            learner,
            config.state_dir / LEARNER_REPORT,
            {
                **without_admin_token(pipeline.serving.tokens, environment),
                **visible_devices("learner.device", pipeline.learner.device, environment),
            },
            stop_timeout=learner_timeout,
            has_run_before=has_run_before,
            standby=(*learner, "--standby") if pipeline.learner.standby else None,
        ),
        Part(
            "serving",
            (sys.executable, "-P", "-m", "anabranch.serving", *arguments),
            config.state_dir / SERVING_REPORT,
            visible_devices("serving.device", pipeline.serving.device, environment),
            stop_timeout=pipeline.serving.drain + learner_timeout,
            has_run_before=has_run_before,
        ),
    ]


def _has_versions(state_dir: Path) -> bool:
    """Return whether a learner has published a version here; raises DependencyError where that cannot be read."""
    with away_is_dependency("state_dir cannot be read"):
        manifests = (state_dir / "versions").glob("*/manifest.json")
        return any(number_of(manifest.parent.name) is not None for manifest in manifests)


def _start(child: _Child) -> None:
    """Make the standby of a child the part if there is one, else start the part."""
    part, standby, child.standby = child.part, child.standby, None
    if standby is not None and activate(standby):
        child.process = standby
        log.info("%s resumes in its standby (pid %d)", part.name, standby.pid)
    else:
        child.process = spawn(part, part.command)
        log.info("%s started (pid %d)", part.name, child.process.pid)
    child.starts += 1
