"""Several serving processes behind one port: what each is told, and how what they say becomes one.

They inherit one listening socket, so that whoever has time takes the next request, and what waits at a process that is
killed is not lost. Each has a model of its own and swaps versions by itself. In a folder of this server each leaves its
report and its counts; whoever is asked adds up those of all.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import prometheus_client.values
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from learner.state_dir.version import RegistryState
from serving.metrics import Metrics
from serving.reporting.health import ReportAge
from serving.reporting.report import REPORT, ServingReport, ShadowReport, read_report, write_report

COUNTS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""By which the client library knows the folder of counts."""

_TELLER = 0
"""The worker that counts what all of them do alike: swaps, and how fresh events are served."""
_PATIENCE = timedelta(seconds=5)
_LOOK = timedelta(milliseconds=20)


@dataclass(frozen=True)
class Crew:
    """The workers of one server."""

    folder: Path
    size: int
    _ages: defaultdict[int, ReportAge] = field(default_factory=lambda: defaultdict(ReportAge), compare=False)

    def write(self, number: int, report: ServingReport) -> None:
        """Leave a worker's report. Raises OSError."""
        write_report(self.folder, report, _name(number))

    def path(self, number: int) -> Path:
        """Return where a worker leaves its report."""
        return self.folder / _name(number)

    def forget(self, number: int) -> None:
        """Drop what a worker that is dead said of its present; its counts stay."""
        self.path(number).unlink(missing_ok=True)
        mark_process_dead(number, str(self.folder))  # type: ignore[no-untyped-call]

    def reports(self) -> dict[int, ServingReport]:
        """Return the newest report of each worker that lives and has one."""
        found = ((number, read_report(self.folder, _name(number))) for number in range(self.size))
        return {number: report for number, report in found if report is not None}

    def joined(self, pid: int, started: float) -> ServingReport | None:
        """Return the report of all together, by the process that started them; None before the first of a worker.

        The version is the oldest that is served, percentiles are those of the slowest.
        """
        reports = self.reports()
        if not reports:
            return None
        serving = [report for report in reports.values() if report.version is not None]
        behind = min(serving, key=lambda report: report.version or 0, default=reports[min(reports)])
        newest = max(reports.values(), key=lambda report: report.time)
        problems = [
            f"worker {number} of {self.size} does not run" for number in range(self.size) if number not in reports
        ]
        problems += [
            f"worker {number} of {self.size} hangs"
            for number, report in reports.items()
            if self._ages[number].is_silent(report)
        ]
        problems += dict.fromkeys(sentence for report in reports.values() for sentence in report.problems)
        return msgspec.structs.replace(
            behind,
            pid=pid,
            started=started,
            time=time.time(),
            workers=len(serving or reports),
            ready=bool(serving),
            swaps=newest.swaps,
            refused={number: why for report in reports.values() for number, why in report.refused.items()},
            freshness_p50_seconds=_largest(reports, "freshness_p50_seconds"),
            freshness_p99_seconds=_largest(reports, "freshness_p99_seconds"),
            requests=newest.requests,
            requests_per_second=sum(report.requests_per_second for report in reports.values()),
            request_p50_seconds=_largest(reports, "request_p50_seconds"),
            request_p99_seconds=_largest(reports, "request_p99_seconds"),
            shadow=_shadow(reports.values()),
            problems=problems,
        )


@dataclass(frozen=True)
class Worker:
    """One of them, as it sees itself."""

    crew: Crew
    number: int
    state_dir: Path

    def metrics(self) -> Metrics:
        """Return counts that outlive the process and are added up; to be called once, before any other are made."""
        number = self.number
        prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(  # type: ignore[no-untyped-call]
            lambda: number
        )
        whole = CollectorRegistry()
        MultiProcessCollector(whole, str(self.crew.folder))  # type: ignore[no-untyped-call]
        return Metrics(CollectorRegistry(), whole, tells=number == _TELLER)

    def write(self, report: ServingReport) -> None:
        """Leave this one's report. Raises OSError."""
        self.crew.write(self.number, report)

    def whole(self, own: ServingReport) -> ServingReport:
        """Return the report of all; this one's own where there is none yet."""
        return read_report(self.state_dir, REPORT) or own

    def others_serve(self) -> bool:
        """Whether another one has a version to answer with."""
        return any(report.ready for number, report in self.crew.reports().items() if number != self.number)

    async def obeyed(self, state: RegistryState) -> bool:
        """Wait until all have obeyed an order; whether they have in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE.total_seconds()):
                while not all(_obeys(report.version, state) for report in self.crew.reports().values()):
                    await asyncio.sleep(_LOOK.total_seconds())
                return True
        return False


def _obeys(version: int | None, state: RegistryState) -> bool:
    if version is None:
        return True  # it has just been started, and obeys from its first version on
    if state.pinned is not None:
        return version == state.pinned
    return version not in state.rolled_back and version >= (state.promoted or 0)


def _largest(reports: Mapping[int, ServingReport], name: str) -> float | None:
    return max((value for report in reports.values() if (value := getattr(report, name)) is not None), default=None)


def _shadow(reports: Iterable[ServingReport]) -> ShadowReport | None:
    """Return how the newest candidate does for all that compare it."""
    found = [report.shadow for report in reports if report.shadow is not None]
    if not found:
        return None
    newest = max(shadow.version for shadow in found)
    same = [shadow for shadow in found if shadow.version == newest]
    rows = sum(shadow.rows for shadow in same)
    total = sum(shadow.rows * (shadow.disagreement or 0.0) for shadow in same)
    failed = next((shadow.failed for shadow in same if shadow.failed), None)
    return ShadowReport(version=newest, rows=rows, disagreement=total / rows if rows else None, failed=failed)


def _name(number: int) -> str:
    return f"worker-{number}.json"
