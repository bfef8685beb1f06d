"""The metrics of serving, in the registry of one process. Importing this module registers nothing."""

from collections import deque
from collections.abc import Mapping, Set
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from time import monotonic

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from anabranch.core.tracing.spans import left_out_counter

Ages = NDArray[np.float64]
"""Seconds, ascending; each represents the same number of events."""


WINDOW = timedelta(seconds=60)
"""The period of the percentiles in the report."""

_WINDOW_SAMPLES = 4096
_RATE_MARKS = 10
_REQUEST_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_FRESHNESS_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 300, 1800, 7200, 86400)
_WINDOW_SWAPS = 256
_MOST_AGES = 64
"""Quantiles of ages that stand for those of many events."""


class ServingMetrics:
    """Counts of one serving process. `request` belongs to the event loop's thread, the rest to any."""

    def __init__(
        self, registry: CollectorRegistry, total: CollectorRegistry | None = None, counts_shared_events: bool = True
    ) -> None:
        """Take `total`, the registry with the sums of all workers; one worker alone counts what all workers see."""
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._total_registry = total or registry
        self._counts_shared_events = counts_shared_events
        self._requests = counter("anabranch_serving_requests", "Inference requests by HTTP status", ["code"])
        self._duration = histogram(
            "anabranch_serving_request_duration_seconds",
            "Time from an inference request's head to the end of its reply",
            buckets=_REQUEST_BUCKETS,
        )
        self.queue_wait = counter(
            "anabranch_serving_queue_row_seconds",
            "Time that rows of requests have waited for the model; its rate is the mean number of rows that wait",
        )
        self.version = gauge(
            "anabranch_serving_version", "Number of the served version", multiprocess_mode="livemostrecent"
        )
        self._freshness = histogram(
            "anabranch_serving_freshness_duration_seconds",
            "Time from the record time of a trained event to the swap to the first version that has learned it",
            buckets=_FRESHNESS_BUCKETS,
        )
        self._swaps = counter(
            "anabranch_serving_swaps", "Versions by outcome: swapped, rolled_back to, refused", ["outcome"]
        )
        self.problems = gauge(
            "anabranch_serving_problems", "Problems of serving; 0 when it is healthy", multiprocess_mode="livemax"
        )
        self.follow_lag = gauge(
            "anabranch_serving_follow_lag_seconds",
            "For how long there has been a newer version in the object store that this host has not copied",
            multiprocess_mode="livemax",
        )
        self._shadow_rows = counter(
            "anabranch_serving_shadow_rows",
            "Rows of live requests for the shadow's candidate: compared, or dropped for lack of time",
            ["outcome"],
        )
        self._shadow_disagreement = counter(
            "anabranch_serving_shadow_disagreement",
            "Compared rows with another prediction; for regression the sum of absolute differences",
        )
        self._input_psi = gauge(
            "anabranch_serving_input_psi",
            "Population stability index of a feature of requests against events of training",
            ["feature"],
            multiprocess_mode="livemax",
        )
        self._drifted_input_psi = gauge(
            "anabranch_serving_drifted_input_psi",
            "The same while it has drifted, else 0",
            ["feature"],
            multiprocess_mode="livemax",
        )
        self._inputs: dict[str, None] = {}
        """The features whose index was set; processes that share their metrics can remove none."""
        self.tracing_left_out = left_out_counter(registry)
        self._answer_times = _Recent()
        self._recent_ages = _RecentRows()
        self._total = 0
        self._rate = _Rate()
        self.stream = StreamMetrics(registry, self._total_registry)
        """Of `[serving.stream]`."""
        self.log = LogMetrics(registry, self._total_registry)
        """Of `[serving.log]`."""

    def request(self, status: int, seconds: float) -> None:
        """Count an inference request that has been answered."""
        self._requests.labels(str(status)).inc()
        self._duration.observe(seconds)
        self._total += 1
        if status == HTTPStatus.OK:
            self._answer_times.add(seconds)

    def swap(self, outcome: str) -> None:
        """Count a version by its outcome."""
        if self._counts_shared_events:
            self._swaps.labels(outcome).inc()

    def observe_freshness(self, rows: int, ages: Ages) -> None:
        """Observe `rows` events that no earlier served version was trained on, with quantiles of their ages."""
        if rows and self._counts_shared_events:
            _observe(self._freshness, rows, ages)
            self._recent_ages.add(rows, ages)

    def shadowed(self, outcome: str, rows: int, disagreement: float = 0.0) -> None:
        """Count rows that were sent to the shadow's candidate."""
        self._shadow_rows.labels(outcome).inc(rows)
        self._shadow_disagreement.inc(disagreement)

    def inputs(self, psi: Mapping[str, float], drifted: Set[str]) -> None:
        """Set the indices of features of requests, by name; those that have drifted. Of others it is 0 from now on."""
        self._inputs |= dict.fromkeys(psi)
        for name in self._inputs:
            value = psi.get(name, 0.0)
            self._input_psi.labels(name).set(value)
            self._drifted_input_psi.labels(name).set(value if name in drifted else 0.0)

    def requests(self) -> dict[str, int]:
        """Return the requests so far by HTTP status."""
        return _by_label(self._total_registry, "anabranch_serving_requests", "code")

    def swap_outcomes(self) -> dict[str, int]:
        """Return the versions so far by outcome."""
        return _by_label(self._total_registry, "anabranch_serving_swaps", "outcome")

    def requests_per_second(self) -> float:
        """Return the rate since about ten seconds ago; called about once a second by the loop's thread."""
        return self._rate.of(self._total)

    def request_percentiles(self) -> tuple[float, float] | tuple[None, None]:
        """Return the median and the 99th percentile, in seconds, of recent answers; Nones without any."""
        return self._answer_times.percentiles()

    def freshness_percentiles(self) -> tuple[float, float] | tuple[None, None]:
        """Return the median and the 99th percentile, in seconds, of recent events' freshness; Nones without any."""
        return self._recent_ages.percentiles()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format. Thread-safe."""
        return generate_latest(self._total_registry)


class StreamMetrics:
    """Counts of the answers of `[serving.stream]`."""

    def __init__(self, registry: CollectorRegistry, total: CollectorRegistry) -> None:
        """Take `total`, the registry with the sums of all workers."""
        self._total_registry = total
        self._messages = Counter(
            "anabranch_serving_stream_messages",
            "Messages of serving.stream.topics by outcome: answered, dead_lettered",
            ["outcome"],
            registry=registry,
        )
        self._duration = Histogram(
            "anabranch_serving_stream_answer_duration_seconds",
            "Time from the record time of a message to the commit of its answer in serving.stream.output",
            buckets=(*_REQUEST_BUCKETS, 30, 60, 300),
            registry=registry,
        )
        self.lag = Gauge(
            "anabranch_serving_stream_lag",
            "Messages of serving.stream.topics that are not answered yet, of this server's partitions",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._recent_ages = _RecentRows()
        self._answered = 0
        self._rate = _Rate()

    def answered(self, ages: Ages) -> None:
        """Count messages that have an answer, with the ages of them all when it was committed."""
        if len(ages):
            self._answered += len(ages)
            self._messages.labels("answered").inc(len(ages))
            few = ages[np.linspace(0, len(ages) - 1, min(len(ages), _MOST_AGES)).astype(int)]
            _observe(self._duration, len(ages), few)
            self._recent_ages.add(len(ages), few)

    def dead_lettered(self, count: int) -> None:
        """Count dead letters of messages that were to be answered."""
        if count:
            self._messages.labels("dead_lettered").inc(count)

    def messages(self) -> dict[str, int]:
        """Return the messages so far by outcome."""
        return _by_label(self._total_registry, "anabranch_serving_stream_messages", "outcome")

    def answers_per_second(self) -> float:
        """Return the rate of answers since about ten seconds ago; called about once a second."""
        return self._rate.of(self._answered)

    def percentiles(self) -> tuple[float, float] | tuple[None, None]:
        """Return the median and the 99th percentile of recent answers' ages, in seconds; Nones without any."""
        return self._recent_ages.percentiles()


