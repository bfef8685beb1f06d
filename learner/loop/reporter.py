"""Reports the state of the learner: `learner.json` about twice a second, and the metrics read off the same report."""

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from prometheus_client import Gauge, Histogram
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.ingest.transport.protocol import HistoryProgress
from anabranch.learner.evaluate.baselines import CONSTANT
from anabranch.learner.evaluate.holdout import HeldOutShare
from anabranch.learner.evaluate.measures import Estimate, Measure
from anabranch.learner.evaluate.outcomes import Estimates, class_counts
from anabranch.learner.extension import overriding
from anabranch.learner.loop.loop_state import LoopComponents, LoopMetrics
from anabranch.learner.loop.tombstones import TombstoneWatch
from anabranch.learner.loop.training_loop import TrainingLoop
from anabranch.learner.model.features.learned import LearnedFeatures, features_of
from anabranch.learner.model.features.numbers import FELL, LearnedNumber
from anabranch.learner.state_dir.lock import check_generation
from anabranch.learner.status.report import (
    FEWEST_COMPARED,
    BackfillReport,
    BaselineReport,
    ClassReport,
    DeviceHealthReport,
    LearnerReport,
    MeasureReport,
    PartitionReport,
    write_report,
)
from anabranch.learner.stream.ledger import Ledger
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.metrics import StoreFigures
from anabranch.replay.store import Store

_EVERY_SECONDS = 0.5
_RATE_MARKS = 10
_FRESH_SECONDS = 2.5
"""Age of the end offsets of partitions after which a broker does not answer."""
_MOST_CLASSES = 64
"""Classes of the newest events that are reported."""
_WINDOWS = ("worst", "worst_group", "old")
"""The windows of an evaluation that are reported."""
_HELD_OUT = "held_out"
"""The window of measures of all held-out events, among which rare classes have more than their share."""
_BACKFILL_SECONDS = 30.0
"""Over which the rate of the history is measured."""

PATIENCE = timedelta(minutes=1)
"""Longest time between two beats: the loop beats after every step, and ten times a second while it is idle."""
_MARK_SECONDS, _MARKS = 1.0, 11
_LITTLE = 0.35
"""Less than its due next to one busy program for each core, which is half."""

_MOST_LOGGED = 20
_MANY = 0.05
"""Values beyond a fixed scale, of those of late."""

_FEW = 100
"""Events of a topic that may all be unusable before it is a problem; a history is one once it is read."""
_UNUSABLE = ("unlabelled", "untaught")
"""Reasons for which an event without a label is skipped."""
_AS_ORDERED = ("left_to_topics", "left_to_files", "repeated", "undone", "erased", "tombstone", "deleted")
"""Reasons that say nothing of what an event is like."""

log = logging.getLogger(__name__)


