"""What `/api/status` and `/api/history` say: learner, baseline and serving together, now and over time."""

import time
from pathlib import Path
from threading import Lock
from typing import Any

from learner.state_dir.report import LAG_STALE, LearnerReport, read_report
from serving.dashboard.time_series import RESOLUTIONS, History
from serving.model.deployment import Deployment
from serving.reporting.health import ReportAge, judge
from serving.reporting.report import ServingReport
from serving.reporting.worker_pool import Worker
from serving.rollout.hot_swap import Swap
from serving.rollout.version_list import Registry

_WINDOWS = ("now", "worst", "old")
_RATES = ("steps", "rows_new", "rows_replay")

SERIES = (
    *_WINDOWS,
    *(f"baseline_{window}" for window in _WINDOWS),
    *_RATES,
    "lag",
    "freshness_p50_seconds",
    "freshness_p99_seconds",
    "request_p50_seconds",
    "request_p99_seconds",
)
"""What is kept over time; the windows hold the accuracy, or for regression the error."""


class Overview:
    """The picture of a whole pipeline. Its methods read files, so they are not for the event loop's thread."""

    def __init__(self, deployment: Deployment, swap: Swap, baseline: str, worker: Worker | None = None) -> None:
        self._name = deployment.name
        self._state_dir = deployment.state_dir
        self._baseline = deployment.folder / baseline if baseline else None
        self._task = deployment.model.task
        self._worker = worker
        self._began = time.time()
        self._registry = Registry(deployment, swap, self._began)
        self._lock = Lock()
        self._learner_age, self._baseline_age = ReportAge(), ReportAge()
        self.history = History(SERIES)

    def sample(self, serving: ServingReport) -> None:
        """Take the figures of this moment into the history; figures of a part that is silent are gaps."""
        now, serving = time.time(), self._whole(serving)
        learner, baseline = read_report(self._state_dir), _read(self._baseline)
        values: dict[str, float | None] = {name: getattr(serving, name) for name in SERIES if name.endswith("_seconds")}
        if learner is not None and not self._learner_age.is_silent(learner):
            values |= {name: score for name, score in _scores(learner).items() if name in _WINDOWS}
            values |= {name: learner.rates.get(name) for name in _RATES}
            if (learner.lag_age_seconds or 0.0) < LAG_STALE.total_seconds():
                values["lag"] = sum(partition.pending for partition in learner.partitions.values())
        if baseline is not None and not self._baseline_age.is_silent(baseline):
            values |= {f"baseline_{name}": score for name, score in _scores(baseline).items() if name in _WINDOWS}
        self.history.add(now, values)

    def status(self, serving: ServingReport) -> dict[str, Any]:
        """Return everything that is known now, as JSON values."""
        learner, now = read_report(self._state_dir), time.time()
        serving = self._whole(serving)
        silent = learner is not None and self._learner_age.is_silent(learner)
        with self._lock:
            versions = self._registry.newest()
        return {
            "name": self._name,
            "time": now,
            "task": self._task,
            "health": judge(learner, serving, silent=silent),
            "learner": learner,
            "baseline": _read(self._baseline),
            "serving": serving,
            "versions": versions,
            "history": {"since": self._began, "resolutions": RESOLUTIONS},
        }

    def _whole(self, own: ServingReport) -> ServingReport:
        return self._worker.whole(own) if self._worker else own


def _read(state_dir: Path | None) -> LearnerReport | None:
    return read_report(state_dir) if state_dir else None


def _scores(report: LearnerReport) -> dict[str, float]:
    return report.error or report.accuracy
