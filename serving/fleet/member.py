"""Makes a server one of a fleet: it follows the rollout commands of all, and reports itself.

A thread besides the follower's, since a download of minutes must delay neither.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import msgspec

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.learner.object_storage.fleet import (
    REPORT_EVERY,
    FleetRollout,
    FleetServer,
    RolloutFile,
    read_server,
    write_server,
)
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import RegistryState, Versions

_POLL_EVERY = timedelta(seconds=1)
_LONGEST_PAUSE = timedelta(seconds=10)
_MOST_CRASHES = 20
_MOST_OTHERS = 2
"""Reports in a row under the id of this server, by another process, that show that it goes on."""
_PATIENCE = timedelta(seconds=5)
"""Decisions that cannot be read for less than this are no problem."""
_STOP_PATIENCE = timedelta(seconds=3)
"""How long the stop waits for a request that goes on."""

log = logging.getLogger("anabranch.serving")


class FleetMember:
    """Applies `rollout.json` to `state.json` of this host; a context manager around its thread."""

    def __init__(
        self,
        storage: StorageSettings,
        versions: Versions,
        server: str,
        report: Callable[[RegistryState], FleetServer],
        on_error: Callable[[BaseException], None],
        has_failed: Callable[[], bool] = bool,
    ) -> None:
        """Prepare to follow; entering the context starts the thread.

        Args:
            storage: the object store.
            versions: the local versions directory.
            server: id of this server.
            report: returns the report of this server, given its `state.json`; `beat` and `crashes` are filled in here.
            on_error: called with the exception that ended the thread.
            has_failed: returns whether the process ends because of an error: then it does not report that it stops.
        """
        self._has_failed = has_failed
        self._bucket = storage.quick_bucket
        self._file = RolloutFile(self._bucket)
        self._followed: FleetRollout | None = None
        self._taking: int | None = None
        self._versions = versions
        self._server = server
        self._report = report
        self._on_error = on_error
        self._backoff = Backoff(_POLL_EVERY, _LONGEST_PAUSE)
        self._beat: int | None = None
        self._crashes: dict[int, int] = {}
        self._counted: int | None = None
        """The version of which a crash was counted at the start."""
        self._reported_at = float("-inf")
        self._was_ready = False
        self._is_away = False
        self._away: tuple[float, str] | None = None
        """Since when the decisions cannot be followed, and why."""
        self._process, self._others = uuid.uuid4().hex, 0
        self._thread = PeriodicThread("serving-fleet", self._run, _STOP_PATIENCE, ended=self._ended)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop()
        has_failed = error is not None or self._has_failed()
        if not (has_failed or self._thread.alive or self._is_away or self._beat is None):
            with contextlib.suppress(OSError, AnabranchError):
                self._write(self._report(self._versions.state()), stopped=True)

    @property
    def rollout(self) -> FleetRollout | None:
        """The decisions of the fleet that were read last; None before the first. Any thread may ask.

        Those with a canary for this server are given out after it has reported that it takes it: if it dies of it, the
        next process counts that.
        """
        return self._followed

    @property
    def problems(self) -> list[str]:
        """Sentences when the decisions cannot be followed, or two servers have one id. Any thread may ask."""
        away = self._away
        is_long = away is not None and time.monotonic() - away[0] >= _PATIENCE.total_seconds()
        sentences = (
            [f"the decisions of the fleet cannot be followed: {away[1]}"] if away is not None and is_long else []
        )
        if self._others >= _MOST_OTHERS:
            sentences.append(
                f"another server reports under the id {self._server} too, and only one of them counts: "
                "give each host its own name"
            )
        return sentences

    @property
    def lag_seconds(self) -> float:
        """For how long nothing can be copied, since the decisions could not be read yet. Any thread may ask."""
        away = self._away
        return time.monotonic() - away[0] if away is not None and self.rollout is None else 0.0

    def poll(self) -> None:
        """Apply the decisions of the fleet, and report when it is due. Used by the thread, or by a test.

        Raises:
            OSError: the object store cannot be reached, or `state.json` cannot be written.
            AnabranchError: `rollout.json` or `state.json` cannot be used.
        """
        self._file.poll()
        own = self._versions.state()
        if self._file.contents.applied_to(own) != own:
            with self._versions.changing_state():  # a command of another worker writes both
                self._file.poll()
                own = self._versions.state()
                own = self._file.contents.applied_to(own)
                self._versions.write_state(own)
        rollout, report = self._file.contents, self._report(own)
        is_canary = self._server in rollout.canaries and report.version != rollout.canary
        report = msgspec.structs.replace(report, taking=rollout.canary if is_canary else None)
        is_due = time.monotonic() - self._reported_at >= REPORT_EVERY.total_seconds()
        if is_due or report.ready != self._was_ready or report.taking != self._taking:
            self._write(report)
            self._reported_at, self._was_ready, self._taking = time.monotonic(), report.ready, report.taking
        self._followed = rollout

    def _write(self, report: FleetServer, *, stopped: bool = False) -> None:
        if self._beat is None:
            self._begin()
        else:
            self._count_others()
        self._beat = (self._beat or 0) + 1
        changes = {"beat": self._beat, "crashes": self._crashes, "stopped": stopped, "process": self._process}
        write_server(self._bucket, msgspec.structs.replace(report, **changes))

    def _count_others(self) -> None:
        """Count the reports in a row that another process has written under this id since the last one."""
        found = read_server(self._bucket, self._server)
        is_other = found is not None and found.process != self._process
        self._others = self._others + 1 if is_other else 0
        if is_other and self._counted is not None:  # the process before goes on, and has not crashed
            self._crashes[self._counted] -= 1
            self._counted = None

    def _begin(self) -> None:
        """Read the last report of the process before: it has crashed if that does not say that it has stopped."""
        before = read_server(self._bucket, self._server)
        if before is None:
            return
        self._beat, crashes = before.beat, dict(before.crashes)
        version = before.version if before.taking is None else before.taking
        if not before.stopped and version is not None:
            crashes[version] = crashes.pop(version, 0) + 1
            self._counted = version
        self._crashes = dict(list(crashes.items())[-_MOST_CRASHES:])

    def _run(self) -> float:
        try:
            self.poll()
        except (OSError, AnabranchError) as exc:
            if not self._is_away:
                log.warning("the fleet cannot be followed for now: %s", exc)
            self._is_away = True
            self._away = (time.monotonic() if self._away is None else self._away[0]), str(exc)
            return self._backoff.next()
        self._backoff.reset()
        self._is_away, self._away = False, None
        return _POLL_EVERY.total_seconds()

    def _ended(self, exc: BaseException) -> None:
        log.error("the fleet's thread ended", exc_info=exc)
        self._on_error(exc)