class Reporter:
    """Called by the loop's thread between steps, so that all numbers of a report belong to the same step."""

    def __init__(
        self,
        state_dir: Path,
        constant: LearnerReport,
        loop: TrainingLoop,
        parts: LoopComponents,
        metrics: LoopMetrics,
        store: BackgroundStore | None = None,
        others: Sequence[object] = (),
    ) -> None:
        """Report on `loop` and its `parts`.

        `constant` has the fields that stay the same while the process lives. `others` may have a `problem` and a
        `warning`, as extensions do: a sentence, or None.
        """
        self._state_dir = state_dir
        self._constant = constant
        self._loop = loop
        self._parts = parts
        self._metrics = metrics
        self._store = store
        self._resumed_at = loop.state.steps
        self._due = 0.0
        self._heartbeat = Heartbeat(metrics.learner.heartbeat)
        self._backfill = BackfillRate()
        learned = features_of(parts.trainer.model)
        self._features = None if learned is None else FeatureWatch(learned, loop.ledger)
        known = parts.publisher.gate.scorer.measures
        windows = ("now", "faded") if known.kind == "two-classes" else ("now",)
        self._estimates = Estimates((*windows, _HELD_OUT), known.each.values())
        hold_out = parts.source.hold_out
        self._held_out = None if hold_out is None else HeldOutShare(hold_out.fraction)
        self._marks: deque[dict[str, float]] = deque(maxlen=_RATE_MARKS)
        self._marks.append(self._mark(None, None))
        self._waited: deque[bool] = deque(maxlen=_RATE_MARKS)
        """Whether events waited to be read, at each mark."""
        self._full_rates: dict[str, float] = {}
        self._unusable: list[str] = []
        self._worse: list[str] = []
        """That the model is worse than a baseline, one sentence each."""
        self.problem: str | None = None
        """One sentence when the last report could not be written."""
        publisher = parts.publisher
        self._monitored = (
            self._heartbeat,
            loop,
            self._features,
            parts.source,
            parts.lag,
            publisher,
            publisher.gate.hold,
            known,
            parts.checkpointer,
            parts.erasure,
            self,
            loop.non_finite,
            loop.raising_events,
            store,
            *others,
            self._held_out,
            TombstoneWatch(lambda: parts.source.tombstones, lambda: parts.erasure.erased),
        )

    def problems(self) -> list[str]:
        """One sentence for each component that does not work as it should. Thread-safe, also while the loop hangs."""
        return self._sentences("problem") + self._unusable

    def hang(self) -> str | None:
        """One sentence while the training loop hangs. Thread-safe."""
        return self._heartbeat.problem

    def warnings(self) -> list[str]:
        """One sentence for each workaround that the learner applied, or early warning. Thread-safe."""
        return self._sentences("warning") + self._worse

    def _sentences(self, kind: str) -> list[str]:
        found = [sentence for component in self._monitored if (sentence := getattr(component, kind, None))]
        return found + [sentence for each in self._parts.extensions for sentence in getattr(each, f"{kind}s")]

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
        check_generation(self._state_dir, self._constant.generation)
        self._loop.ledger.count()
        if self._held_out is not None:
            self._held_out.update(self._loop.ledger.totals.outcomes)
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
        partitions = dict(loop.ledger.totals.reports())
        self._unusable = unusable_sources(partitions)
        own = self._of_extensions()
        rates = self._rates(own.get("device"), store)
        if own.get("device") is not None and rates["rows_new"] and rates["joules"]:
            joules = rates["joules"] / rates["rows_new"]
            own["device"] = msgspec.structs.replace(own["device"], joules_per_event=joules)
        scoring, lag_time = publisher.scoring, parts.source.ends_time
        lag_age = None if lag_time is None else time.monotonic() - lag_time
        self._waited.append(_waits(partitions, lag_age))
        if all(self._waited) and len(self._waited) == _RATE_MARKS and rates["steps"]:
            self._full_rates = rates
        baselines = self._baselines()
        self._worse = [
            f"on new events the model is {each.comparison}, in which no feature has a part: check that the features "
            "say something of the label, and that the loss falls"
            for each in baselines.values()
            if each.worse and loop.state.rows_new >= FEWEST_COMPARED
        ]
        checkpoints, checkpoint_seconds = _observed(self._metrics.learner.checkpoint)
        windows, classification = self._windows(), loop.monitor.bounded
        report = msgspec.structs.replace(
            self._constant,
            time=time.time(),
            steps=loop.state.steps,
            steps_since_start=loop.state.steps - self._resumed_at,
            checkpoint=parts.checkpointer.number or None,
            checkpoint_time=parts.checkpointer.time,
            problems=self.problems(),
            warnings=self.warnings(),
            outcomes=loop.ledger.totals.outcomes,
            skipped=loop.ledger.totals.skipped,
            unknown_fields=parts.source.unknown_fields,
            overweight=parts.source.overweight,
            clipped={} if self._features is None else self._features.clipped,
            letters_dropped=dict(parts.source.letters_dropped),
            lag_seconds=parts.lag.seconds,
            lag_age_seconds=lag_age,
            behind=parts.lag.behind,
            partitions=partitions,
            backfill=self._backfill.report(parts.source.history),
            accuracy=windows if classification else {},
            error={} if classification else _errors(windows),
            baselines=baselines,
            measures=self._measures(),
            answers="" if publisher.answering.rule is None else publisher.answering.rule.sentence,
            measure=publisher.gate.choice.name,
            measure_reason=publisher.gate.choice.why,
            loss=loop.monitor.prequential.loss.windows,
            window_rows=loop.monitor.prequential.window,
            classes=dict(scoring.evaluation.classes),
            newest_classes=self._classes(),
            slices=dict(self._parts.publisher.slices),
            groups=dict(scoring.evaluation.groups) if classification else _errors(scoring.evaluation.groups),
            forgetting=scoring.retention.forgetting,
            drifts=loop.monitor.drift.count,
            drift_step=loop.monitor.drift.step,
            replay_ratio=parts.replay.ratio,
            micro_batch_size=parts.trainer.runner.micro_batch_size,
            exchanged_bytes=parts.trainer.runner.sent_bytes,
            without_graphs=parts.trainer.runner.without_graphs,
            rates=rates,
            full_rates=self._full_rates,
            checkpoint_seconds=checkpoint_seconds / checkpoints if checkpoints else None,
            **({} if store is None else _of_store(store)),
            holdout_rows=len(parts.holdout),
            device_memory=self._device_memory(store),
            erased=parts.erasure.records,
            erased_through=parts.erasure.through,
            version=publisher.number,
            verdict=publisher.verdict,
            held_since=publisher.gate.hold.since,
            held_reasons=list(publisher.gate.hold.reasons),
            withdrawn=publisher.gate.withdrawn,
            versions_published=publisher.published,
            publish_skipped=publisher.skipped,
        )
        return msgspec.structs.replace(report, **own)

    def _of_extensions(self) -> dict[str, Any]:
        """Return the fields that extensions report; a struct, which no field takes, has its own metrics."""
        fields, own = dict[str, Any](), dict[str, dict[str, Any]]()
        for report in overriding(self._parts.extensions, "report"):
            for name, value in report().items():
                if name in LearnerReport.__struct_fields__:
                    fields[name] = value
                else:
                    own[name] = msgspec.to_builtins(value)
                    self._metrics.learner.update_extension(name, value)
        return {**fields, "extensions": own}

    def _device_memory(self, store: Store | None) -> dict[str, int]:
        trainer = self._parts.trainer
        others = {
            "scorer": self._parts.publisher.gate.scorer.device_bytes,
            "checkpoint_staging": trainer.staging.cloned_bytes,
            "replay": store.tiers.memory.device_bytes if store is not None else 0,
        }
        return live_bytes(trainer.device, trainer.model, trainer.update.optimizer, others)

    def _windows(self) -> dict[str, float]:
        """Mean scores: of new events before training on them, and of the holdout set."""
        publisher = self._parts.publisher
        windows = {name: score for name, score in publisher.scoring.evaluation.windows.items() if name in _WINDOWS}
        return windows | publisher.scoring.retention.windows | self._loop.monitor.prequential.score.windows

    def _baselines(self) -> dict[str, BaselineReport]:
        """Mean scores of the baselines on the events of some windows, and how the model compares."""
        monitor, held_out = self._loop.monitor, self._parts.publisher.scoring.evaluation.constant
        found = {}
        for index, (name, rule) in enumerate(monitor.baselines.rules.items()):
            scores = monitor.prequential.score.other_windows(index)
            if name == CONSTANT and "old" in held_out:
                scores["old"] = held_out["old"]
            scores = scores if monitor.bounded else _errors(scores)
            words, worse = monitor.prequential.against(index, rule)
            found[name] = BaselineReport(rule=rule, scores=scores, comparison=words, worse=worse)
        return found

    def _measures(self) -> dict[str, MeasureReport]:
        """Renew the measures of the stream and of the newest version in turn, and return them."""
        self._estimates.renew(self._estimate)
        reports, known = dict[str, MeasureReport](), self._parts.publisher.gate.scorer.measures.each
        for (name, window), each in sorted(self._estimates.now.items()):
            report = reports.setdefault(name, MeasureReport({}, {}, {}, {}, known[name].higher))
            report.value[window], report.lower[window], report.upper[window] = each.value, each.low, each.high
            if math.isfinite(each.constant):
                report.constant[window] = each.constant
        return reports

    def _estimate(self, window: str, measure: Measure) -> Estimate | None:
        if window != _HELD_OUT:
            return self._loop.monitor.outcomes.estimate(window, measure)
        held_out = self._parts.publisher.scoring.outcomes
        return None if held_out is None else measure.estimate(held_out)

    def _classes(self) -> dict[str, ClassReport]:
        """Return what the model has answered of each class, of the newest events before training on them."""
        newest, label = self._loop.monitor.outcomes.newest, self._parts.publisher.gate.scorer.schema.label
        if newest is None or label.one_of is None or (counts := class_counts(newest, label.one_of)) is None:
            return {}
        names = label.names or [str(number) for number in range(label.one_of)]
        listed = np.sort(np.argsort(-counts[:, 0], kind="stable")[:_MOST_CLASSES])
        return {names[number]: _of_class(*counts[number].tolist()) for number in listed.tolist()}

    def _rates(self, device: DeviceHealthReport | None, store: Store | None) -> dict[str, float]:
        """Return rates over the last five seconds, by what is counted."""
        now = self._mark(device, store)
        then = next((mark for mark in self._marks if mark.keys() == now.keys()), now)
        self._marks.append(now)
        seconds = max(1e-6, now["time"] - then["time"])
        return {name: (count - then[name]) / seconds for name, count in now.items() if name != "time"}

    def _mark(self, device: DeviceHealthReport | None, store: Store | None) -> dict[str, float]:
        state, metrics = self._loop.state, self._metrics.learner
        mark = {
            "time": time.monotonic(),
            "steps": state.steps,
            "rows_new": state.rows_new,
            "rows_replay": state.rows_replay,
            "step_seconds": _observed(metrics.step)[1],
            "replay_stall_seconds": 0.0 if store is None else store.tiers.stats.stall_seconds,
            "checkpoint_stall_seconds": next(iter(metrics.checkpoint_stall.collect())).samples[0].value,
        }
        return mark if device is None else {**mark, "joules": sum(each.energy or 0.0 for each in device.devices)}


