"""Metrics of the training loop and of the versions that it publishes."""

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from anabranch.core.state_metrics import StateCollector, StateCounter, StateGauge, Value
from anabranch.core.tracing.spans import left_out_counter
from learner.state_dir.report import (
    DeviceHealthReport,
    DeviceReport,
    LabelReport,
    LearnerReport,
    PartitionReport,
    TeacherReport,
)
from learner.state_dir.search.control import SearchReport


def _by_partition(read: Callable[[PartitionReport], int]) -> Callable[[LearnerReport], dict[tuple[str, str], float]]:
    """Return a function that reads a number of each partition of a topic, by topic and partition.

    The history is left out: its rows are counted by their own metrics.
    """

    def read_all(report: LearnerReport) -> dict[tuple[str, str], float]:
        topics = {name.rpartition(":")[::2]: each for name, each in report.partitions.items() if not each.history}
        return {key: read(each) for key, each in topics.items()}

    return read_all


def _of_labels(read: Callable[[LabelReport], Value]) -> Callable[[LearnerReport], Value]:
    """Return a function that reads late labels; it returns None where there are none."""
    return lambda report: None if report.labels is None else read(report.labels)


def _of_teacher(read: Callable[[TeacherReport], Value]) -> Callable[[LearnerReport], Value]:
    """Return a function that reads the teacher; it returns None where there is none."""
    return lambda report: None if report.teacher is None else read(report.teacher)


def _of_search(read: Callable[[SearchReport], Value]) -> Callable[[LearnerReport], Value]:
    """Return a function that reads the search; it returns None where there is none."""
    return lambda report: None if report.search is None else read(report.search)


def _lags(labels: LabelReport) -> dict[str, float]:
    by_quantile = {"0.5": labels.lag_p50_seconds, "0.99": labels.lag_p99_seconds}
    return {quantile: seconds for quantile, seconds in by_quantile.items() if seconds is not None}


def _by_device(read: Callable[[DeviceReport], float | None]) -> Callable[[DeviceHealthReport], dict[str, float]]:
    """Return a function that reads a number of each device that has one, by UUID."""
    return lambda report: {device.uuid: value for device in report.devices if (value := read(device)) is not None}


def _by_device_and(
    read: Callable[[DeviceReport], Mapping[str, float]],
) -> Callable[[DeviceHealthReport], dict[tuple[str, str], float]]:
    """Return a function that reads numbers of each device, by UUID and their names."""
    return lambda report: {
        (device.uuid, name): value for device in report.devices for name, value in read(device).items()
    }


