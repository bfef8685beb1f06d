"""Tells how the learner does: `learner.json` about once a second, and the gauges of `/metrics`."""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingest.reader.multi_host import MultiHostReader
from ingest.reader.reader import BlockReader
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.device_sharing.sharing import DeviceSharing
from learner.evaluation.holdout import HoldoutSet
from learner.loop import LoopMetrics, TrainingLoop
from learner.publishing.publisher import Publisher
from learner.runtime.heartbeat import Heartbeat
from learner.state_dir.lock import check_generation
from learner.state_dir.report import LearnerReport, write_report
from learner.stream.lag import LagPolicy
from learner.stream.outcome_counters import LetterCounters
from replay.background_store import BackgroundStore

_EVERY_SECONDS = 0.5
_RATE_MARKS = 10


class Reporter:
    """Called by the loop's thread at step boundaries, where all numbers belong to the same moment."""

    def __init__(
        self,
        state_dir: Path,
        generation: int,
        loop: TrainingLoop,
        source: BlockReader | MultiHostReader,
        background_store: BackgroundStore | None,
        holdout: HoldoutSet,
        publisher: Publisher,
        checkpointer: Checkpointer,
        erasure: Erasure,
        lag: LagPolicy,
        metrics: LoopMetrics,
        *,
        strategy: str,
        classification: bool,
        launched: bool = False,
        absent: Sequence[int] = (),
        sharing: DeviceSharing | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._generation = generation
        self._loop = loop
        self._source = source
        self._background_store = background_store
        self._holdout = holdout
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._erasure = erasure
        self._lag = lag
        self._resumed_at = loop.steps
        self._metrics = metrics
        self._strategy = strategy
        self._classification = classification
        self._sharing = sharing
        self._absent = (
            f"learner.hosts: {', '.join(f'host {host}' for host in absent)} did not come; learning goes on without it"
            if absent
            else None
        )
        self._launcher = os.getppid() if launched else None
        self._started = time.time()
        self._problem: str | None = None
        self._letters = LetterCounters(metrics.ingest.letters_dropped)
        self._due = 0.0
        self._heartbeat = Heartbeat(metrics.learner.heartbeat)
        self._marks: deque[tuple[float, int, int, int]] = deque(maxlen=_RATE_MARKS)
        self._marks.append(self._mark())

    def problems(self) -> list[str]:
        """One sentence for each part that does not work as it should. Any thread may ask, also while the loop hangs."""
        replay = self._background_store.problem if self._background_store is not None else None
        parts = (
            self._heartbeat.problem,
            self._source.problem,
            self._publisher.problem,
            self._publisher.gate.problem,
            self._checkpointer.problem,
            self._erasure.problem,
            replay,
            self._problem,
            self._spoiled(),
            self._loop.too_many_raised,
            self._absent,
        )
        return [sentence for sentence in parts if sentence]

    def warnings(self) -> list[str]:
        """One sentence for each thing that was done to go on, and that a person may want to change. Any thread."""
        return [each for each in (self._loop.warning, self._lag.warning) if each]

    def _spoiled(self) -> str | None:
        if not self._loop.spoiled:
            return None
        return (
            f"the last {self._loop.non_finite_in_a_row} steps were skipped because loss or gradient was not finite: "
            "are the weights? No checkpoint is made until a step is finite, so that a restart goes on from before"
        )

    def report_if_due(self) -> None:
        """Note that the loop is alive, and report when half a second has passed since the last time."""
        self._heartbeat.beat()
        if time.monotonic() >= self._due:
            self.report()
            self._due = time.monotonic() + _EVERY_SECONDS

    def report(self) -> None:
        """Report now.

        Raises:
            SecondLearnerError: another learner has taken this one's place, and reports where it would.
        """
        check_generation(self._state_dir, self._generation)
        self._loop.count()
        loop, publisher, store = self._loop, self._publisher, None
        if self._background_store is not None:
            store = self._background_store.flush()
            store.flush_pending()  # so that what it holds fits what was learned
        windows, groups = self._windows(), publisher.evaluation.groups
        report = LearnerReport(
            pid=os.getpid(),
            launcher=self._launcher,
            generation=self._generation,
            started=self._started,
            time=time.time(),
            strategy=self._strategy,
            steps=loop.steps,
            steps_since_start=loop.steps - self._resumed_at,
            checkpoint=self._checkpointer.number or None,
            checkpoint_time=self._checkpointer.time,
            problems=self.problems(),
            warnings=self.warnings(),
            outcomes=loop.ledger.outcomes,
            skipped=loop.ledger.skipped,
            unknown_fields=self._source.unknown_fields,
            lag_seconds=self._lag.seconds,
            lag_age_seconds=None if (asked := self._source.oldest_told) is None else time.monotonic() - asked,
            behind=self._lag.behind,
            partitions=dict(loop.ledger.reports()),
            accuracy=windows if self._classification else {},
            error={} if self._classification else _errors(windows),
            loss=self._losses(),
            window_rows=loop.monitor.prequential.window,
            classes=dict(publisher.evaluation.classes),
            groups=dict(groups) if self._classification else _errors(groups),
            forgetting=publisher.retention.forgetting,
            drifts=loop.monitor.drift.count,
            drift_step=loop.monitor.drift.step,
            replay_ratio=loop.replay_ratio,
            rates=self._rates(),
            replay_rows=store.rows if store is not None else {},
            replay_bytes=store.bytes if store is not None else {},
            replay_capacity=store.capacity if store is not None else None,
            replay_bounds=store.bounds if store is not None else {},
            replay_lost=store.lost if store is not None else 0,
            holdout_rows=len(self._holdout),
            device_sharing=self._sharing.report if self._sharing is not None else None,
            erased=self._erasure.records,
            erased_through=self._erasure.through,
            version=publisher.number,
            verdict=publisher.verdict,
            held_since=publisher.gate.held_since,
            held_reasons=publisher.gate.reasons,
            withdrawn=publisher.gate.withdrawn,
            versions_published=publisher.published,
            publish_skipped=publisher.skipped,
        )
        self._set_gauges(report)
        if store is not None:
            self._metrics.replay.tell(store)
        try:
            write_report(self._state_dir, report)
        except OSError as exc:
            self._problem = f"{self._state_dir} cannot be written to: {exc.strerror or exc}"
        else:
            self._problem = None

    def _windows(self) -> dict[str, float]:
        """Mean scores: of new events before training on them, and of the holdout set."""
        found, prequential = self._publisher.evaluation.windows, self._loop.monitor.prequential
        windows = {name: found[name] for name in ("worst", "worst_group", "old") if name in found}
        windows |= self._publisher.retention.windows
        if prequential.mean is not None and prequential.overall is not None:
            windows |= {"now": prequential.mean, "overall": prequential.overall}
        return windows

    def _losses(self) -> dict[str, float]:
        now, overall = self._loop.monitor.prequential.loss, self._loop.monitor.prequential.overall_loss
        return {} if now is None or overall is None else {"now": now, "overall": overall}

    def _rates(self) -> dict[str, float]:
        then, now = self._marks[0], self._mark()
        self._marks.append(now)
        seconds = max(1e-6, now[0] - then[0])
        names = ("steps", "rows_new", "rows_replay")
        return {name: (now[i] - then[i]) / seconds for i, name in enumerate(names, start=1)}

    def _mark(self) -> tuple[float, int, int, int]:
        return time.monotonic(), self._loop.steps, self._loop.rows_new, self._loop.rows_replay

    def _set_gauges(self, report: LearnerReport) -> None:
        for name, partition in report.partitions.items():
            topic, _, number = name.rpartition(":")
            self._metrics.ingest.lag.labels(topic, number).set(partition.pending)
            self._metrics.ingest.passed.labels(topic, number).set(partition.passed)
            self._metrics.learner.trained_through.labels(topic, number).set(partition.trained_through)
        self._metrics.ingest.lag_seconds.set(report.lag_seconds)
        self._metrics.ingest.lag_time.set(0 if report.lag_age_seconds is None else report.time - report.lag_age_seconds)
        self._metrics.ingest.behind.set(report.behind)
        for reason, rows in report.skipped.items():
            self._metrics.ingest.skipped.labels(reason).set(rows)
        self._letters.move(self._source.letters_dropped)
        for window, value in report.accuracy.items():
            self._metrics.learner.accuracy.labels(window).set(value)
        for window, value in report.error.items():
            self._metrics.learner.error.labels(window).set(value)
        self._set_measures(report)
        self._metrics.learner.micro_batch.set(self._loop.micro_batch_size or 0)
        self._metrics.learner.holdout.set(report.holdout_rows)
        self._metrics.learner.version.set(report.version or 0)
        self._metrics.learner.hold.set(self._publisher.gate.held_seconds)
        self._metrics.learner.checkpoint_number.set(report.checkpoint or 0)
        self._metrics.learner.checkpoint_time.set(report.checkpoint_time or 0)
        self._metrics.learner.problems.set(len(report.problems))

    def _set_measures(self, report: LearnerReport) -> None:
        """Set what is known of the model beside its windows; classes and groups that are told of no more disappear."""
        metrics = self._metrics.learner
        for window, value in report.loss.items():
            metrics.loss.labels(window).set(value)
        metrics.window.set(report.window_rows)
        if report.device_sharing is not None:
            metrics.device_sharing_training.set(report.device_sharing.training)
        metrics.replay_ratio.set(report.replay_ratio)
        if report.forgetting is not None:
            metrics.forgetting.set(report.forgetting)
        told = (metrics.class_accuracy, report.classes), (metrics.group_accuracy, report.groups)
        for gauge, scores in told if self._classification else ():
            gauge.clear()
            for name, score in scores.items():
                gauge.labels(name).set(score)


def _errors(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the errors that scores of regression stand for."""
    return {name: -score for name, score in scores.items()}
