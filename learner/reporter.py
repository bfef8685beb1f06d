"""Reports the state of the learner: `learner.json` about twice a second, and the metrics read off the same report."""

import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from learner.checkpointing.tombstone_watch import TombstoneWatch
from learner.device_health.watch import HealthWatch
from learner.device_memory.live import live_bytes
from learner.device_sharing.sharing import DeviceSharing
from learner.evaluation.held_out_share import HeldOutShare
from learner.loop import TrainingLoop
from learner.loop_parts.feature_watch import FeatureWatch
from learner.loop_parts.loop_state import LoopComponents, LoopMetrics
from learner.model.features.learned import features_of
from learner.object_storage.mirror import Mirror
from learner.registration.registrar import Registrar
from learner.runtime.heartbeat import Heartbeat
from learner.state_dir.lock import check_generation
from learner.state_dir.report import DeviceHealthReport, LearnerReport, write_report
from learner.stream.backfill_rate import BackfillRate
from learner.stream.unusable_sources import unusable_sources
from replay.background_store import BackgroundStore
from replay.store import Store

_EVERY_SECONDS = 0.5
_RATE_MARKS = 10
_WINDOWS = ("worst", "worst_group", "old")
"""The windows of an evaluation that are reported."""


class Monitored(Protocol):
    """A component that reports its own health. Any thread may read it, also while the loop hangs."""

    @property
    def problem(self) -> str | None:
        """One sentence when the component does not work as it should."""
        ...