REPORT_METRICS: Sequence[StateGauge[LearnerReport]] = (
    StateGauge("anabranch_ingest_skipped_rows", "Skipped events by reason.", lambda report: report.skipped, "reason"),
    StateCounter(
        "anabranch_ingest_letters_dropped",
        "Dead letters that were not written: refused even without contents, or of a loop of pipelines.",
        lambda report: report.letters_dropped,
        "reason",
    ),
    StateGauge(
        "anabranch_ingest_lag_offsets",
        "Offsets not yet read.",
        _by_partition(lambda partition: partition.pending),
        "topic",
        "partition",
    ),
    StateGauge(
        "anabranch_ingest_lag_seconds",
        "How long the next event has been there, on the partition that lags most.",
        lambda report: report.lag_seconds,
    ),
    StateGauge(
        "anabranch_ingest_lag_time_seconds",
        "When the broker was asked for the ends to which lag is counted, in seconds since 1970; 0 before that.",
        lambda report: None if report.lag_age_seconds is None else report.time - report.lag_age_seconds,
    ),
    StateGauge(
        "anabranch_ingest_behind",
        "1 while [stream.lag_policy] holds, since lag is too long.",
        lambda report: report.behind,
    ),
    StateGauge(
        "anabranch_ingest_passed_offsets",
        "Offsets sought over unread by skip-to-latest.",
        _by_partition(lambda partition: partition.passed),
        "topic",
        "partition",
    ),
    StateGauge(
        "anabranch_backfill_rows",
        "Rows of the history in all passes.",
        lambda report: None if report.backfill is None else report.backfill.rows,
    ),
    StateCounter(
        "anabranch_backfill_read_rows",
        "Rows of the history that were read, over the life of the pipeline.",
        lambda report: None if report.backfill is None else report.backfill.rows_read,
    ),
    StateGauge(
        "anabranch_learner_trained_through_offset",
        "Last offset up to which every event has its outcome.",
        _by_partition(lambda partition: partition.trained_through),
        "topic",
        "partition",
    ),
    StateGauge(
        "anabranch_learner_seen_through_offset",
        "Last offset that was read, whether or not its event waits for a label.",
        _by_partition(lambda partition: partition.seen_through),
        "topic",
        "partition",
    ),
    StateGauge(
        "anabranch_learner_waiting_rows",
        "Events that wait for their label, by whether their fate is decided: they are ready for a step then.",
        _of_labels(lambda labels: {"waiting": labels.waiting - labels.ready, "ready": labels.ready}),
        "state",
    ),
    StateGauge(
        "anabranch_learner_waiting_bytes", "Disk space of waiting events.", _of_labels(lambda labels: labels.bytes)
    ),
    StateGauge(
        "anabranch_learner_waited_rows",
        "Events that have waited for their label, by how they ended.",
        _of_labels(lambda labels: labels.ended),
        "outcome",
    ),
    StateGauge(
        "anabranch_learner_kept_labels",
        "Labels without an event, which may still come.",
        _of_labels(lambda labels: labels.kept),
    ),
    StateCounter(
        "anabranch_learner_labels",
        "Late labels, and events without one, by what became of them.",
        _of_labels(lambda labels: labels.labels),
        "result",
    ),
    StateGauge(
        "anabranch_learner_label_lag_seconds",
        "Time from an event to its label, by record times, of the last labels.",
        _of_labels(_lags),
        "quantile",
    ),
    StateGauge(
        "anabranch_learner_accuracy_ratio",
        "Accuracy by window: of new events before training on them, and of held-out ones.",
        lambda report: report.accuracy,
        "window",
    ),
    StateGauge(
        "anabranch_learner_absolute_error",
        "Mean absolute error of regression, over the same windows.",
        lambda report: report.error,
        "window",
    ),
    StateGauge(
        "anabranch_learner_loss",
        "Mean loss of new events before training on them.",
        lambda report: report.loss,
        "window",
    ),
    StateGauge(
        "anabranch_learner_window_rows",
        "Events in the window now: it grows for as long as the accuracy stays the same.",
        lambda report: report.window_rows,
    ),
    StateGauge(
        "anabranch_learner_class_accuracy_ratio", "Accuracy on held-out events.", lambda report: report.classes, "class"
    ),
    StateGauge(
        "anabranch_learner_group_accuracy_ratio",
        "Accuracy on held-out events, by the hash of the group.",
        lambda report: report.groups if report.accuracy else {},  # of regression, errors
        "group",
    ),
    StateGauge(
        "anabranch_learner_forgetting_ratio",
        "Best accuracy ever less accuracy now on held-out events, mean over the classes; of regression, error.",
        lambda report: report.forgetting,
    ),
    StateGauge(
        "anabranch_learner_replay_ratio",
        "Events to replay for each new one in the next step.",
        lambda report: report.replay_ratio,
    ),
    StateGauge(
        "anabranch_learner_micro_batch_rows",
        "Events that go through the model at once at most; 0: all of a step.",
        lambda report: report.micro_batch_size,
    ),
    StateGauge(
        "anabranch_search_challengers",
        "Challengers of [search] that have not ended.",
        _of_search(lambda search: len(search.challengers)),
    ),
    StateCounter(
        "anabranch_search_steps",
        "Steps of challengers, over the life of the pipeline.",
        _of_search(lambda search: search.steps),
    ),
    StateCounter(
        "anabranch_search_ended",
        "Challengers by how they ended, over the life of the pipeline.",
        _of_search(lambda search: search.outcomes),
        "outcome",
    ),
    StateGauge(
        "anabranch_search_setting",
        "The settings that the model trains with, by key of [search.space].",
        _of_search(lambda search: search.values),
        "key",
    ),
    StateCounter(
        "anabranch_learner_teacher_rows",
        "New events by what the teacher returned for them in time: answered, unusable, late, failed, unasked.",
        _of_teacher(lambda teacher: teacher.rows),
        "result",
    ),
    StateCounter(
        "anabranch_learner_teacher_wait_seconds",
        "Time that steps waited for the teacher.",
        _of_teacher(lambda teacher: teacher.waited_seconds),
    ),
    StateGauge(
        "anabranch_learner_teacher_up",
        "1 while the teacher answers, 0 while it is away.",
        _of_teacher(lambda teacher: teacher.up),
    ),
    StateCounter(
        "anabranch_learner_exchanged_bytes",
        "Bytes that rank 0 has sent to average gradients and other tensors over the ranks.",
        lambda report: report.exchanged_bytes,
    ),
    StateGauge(
        "anabranch_learner_problems", "Parts that do not work as they should.", lambda report: len(report.problems)
    ),
    StateGauge("anabranch_holdout_rows", "Held-out events in the holdout set.", lambda report: report.holdout_rows),
    StateGauge(
        "anabranch_checkpoint_number", "The newest checkpoint; 0 without one.", lambda report: report.checkpoint
    ),
    StateGauge(
        "anabranch_checkpoint_time_seconds", "When it was made, since 1970.", lambda report: report.checkpoint_time
    ),
    StateGauge(
        "anabranch_storage_lag_seconds",
        "How long the object store has lacked the newest checkpoint, version or erasure log; 0 while it has it.",
        lambda report: None if report.storage is None else report.storage.lag_seconds,
        "kind",
    ),
    StateCounter(
        "anabranch_storage_uploaded_bytes",
        "Bytes that were uploaded to the object store in the background.",
        lambda report: None if report.storage is None else report.storage.uploaded_bytes,
    ),
    StateCounter(
        "anabranch_storage_failures",
        "Rounds of uploads to the object store that failed after the retries of its client.",
        lambda report: None if report.storage is None else report.storage.failures,
    ),
    StateGauge("anabranch_learner_version", "Number of the newest version published.", lambda report: report.version),
    StateGauge(
        "anabranch_gate_hold_seconds",
        "Time for which versions have failed in a row; 0 if none.",
        lambda report: None if report.held_since is None else max(0.0, report.time - report.held_since),
    ),
    StateGauge(
        "anabranch_learner_device_memory_bytes",
        "Memory of the learner's device by purpose; on a CPU that of the host.",
        lambda report: report.device_memory,
        "purpose",
    ),
    StateGauge(
        "anabranch_device_sharing_training_ratio",
        "Part of the time of steps that was not given to requests.",
        lambda report: None if report.device_sharing is None else report.device_sharing.training,
    ),
)
"""Metrics that are read off the learner's report."""

