"""What makes the server of this host one of a fleet: the follower of versions, and the member."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from anabranch.core.errors import SettingsError
from anabranch.learner.object_storage.fleet import FleetServer
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.status.report import read_report as read_learner
from anabranch.learner.versions.format import RegistryState, Versions
from anabranch.serving.fleet.follower import VersionFollower
from anabranch.serving.fleet.member import FleetMember
from anabranch.serving.reporting.report import ServingReport


def refuse_learners_directory(state_dir: Path, storage: StorageSettings) -> None:
    """Raise SettingsError where a learner publishes into the directory that copies would go to."""
    if storage.mode == "mirror" and read_learner(state_dir) is not None:
        raise SettingsError(
            f'serving.versions_from = "storage" copies versions into state_dir = {state_dir}, which a learner writes; '
            'give this server its own state_dir, or set serving.versions_from = "state_dir"'
        )


class FleetHost:
    """Follows versions and rollout commands for all workers of this host; a context manager around its threads."""

    def __init__(
        self,
        storage: StorageSettings,
        versions: Versions,
        server: str,
        slo: timedelta,
        report: Callable[[], ServingReport | None],
        on_error: Callable[[BaseException], None],
        has_failed: Callable[[], bool],
    ) -> None:
        """Prepare to follow; entering the context starts the threads.

        Args:
            storage: the object store.
            versions: the local versions directory.
            server: id of this server.
            slo: `serving.slo`.
            report: returns the newest report of all workers; None before the first.
            on_error: called with the exception that ended a thread.
            has_failed: returns whether the process ends because of an error.
        """
        self.server = server
        self._slo = slo
        self._report = report
        self._member = FleetMember(storage, versions, server, self._of_fleet, on_error, has_failed)
        self._follower = VersionFollower(storage, versions, server, lambda: self._member.rollout, on_error)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._member)
        self._stack.enter_context(self._follower)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def problems(self) -> list[str]:
        """Sentences when versions or decisions cannot be followed. Any thread may ask."""
        return [*self._follower.problems, *self._member.problems]

    @property
    def lag_seconds(self) -> float:
        """For how long there has been a newer version that is not here. Any thread may ask."""
        return max(self._follower.lag_seconds, self._member.lag_seconds)

    def _of_fleet(self, state: RegistryState) -> FleetServer:
        report = self._report()
        if report is None:
            return FleetServer(id=self.server, beat=0, time=0.0, address="", ready=False)
        shared = {name: getattr(report, name) for name in FleetServer.__struct_fields__ if hasattr(report, name)}
        own = {"id": self.server, "beat": 0, "previous": state.previous, "pinned": state.pinned}
        counts = {"slo_seconds": self._slo.total_seconds(), "problems": len(report.problems)}
        return FleetServer(**{**shared, **own, **counts})