def _observed(histogram: Histogram) -> tuple[float, float]:
    """Return how many values a histogram has, and their sum."""
    values = {sample.name.rpartition("_")[2]: sample.value for sample in next(iter(histogram.collect())).samples}
    return values["count"], values["sum"]


def _waits(partitions: Mapping[str, PartitionReport], lag_age: float | None) -> bool:
    """Return whether messages of a topic wait to be read, as the broker has just said."""
    if lag_age is None or lag_age > _FRESH_SECONDS:
        return False
    return any(each.pending for each in partitions.values() if not each.history)


def _of_store(store: Store) -> dict[str, Any]:
    """Return the fields of a report that are of the store."""
    figures = StoreFigures.of(store)
    return {
        "replay_rows": figures.rows,
        "replay_bytes": figures.bytes,
        "replay_capacity": figures.capacity,
        "replay_bounds": figures.bounds,
        "replay_lost": figures.lost,
    }


def _of_class(support: int, found: int, answered: int) -> ClassReport:
    recall, precision = found / support if support else None, found / answered if answered else None
    return ClassReport(support=support, found=found, answered=answered, recall=recall, precision=precision)


def _errors(scores: Mapping[str, float]) -> dict[str, float]:
    """Return errors from the scores of a regression task, which are negated errors."""
    return {name: -score for name, score in scores.items()}


