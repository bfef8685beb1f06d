"""Several serving processes behind one port: their shared folder, and how their reports become one.

They inherit one listening socket, so an idle process accepts the next connection, and a killed process loses no waiting
ones. Each has its own model and swaps versions by itself. Each writes its report and counts into one folder; the
process that is asked adds up all of them.
"""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client.values
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from anabranch.learner.versions.format import RegistryState
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.reporting.health import ReportAge
from anabranch.serving.reporting.report import (
    REPORT,
    AnswersReport,
    ServingReport,
    ShadowReport,
    read_report,
    write_report,
)

COUNTS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder of counts for the client library."""

_REPORTING_WORKER = 0
"""The worker that counts events that all workers share: swaps, and how fresh events are served. It also follows the
object store."""
_PATIENCE = timedelta(seconds=5)
_POLL_EVERY = timedelta(milliseconds=20)


@dataclass(frozen=True)
class WorkerPool:
    """The workers of one server, which share a folder."""

    folder: Path
    size: int
    _ages: defaultdict[int, ReportAge] = field(default_factory=lambda: defaultdict(ReportAge), compare=False)

    def write(self, number: int, report: ServingReport) -> None:
        """Write a worker's report. Raises OSError."""
        write_report(self.folder, report, _name(number))

    def path(self, number: int) -> Path:
        """Return the path of a worker's report."""
        return self.folder / _name(number)

    def remove(self, number: int) -> None:
        """Delete the report and the gauges of a dead worker; its counts stay."""
        self.path(number).unlink(missing_ok=True)
        mark_process_dead(number, str(self.folder))  # type: ignore[no-untyped-call]

    def reports(self) -> dict[int, ServingReport]:
        """Return the newest report of each running worker that has one."""
        reports = ((number, read_report(self.folder, _name(number))) for number in range(self.size))
        return {number: report for number, report in reports if report is not None}

    def joined(self, pid: int, started: float) -> ServingReport | None:
        """Return the combined report, written by the process that started the workers; None before the first report.

        The version is the oldest served one, the percentiles are the largest ones.
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
            answered=dict(sum((Counter(report.answered) for report in reports.values()), Counter[int]())),
            requests_per_second=sum(report.requests_per_second for report in reports.values()),
            request_p50_seconds=_largest(reports, "request_p50_seconds"),
            request_p99_seconds=_largest(reports, "request_p99_seconds"),
            shadow=_shadow(reports.values()),
            stream=_stream([report.stream for report in reports.values() if report.stream is not None]),
            log=_first(reports, "log"),
            server=_first(reports, "server"),
            follow_lag_seconds=_first(reports, "follow_lag_seconds"),
            skew={
                name: max(report.skew.get(name, 0.0) for report in reports.values())
                for name in dict.fromkeys(name for report in reports.values() for name in report.skew)
            },
            warnings=list(dict.fromkeys(sentence for report in reports.values() for sentence in report.warnings)),
            model_problem=_first(reports, "model_problem"),
            problems=problems,
        )


class PoolCollector(MultiProcessCollector):
    """The counts of all workers, also while another worker starts: it makes each file empty before it has a size."""

    def __init__(self, folder: str) -> None:
        super().__init__(None, folder)  # type: ignore[no-untyped-call]
        self._folder = Path(folder)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, added up."""
        files = [str(path) for path in self._folder.glob("*.db") if _has_content(path)]
        return self.merge(files)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True)
class PoolWorker:
    """This process, one of the workers of a pool."""

    pool: WorkerPool
    number: int
    state_dir: Path

    def metrics(self) -> ServingMetrics:
        """Return metrics whose counts outlive the process and are added up. Called once, before any others exist."""
        number = self.number
        prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(  # type: ignore[no-untyped-call]
            lambda: number
        )
        total = CollectorRegistry()
        total.register(PoolCollector(str(self.pool.folder)))
        return ServingMetrics(CollectorRegistry(), total, counts_shared_events=self.acts_for_all)

    def write(self, report: ServingReport) -> None:
        """Write the report of this worker. Raises OSError."""
        self.pool.write(self.number, report)

    def whole(self, own: ServingReport) -> ServingReport:
        """Return the combined report; this worker's own if there is none yet."""
        return read_report(self.state_dir, REPORT) or own

    @property
    def acts_for_all(self) -> bool:
        """Whether this worker does what one of them does for all."""
        return self.number == _REPORTING_WORKER

    def others_serve(self) -> bool:
        """Return whether another worker serves a version."""
        return any(report.ready for number, report in self.pool.reports().items() if number != self.number)

    async def all_apply(self, state: RegistryState) -> bool:
        """Wait until all workers serve what `state` allows, and return whether they did in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE.total_seconds()):
                while not all(_applies(report.version, state) for report in self.pool.reports().values()):
                    await asyncio.sleep(_POLL_EVERY.total_seconds())
                return True
        return False


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # of a dead worker
        return False


def _applies(version: int | None, state: RegistryState) -> bool:
    if version is None:
        return True  # it has just started, and applies the state with its first version
    if state.pinned is not None:
        return version == state.pinned
    return version not in state.rolled_back and version >= (state.promoted or 0)


def _largest(reports: Mapping[int, ServingReport], name: str) -> float | None:
    return max((value for report in reports.values() if (value := getattr(report, name)) is not None), default=None)


def _first(reports: Mapping[int, ServingReport], name: str) -> Any:
    return next((value for report in reports.values() if (value := getattr(report, name)) is not None), None)


def _shadow(reports: Iterable[ServingReport]) -> ShadowReport | None:
    """Return the combined results of the newest candidate."""
    candidates = [report.shadow for report in reports if report.shadow is not None]
    if not candidates:
        return None
    newest = max(shadow.version for shadow in candidates)
    same = [shadow for shadow in candidates if shadow.version == newest]
    rows = sum(shadow.rows for shadow in same)
    total = sum(shadow.rows * (shadow.disagreement or 0.0) for shadow in same)
    failed = next((shadow.failed for shadow in same if shadow.failed), None)
    return ShadowReport(version=newest, rows=rows, disagreement=total / rows if rows else None, failed=failed)


def _stream(reports: Sequence[AnswersReport]) -> AnswersReport | None:
    """Return the sums of all workers; their counts are added up already."""
    if not reports:
        return None
    return msgspec.structs.replace(
        reports[0],
        partitions=sum(report.partitions for report in reports),
        per_second=sum(report.per_second for report in reports),
        lag=sum(report.lag for report in reports),
        p50_seconds=max((report.p50_seconds for report in reports if report.p50_seconds is not None), default=None),
        p99_seconds=max((report.p99_seconds for report in reports if report.p99_seconds is not None), default=None),
    )


def _name(number: int) -> str:
    return f"worker-{number}.json"