class Reporter:
    """Called by the loop's thread between steps, so that all numbers of a report belong to the same step."""

    def __init__(
        self,
        state_dir: Path,
        generation: int,
        loop: TrainingLoop,
        parts: LoopComponents,
        metrics: LoopMetrics,
        *,
        strategy: str,
        classification: bool,
        store: BackgroundStore | None = None,
        launched: bool = False,
        unused_device: Monitored | None = None,
        sharing: DeviceSharing | None = None,
        health: HealthWatch | None = None,
        mirror: Mirror | None = None,
        fleet: Monitored | None = None,
        registrar: Registrar | None = None,
        held_out: HeldOutShare | None = None,
    ) -> None:
        """Report on `loop` and its `parts`; `launched`: whether the launcher or torchrun started this process."""
        self._state_dir = state_dir
        self._generation = generation
        self._loop = loop
        self._parts = parts
        self._metrics = metrics
        self._strategy = strategy
        self._classification = classification
        self._store = store
        self._sharing = sharing
        self._health = health
        self._mirror = mirror
        self._registrar = registrar
        self._held_out = held_out
        self._launcher = os.getppid() if launched else None
        self._resumed_at = loop.state.steps
        self._started = time.time()
        self._due = 0.0
        self._heartbeat = Heartbeat(metrics.learner.heartbeat)
        self._backfill = BackfillRate()
        learned = features_of(parts.trainer.model)
        self._features = None if learned is None else FeatureWatch(learned, loop.ledger)
        self._marks: deque[tuple[float, ...]] = deque(maxlen=_RATE_MARKS)
        self._marks.append(self._mark())
        self._unusable: list[str] = []
        self._tombstones = TombstoneWatch(lambda: parts.source.tombstones, lambda: parts.erasure.erased)
        self.problem: str | None = None
        """One sentence when the last report could not be written."""
        publisher, others = parts.publisher, (parts.publisher.canary, store, unused_device, health, fleet)
        self._monitored: tuple[Monitored, ...] = (
            *(
                self._heartbeat,
                parts.source,
                publisher,
                publisher.gate.hold,
                parts.checkpointer,
                parts.erasure,
                self,
                loop.non_finite,
                loop.raising_events,
            ),
            *([] if parts.late is None else [parts.late.join]),
            *([] if mirror is None else mirror.threads),
            *(other for other in others if other is not None),
        )

    def problems(self) -> list[str]:
        """One sentence for each component that does not work as it should. Thread-safe, also while the loop hangs."""
        return [problem for component in self._monitored if (problem := component.problem)] + self._unusable

    def hang(self) -> str | None:
        """One sentence while the training loop hangs. Thread-safe."""
        return self._heartbeat.problem

    def warnings(self) -> list[str]:
        """One sentence for each workaround that the learner applied, or early warning. Thread-safe."""
        uploads = [] if self._mirror is None else self._mirror.threads
        parts, late = self._parts, None if self._parts.late is None else self._parts.late.join
        components = (
            *(self._heartbeat, self._loop, self._features, parts.lag, parts.teacher, late),
            *(self._health, self._registrar, self._held_out, self._tombstones),
            *uploads,
        )
        return [warning for component in components if component and (warning := component.warning)]

    def report_if_due(self) -> None:
        """Record that the loop is alive, and report when half a second has passed since the last report."""
        self._heartbeat.beat()
        if time.monotonic() >= self._due:
            self.report()
            self._due = time.monotonic() + _EVERY_SECONDS

    def report(self) -> None:
        """Report now.

        Raises:
            SecondLearnerError: another learner has the state directory now.
        """
        check_generation(self._state_dir, self._generation)
        self._loop.count()
        if self._held_out is not None:
            self._held_out.update(self._loop.ledger.outcomes)
        if self._features is not None:
            self._features.poll()
        store = None if self._store is None else self._store.flush()
        if store is not None:
            store.flush_pending()  # so that it holds all events that the steps so far have added
            self._metrics.replay.update(store)
        report = self._report(store)
        self._metrics.learner.report.update(report)
        try:
            write_report(self._state_dir, report)
        except OSError as exc:
            self.problem = f"{self._state_dir} cannot be written to: {exc.strerror or exc}"
        else:
            self.problem = None

    def _report(self, store: Store | None) -> LearnerReport:
        loop, parts, publisher = self._loop, self._parts, self._parts.publisher
        partitions = dict(loop.ledger.reports())
        self._unusable = unusable_sources(partitions)
        scoring, windows, rates, lag_time = publisher.scoring, self._windows(), self._rates(), parts.source.ends_time
        return LearnerReport(
            pid=os.getpid(),
            launcher=self._launcher,
            generation=self._generation,
            started=self._started,
            time=time.time(),
            strategy=self._strategy,
            steps=loop.state.steps,
            steps_since_start=loop.state.steps - self._resumed_at,
            checkpoint=parts.checkpointer.number or None,
            checkpoint_time=parts.checkpointer.time,
            problems=self.problems(),
            warnings=self.warnings(),
            outcomes=loop.ledger.outcomes,
            skipped=loop.ledger.skipped,
            unknown_fields=parts.source.unknown_fields,
            overweight=parts.source.overweight,
            clipped={} if self._features is None else self._features.clipped,
            letters_dropped=dict(parts.source.letters_dropped),
            lag_seconds=parts.lag.seconds,
            lag_age_seconds=None if lag_time is None else time.monotonic() - lag_time,
            behind=parts.lag.behind,
            partitions=partitions,
            labels=None if parts.late is None else parts.late.report(),
            teacher=None if parts.teacher is None else parts.teacher.report,
            backfill=self._backfill.report(parts.source.history),
            storage=None if self._mirror is None else self._mirror.report(),
            accuracy=windows if self._classification else {},
            error={} if self._classification else _errors(windows),
            simplest=self._simplest() if self._classification else _errors(self._simplest()),
            loss=self._losses(),
            window_rows=loop.monitor.prequential.window,
            classes=dict(scoring.evaluation.classes),
            groups=dict(scoring.evaluation.groups) if self._classification else _errors(scoring.evaluation.groups),
            forgetting=scoring.retention.forgetting,
            drifts=loop.monitor.drift.count,
            drift_step=loop.monitor.drift.step,
            search=parts.trainer.search_report,
            replay_ratio=loop.replay_ratio,
            micro_batch_size=parts.trainer.micro_batch_size,
            exchanged_bytes=parts.trainer.sent_bytes,
            rates=rates,
            **({} if store is None else _of_store(store)),
            holdout_rows=len(parts.holdout),
            device_memory=self._device_memory(store),
            device_sharing=self._sharing.report if self._sharing is not None else None,
            device=self._device(rates),
            erased=parts.erasure.records,
            erased_through=parts.erasure.through,
            undo=parts.undone.report(loop.ledger.partitions),
            version=publisher.number,
            verdict=publisher.verdict,
            held_since=publisher.gate.hold.since,
            held_reasons=list(publisher.gate.hold.reasons),
            withdrawn=publisher.gate.withdrawn,
            servers=publisher.servers,
            canary=publisher.canary.report if publisher.canary is not None else None,
            versions_published=publisher.published,
            publish_skipped=publisher.skipped,
        )

    def _device_memory(self, store: Store | None) -> dict[str, int]:
        trainer = self._parts.trainer
        others = {
            "scorer": self._parts.publisher.gate.device_bytes,
            "checkpoint_staging": trainer.staging.cloned_bytes,
            "replay": store.tiers.device_bytes if store is not None else 0,
        }
        return live_bytes(trainer.device, trainer.model, trainer.update.optimizer, others)

    def _windows(self) -> dict[str, float]:
        """Mean scores: of new events before training on them, and of the holdout set."""
        publisher, prequential = self._parts.publisher, self._loop.monitor.prequential
        windows = {name: score for name, score in publisher.scoring.evaluation.windows.items() if name in _WINDOWS}
        windows |= publisher.scoring.retention.windows
        if prequential.mean is not None and prequential.overall is not None:
            windows |= {"now": prequential.mean, "overall": prequential.overall}
        return windows

    def _simplest(self) -> dict[str, float]:
        """Mean scores of the simplest rule, on the events of some windows."""
        held_out = self._parts.publisher.scoring.evaluation.simplest
        return self._loop.monitor.simplest.windows | {name: held_out[name] for name in ("old",) if name in held_out}

    def _losses(self) -> dict[str, float]:
        now, overall = self._loop.monitor.prequential.loss, self._loop.monitor.prequential.overall_loss
        return {} if now is None or overall is None else {"now": now, "overall": overall}

    def _device(self, rates: Mapping[str, float]) -> DeviceHealthReport | None:
        """The health of the devices, with the energy by event, from the rates of both."""
        if self._health is None:
            return None
        joules = rates["joules"] / rates["rows_new"] if rates["rows_new"] and rates["joules"] else None
        return msgspec.structs.replace(self._health.report, joules_per_event=joules)

    def _rates(self) -> dict[str, float]:
        then, now = self._marks[0], self._mark()
        self._marks.append(now)
        seconds = max(1e-6, now[0] - then[0])
        names = ("steps", "rows_new", "rows_replay", "joules")[: len(now) - 1]
        return {name: (now[i] - then[i]) / seconds for i, name in enumerate(names, start=1)}

    def _mark(self) -> tuple[float, ...]:
        state = self._loop.state
        counts = time.monotonic(), state.steps, state.rows_new, state.rows_replay
        if self._health is None:
            return counts
        return *counts, sum(device.energy or 0.0 for device in self._health.report.devices)


def _of_store(store: Store) -> dict[str, Any]:
    """Return the fields of a report that are of the store."""
    return {
        "replay_rows": store.rows,
        "replay_bytes": store.bytes,
        "replay_capacity": store.capacity,
        "replay_bounds": store.bounds,
        "replay_lost": store.lost,
    }


def _errors(scores: Mapping[str, float]) -> dict[str, float]:
    """Return errors from the scores of a regression task, which are negated errors."""
    return {name: -score for name, score in scores.items()}
