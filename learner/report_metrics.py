"""Metrics that are read off the report of a learner."""

from collections.abc import Callable, Sequence

from anabranch.core.state_metrics import StateCounter, StateGauge, Value
from learner.state_dir.report import LabelReport, LearnerReport, PartitionReport, TeacherReport
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
    StateCounter(
        "anabranch_ingest_overweight_rows",
        "Events whose weight was larger than schema.weight.max, and was lowered to it.",
        lambda report: report.overweight,
    ),
    StateCounter(
        "anabranch_learner_clipped_values",
        "Values of a learned number that its statistics took for nearer ones, since they are far from the others.",
        lambda report: report.clipped,
        "feature",
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