class LogMetrics:
    """Counts of `[serving.log]`."""

    def __init__(self, registry: CollectorRegistry, total: CollectorRegistry) -> None:
        """Take `total`, the registry with the sums of all workers."""
        self._total_registry = total
        self._answers = Counter(
            "anabranch_serving_log_answers",
            "Answers to rows of requests for the topic of serving.log by outcome: written, dropped",
            ["outcome"],
            registry=registry,
        )

    def count(self, written: int, dropped: int) -> None:
        """Count answers."""
        for outcome, count in (("written", written), ("dropped", dropped)):
            if count > 0:
                self._answers.labels(outcome).inc(count)

    def answers(self) -> dict[str, int]:
        """Return the answers so far by outcome."""
        return _by_label(self._total_registry, "anabranch_serving_log_answers", "outcome")


def _by_label(registry: CollectorRegistry, name: str, label: str) -> dict[str, int]:
    return {
        sample.labels[label]: int(sample.value)
        for metric in registry.collect()
        if metric.name == name
        for sample in metric.samples
        if sample.name == f"{name}_total"
    }


class _Rate:
    """The growth of a number a second, over about the last ten seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RATE_MARKS)

    def of(self, total: int) -> float:
        now = monotonic()
        if not self._marks or now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, total))
        then, before = self._marks[0]
        return (total - before) / (now - then) if now > then else 0.0


class _Recent:
    """The durations of the last minute, at most `_WINDOW_SAMPLES`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW_SAMPLES)

    def add(self, seconds: float) -> None:
        self._samples.append((monotonic(), seconds))

    def percentiles(self) -> tuple[float, float] | tuple[None, None]:
        since = monotonic() - WINDOW.total_seconds()
        recent = [seconds for when, seconds in self._samples.copy() if when >= since]
        if not recent:
            return None, None
        p50, p99 = np.percentile(recent, (50, 99))
        return float(p50), float(p99)


def _observe(histogram: Histogram, rows: int, ages: Ages) -> None:
    """Observe `rows` events at once: `histogram.observe` needs a call for each."""
    within = np.searchsorted(ages, histogram._upper_bounds, side="right") * rows / len(ages)
    for bucket, more in zip(histogram._buckets, np.diff(np.rint(within), prepend=0).tolist(), strict=True):
        bucket.inc(more)
    histogram._sum.inc(rows * float(ages.mean()))


class _RecentRows:
    """The ages of the events of the last minute's swaps, at most `_WINDOW_SWAPS` swaps."""

    def __init__(self) -> None:
        self._swaps: deque[tuple[float, int, Ages]] = deque(maxlen=_WINDOW_SWAPS)

    def add(self, rows: int, ages: Ages) -> None:
        self._swaps.append((monotonic(), rows, ages))

    def percentiles(self) -> tuple[float, float] | tuple[None, None]:
        since = monotonic() - WINDOW.total_seconds()
        recent = [(rows, ages) for when, rows, ages in self._swaps.copy() if when >= since]
        if not recent:
            return None, None
        ages = np.concatenate([ages for _, ages in recent])
        order = np.argsort(ages)
        ranks = np.cumsum(np.concatenate([np.full(len(ages), rows / len(ages)) for rows, ages in recent])[order])
        p50, p99 = ages[order][np.searchsorted(ranks, np.array([0.5, 0.99]) * ranks[-1])].tolist()
        return p50, p99