DEVICE_METRICS: Sequence[StateGauge[DeviceHealthReport]] = (
    StateGauge(
        "anabranch_device_memory_used_bytes",
        "Memory of the device in use, by all processes.",
        _by_device(lambda device: device.memory_used),
        "uuid",
    ),
    StateGauge(
        "anabranch_device_memory_capacity_bytes",
        "Memory of the device.",
        _by_device(lambda device: device.memory_total),
        "uuid",
    ),
    StateGauge(
        "anabranch_device_utilization_ratio",
        "Part of the time in which a kernel ran.",
        _by_device(lambda device: device.utilization),
        "uuid",
    ),
    StateGauge(
        "anabranch_device_temperature_celsius",
        "Temperature.",
        _by_device_and(lambda device: device.temperatures),
        "uuid",
        "sensor",
    ),
    StateGauge("anabranch_device_power_watts", "Power.", _by_device(lambda device: device.power), "uuid"),
    StateGauge(
        "anabranch_device_power_limit_watts",
        "Limit of the power.",
        _by_device(lambda device: device.power_limit),
        "uuid",
    ),
    StateCounter(
        "anabranch_device_energy_joules",
        "Energy since the driver was loaded.",
        _by_device(lambda device: device.energy),
        "uuid",
    ),
    StateGauge("anabranch_device_clock_hertz", "Clock.", _by_device_and(lambda device: device.clocks), "uuid", "clock"),
    StateGauge(
        "anabranch_device_slowdown",
        "1 for each reason why clocks are below their maximum.",
        _by_device_and(lambda device: dict.fromkeys(device.slowdown, 1)),
        "uuid",
        "reason",
    ),
    StateCounter(
        "anabranch_device_ecc_errors",
        "Memory errors since the driver was loaded.",
        _by_device_and(lambda device: device.ecc_errors),
        "uuid",
        "kind",
    ),
    StateGauge(
        "anabranch_device_ecc_lifetime_errors",
        "Memory errors over the life of the device.",
        _by_device_and(lambda device: device.ecc_lifetime_errors),
        "uuid",
        "kind",
    ),
    StateGauge(
        "anabranch_device_remapped_rows",
        "Rows of memory with a spare, by cause; pending and failed are 1 or 0.",
        _by_device_and(lambda device: device.remapped_rows),
        "uuid",
        "state",
    ),
    StateCounter(
        "anabranch_device_xid_events",
        "Xid events since the start of the learner.",
        _by_device_and(lambda device: device.xids),
        "uuid",
        "xid",
    ),
    StateCounter(
        "anabranch_device_pcie_replays",
        "Replays of PCIe packets.",
        _by_device(lambda device: device.pcie_replays),
        "uuid",
    ),
    StateGauge(
        "anabranch_device_nvlink_active",
        "NVLink connections that are up.",
        _by_device(lambda device: device.nvlink_active),
        "uuid",
    ),
    StateCounter(
        "anabranch_device_nvlink_errors",
        "Replays and recoveries of NVLink.",
        _by_device(lambda device: device.nvlink_errors),
        "uuid",
    ),
    StateGauge(
        "anabranch_device_silence_seconds",
        "How long the device has not answered; 0 while it does.",
        _by_device(lambda device: device.silence_seconds),
        "uuid",
    ),
    StateGauge(
        "anabranch_device_symptoms",
        "Early warnings and problems of the device.",
        _by_device_and(lambda device: {"warning": len(device.warnings), "problem": len(device.problems)}),
        "uuid",
        "level",
    ),
    StateGauge(
        "anabranch_device_sniff_seconds",
        "Times of the last sniff test: a matrix product of each rank, and a collective.",
        lambda report: report.sniff_seconds,
        "test",
    ),
)
"""Metrics of the devices; none has a value where no device is watched."""


