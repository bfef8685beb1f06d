"""The content of `/api/status` and `/api/history`: learner, baseline and serving together, now and over time."""

import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from anabranch.learner.status.report import LAG_STALE, LearnerReport, read_report
from anabranch.serving.dashboard.events import EventDetector
from anabranch.serving.dashboard.time_series import RESOLUTIONS, History
from anabranch.serving.dashboard.version_history import VersionHistory, VersionRow
from anabranch.serving.fleet.overview import RecentFleet
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.reporting.health import ReportAge, judge
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.reporting.worker_pool import PoolWorker
from anabranch.serving.rollout.hot_swap import VersionSwapper
from anabranch.serving.rollout.version_list import VersionList

_WINDOWS = ("now", "worst", "old")
_MEASURED = ("now", "held_out")
_RATES = ("steps", "rows_new", "rows_replay")

SERIES = (
    *_WINDOWS,
    *(f"baseline_{window}" for window in _WINDOWS),
    *(f"measure_{window}" for window in _MEASURED),
    "baseline_measure_held_out",
    *_RATES,
    "lag",
    "freshness_p50_seconds",
    "freshness_p99_seconds",
    "request_p50_seconds",
    "request_p99_seconds",
    "device_temperature",
)
"""The series that are kept over time. The windows hold the accuracy, or for regression the error; those that begin with
`measure` hold the measure by which versions are judged, where it is another."""


class Overview:
    """The state of a whole pipeline. Its methods read files, so the event loop's thread may not call them."""

    def __init__(
        self,
        deployment: Deployment,
        swap: VersionSwapper,
        baseline: str,
        worker: PoolWorker | None = None,
        links: Mapping[str, str] | None = None,
    ) -> None:
        self._name = deployment.name
        self._links = dict(links or {})
        self._state_dir = deployment.state_dir
        self._baseline = deployment.folder / baseline if baseline else None
        self._task = deployment.model.task
        self._worker = worker
        self._fleet = None if deployment.fleet is None else RecentFleet(deployment.fleet)
        self._began = time.time()
        self._registry = VersionList(deployment, swap, self._began)
        self._thinned = VersionHistory()
        self._lock = Lock()
        self._learner_age, self._baseline_age = ReportAge(), ReportAge()
        self.history = History(SERIES)
        self._detector = EventDetector(self.history.events, self._began)

    def sample(self, serving: ServingReport) -> None:
        """Add the figures of now to the history, and what happened since the last call.

        Figures of a part that does not report are gaps.
        """
        now, serving = time.time(), self._of_all_workers(serving)
        learner, baseline = read_report(self._state_dir), _read(self._baseline)
        values: dict[str, float | None] = {name: getattr(serving, name) for name in SERIES if name.endswith("_seconds")}
        if learner is not None and not self._learner_age.is_silent(learner):
            values |= {name: score for name, score in _scores(learner).items() if name in _WINDOWS}
            values |= {f"measure_{name}": value for name, value in _measured(learner).items() if name in _MEASURED}
            values |= {name: learner.rates.get(name) for name in _RATES}
            if (learner.lag_age_seconds or 0.0) < LAG_STALE.total_seconds():
                values["lag"] = sum(partition.pending for partition in learner.partitions.values())
            values["device_temperature"] = _hottest(learner)
        if baseline is not None and not self._baseline_age.is_silent(baseline):
            values |= {f"baseline_{name}": score for name, score in _scores(baseline).items() if name in _WINDOWS}
            values["baseline_measure_held_out"] = _measured(baseline).get("held_out")
        self.history.add(now, values)
        self._detector.update(now, learner, serving, self._versions())

    def status(self, serving: ServingReport) -> dict[str, Any]:
        """Return the state of now, as JSON values."""
        learner, now = read_report(self._state_dir), time.time()
        serving = self._of_all_workers(serving)
        silent = learner is not None and self._learner_age.is_silent(learner)
        fleet = None if self._fleet is None else self._fleet.newest()
        return {
            "name": self._name,
            "time": now,
            "task": self._task,
            "links": self._links,
            "health": judge(learner, serving, silent=silent),
            "learner": learner,
            "baseline": _read(self._baseline),
            "serving": serving,
            "fleet": None if fleet is None else fleet.document(reasons=False),
            "versions": self._versions(),
            "history": {"since": self._began, "resolutions": RESOLUTIONS},
        }

    def _versions(self) -> list[VersionRow]:
        with self._lock:
            try:
                return self._thinned.update(self._registry.newest())
            except OSError:  # the file system is away, or there is no descriptor left; the swap reports it
                return self._thinned.rows

    def _of_all_workers(self, own: ServingReport) -> ServingReport:
        return self._worker.whole(own) if self._worker else own


def _read(state_dir: Path | None) -> LearnerReport | None:
    return read_report(state_dir) if state_dir else None


def _hottest(report: LearnerReport) -> float | None:
    """Return the highest temperature of the devices that the learner watches."""
    devices = report.device.devices if report.device else []
    return max((device.temperatures["gpu"] for device in devices if "gpu" in device.temperatures), default=None)


def _measured(report: LearnerReport) -> dict[str, float]:
    """Return the measure by which versions are judged, by window; empty where it is the task's own score."""
    measure = report.measures.get(report.measure)
    return {} if measure is None else measure.value


def _scores(report: LearnerReport) -> dict[str, float]:
    return report.error or report.accuracy