def live_bytes(
    device: torch.device, model: nn.Module, optimizer: Optimizer, others: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes of a learner on its device, by purposes as in `ledger`, without those of 0 bytes.

    Weights include the model's buffers on the device, `base` has the frozen ones, and `others` are added as they are.
    On CUDA `other` is what is allocated besides, such as activations and what a strategy keeps, and `cached` what
    torch's allocator keeps for later.
    """
    inner = getattr(optimizer, "optim", optimizer)  # of one whose state is sharded over ranks
    weights, buffers = list(model.parameters()), [each for each in model.buffers() if each.device.type == device.type]
    state = [value for values in inner.state.values() for value in values.values() if isinstance(value, Tensor)]
    found = {
        "weights": _nbytes([*(each for each in weights if each.requires_grad), *buffers]),
        "base": _nbytes(each for each in weights if not each.requires_grad),
        "gradients": _nbytes(weight.grad for weight in model.parameters() if weight.grad is not None),
        "optimizer": _nbytes(value for value in state if value.device.type == device.type),
        **others,
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
        found |= {"other": max(0, allocated - sum(found.values())), "cached": reserved - allocated}
    return {purpose: size for purpose, size in found.items() if size}


def _nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors; of those that are sharded over ranks, of this rank's shards."""
    shards: Iterable[Any] = (each.to_local() if hasattr(each, "device_mesh") else each for each in tensors)
    return sum(int(each.nbytes) for each in shards)


def processor_times() -> tuple[float, float]:
    """Return how long this thread has run and has waited for a core, in seconds; zeros where no kernel says so."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


class Heartbeat:
    """Detects a loop that no longer beats, or gets little processor time. The loop's thread beats; any may read.

    Before the first beat the loop starts, which may take long, so there is no problem then.
    """

    def __init__(
        self,
        gauge: Gauge,
        clock: Callable[[], float] = time.monotonic,
        processor_times: Callable[[], tuple[float, float]] = processor_times,
    ) -> None:
        self._gauge = gauge
        self._clock = clock
        self._processor_times = processor_times
        self._last: float | None = None
        self._marks: deque[tuple[float, float, float]] = deque(maxlen=_MARKS)

    def beat(self) -> None:
        """Record that the loop is at a boundary between steps."""
        self._last = self._clock()
        self._gauge.set_to_current_time()
        if not self._marks or self._last - self._marks[-1][0] >= _MARK_SECONDS:
            self._marks.append((self._last, *self._processor_times()))

    @property
    def problem(self) -> str | None:
        """One sentence when the last beat was too long ago."""
        if self._last is None or self._clock() - self._last < PATIENCE.total_seconds():
            return None
        return (
            f"the training loop has made no progress for more than {PATIENCE.total_seconds():.0f} s: "
            "the disk, the device or the model hangs; restart the learner if it does not continue"
        )

    @property
    def warning(self) -> str | None:
        """One sentence while other programs leave the loop's thread little of the processor time that it asks for."""
        if len(self._marks) < _MARKS:
            return None
        seconds, ran, waited = (now - then for now, then in zip(self._marks[-1], self._marks[0], strict=True))
        if ran + waited < seconds / 2 or ran >= _LITTLE * (ran + waited):
            return None
        return (
            f"training has got {ran / (ran + waited):.0%} of the processor time that it asked for in the last "
            f"{seconds:.0f} s: other programs use the cores; stop them, or give the learner its own"
        )


class FeatureWatch:
    """Logs and reports outliers by the name of the feature and the offset. Used by the loop's thread; any may read."""

    def __init__(self, learned: LearnedFeatures, ledger: Ledger) -> None:
        """`ledger` names the partitions of events."""
        self._learned = learned
        self._ledger = ledger
        self._logged = Counter[str]()
        self._sentences = dict[str, str]()

    @property
    def warning(self) -> str | None:
        """One sentence for each feature that has met such a value, or whose scale does not fit its values any more."""
        numbers = self._learned.of(LearnedNumber).items()
        fits = (sentence for name, number in numbers if (sentence := _of_scale(name, number)))
        return "; ".join([*self._sentences.values(), *fits]) or None

    @property
    def clipped(self) -> dict[str, int]:
        """By feature, values since the start that statistics learned from as if they were nearer to the others."""
        return {name: number.clipped for name, number in self._learned.of(LearnedNumber).items()}

    def poll(self) -> None:
        """Log the outliers since the last call, of each feature the first ones of a process."""
        while self._learned.outliers:
            outlier = self._learned.outliers.popleft()
            name = outlier.feature
            partition = self._ledger.partitions[outlier.partition].name
            where, at = f"{partition.topic}[{partition.partition}]", outlier.offset
            command = f'"anabranch undo --offsets {where}@{at}..{at}"'
            sentence = (
                f"schema.features.{name} of {where}@{at} is {outlier.value:g}, far from all others: "
                f"its scale learned from it as from a nearer one. {command} takes the event out of the weights too; "
                f"schema.features.{name}.min and max refuse such values"
            )
            self._logged[name] += 1
            if self._logged[name] <= _MOST_LOGGED:
                log.warning("%s", sentence)
            self._sentences = {**self._sentences, name: sentence}  # which another thread may read meanwhile


def _of_scale(name: str, number: LearnedNumber) -> str | None:
    if number.fell >= FELL:
        return (
            f"schema.features.{name} has a scale {number.fell:.0f} times as wide as it has been since the start: "
            "either its values have another unit now, or some are wrong"
        )
    if number.beyond >= _MANY:
        return (
            f"schema.features.{name} has a scale that learner.strategy has fixed, and {number.beyond:.0%} "
            "of its values of late are beyond it, and cut off: scale it by constants in the model, "
            "or take another strategy"
        )
    return None


class BackfillRate:
    """Rows per second over the last half minute. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()
        """Times, and the rows that were read by then."""

    def report(self, progress: HistoryProgress | None) -> BackfillReport | None:
        """Return the report of the newest progress; None where there is none."""
        if progress is None:
            return None
        now = self._clock()
        self._marks.append((now, progress.rows_done))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _BACKFILL_SECONDS:
            self._marks.popleft()
        then, before = self._marks[0]
        rate = 0.0 if progress.done else (progress.rows_done - before) / max(1e-3, now - then)
        left = max(0, progress.rows - progress.rows_done)
        return BackfillReport(
            topics=list(progress.topics),
            rows_read=progress.rows_done,
            rows=progress.rows,
            files_read=progress.files_done,
            files=progress.files,
            file=progress.file or "",
            rate=rate,
            seconds_left=0.0 if progress.done else left / rate if rate > 0 else None,
            done=progress.done,
        )


def unusable_sources(partitions: Mapping[str, PartitionReport]) -> list[str]:
    """Return one sentence for each topic or history of which all events so far were rejected or have no label."""
    sources: dict[str, list[PartitionReport]] = {}
    for name, report in partitions.items():
        topic = name if report.files else name.rpartition(":")[0]
        if report.history <= 1 and "#" not in topic:  # later passes repeat the first; a log that is gone is past
            sources.setdefault(topic, []).append(report)
    found = []
    for name, reports in sources.items():
        outcomes, skipped = Counter[str](), Counter[str]()
        for report in reports:
            outcomes.update(report.outcomes)
            skipped.update(report.skipped)
        rejected, without = outcomes["dead_lettered"], sum(skipped[reason] for reason in _UNUSABLE)
        events = outcomes.total() - sum(skipped[reason] for reason in _AS_ORDERED)
        read = reports[0].history and not sum(report.pending for report in reports)
        if events and rejected + without == events and (read or events >= _FEW):
            found.append(
                f"none of the {events:,} events of {name} can be used: {rejected:,} were rejected, and {without:,} "
                "have no label; compare [schema] with the dead letters, and [schema.label] with what is sent"
            )
    return found