class LearnerMetrics:
    """Collectors of the learner; one object per process, with its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.report = StateCollector(registry, REPORT_METRICS)
        self.device = StateCollector(registry, DEVICE_METRICS)
        self.tracing_left_out = left_out_counter(registry)
        self.mlflow_versions = Counter(
            "anabranch_mlflow_versions",
            "Versions that served: registered in MLflow, or left out: queue (full), refused (by it), gone (deleted).",
            ["outcome"],
            registry=registry,
        )
        self.mlflow_waiting = Gauge(
            "anabranch_mlflow_waiting_versions", "Versions that wait to be registered in MLflow.", registry=registry
        )
        self.steps = Counter("anabranch_learner_steps", "Steps.", registry=registry)
        self.rows = Counter("anabranch_learner_rows_trained", "Events trained on.", ["source"], registry=registry)
        self.step = Histogram(
            "anabranch_learner_step_duration_seconds",
            "Time of a step: sample, forward, backward, update.",
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3),
            registry=registry,
        )
        self.drifts = Counter("anabranch_learner_drifts", "Changes of the stream that were noticed.", registry=registry)
        self.non_finite = Counter(
            "anabranch_learner_non_finite_steps", "Steps skipped for a loss or gradient not finite.", registry=registry
        )
        self.raised = Counter(
            "anabranch_learner_raised_rows",
            "Events left out because the model or its task raised on them, by where they came from.",
            ["source"],
            registry=registry,
        )
        self.teacher_duration = Histogram(
            "anabranch_learner_teacher_request_duration_seconds",
            "Time in which the teacher answered for the events of a step.",
            buckets=(1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10),
            registry=registry,
        )
        self.publish_skipped = Counter(
            "anabranch_publish_skipped", "Versions that fell due while one was being written.", registry=registry
        )
        self.checkpoint = Histogram(
            "anabranch_checkpoint_duration_seconds",
            "Time to write a checkpoint, in the background.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self.checkpoint_stall = Counter(
            "anabranch_checkpoint_stall_seconds",
            "Time that steps waited for a checkpoint to be written.",
            registry=registry,
        )
        self.heartbeat = Gauge(
            "anabranch_learner_heartbeat_time_seconds",
            "When the loop last passed a boundary between steps or idle polls, since 1970; 0 while it starts.",
            registry=registry,
        )
        self.published = Counter("anabranch_versions_published", "Versions published.", registry=registry)
        self.gate_verdicts = Counter("anabranch_gate_verdicts", "Versions by verdict.", ["verdict"], registry=registry)
        self.withdrawn = Counter(
            "anabranch_gate_withdrawn", "Times that monitoring withdrew the served versions.", registry=registry
        )
        self.canary_verdicts = Counter(
            "anabranch_canary_verdicts",
            "Canaries by outcome: promoted, rejected, undecided.",
            ["outcome"],
            registry=registry,
        )
        self.device_sharing_wait = Histogram(
            "anabranch_device_sharing_wait_duration_seconds",
            "Time that training took to yield to a request.",
            buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3),
            registry=registry,
        )
