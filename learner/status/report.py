"""The learner's report: `learner.json` in the state directory, replaced atomically about once a second.

A file rather than an address, because its readers (`anabranch status`, serving's `/api/status`, the supervisor) share
the state directory by contract, and because the last report of a dead learner is useful. `time` gives its age.

The name, help and labels of a metric are at the field that it exports: `LearnerMetrics` has all of them.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file
from anabranch.core.reported import Reported, ReportedBy
from anabranch.learner.device.reading import DeviceReport

REPORT = "learner.json"
FEWEST_COMPARED = 1000
"""Events on which a model has been trained before anybody is warned that it is worse than a baseline."""
LAG_STALE = timedelta(seconds=10)
"""Lag that is older is not reported as current. Ingest asks for the end offsets of partitions every second."""
Judged = Literal[
    "promoted",
    "better",
    "no_better",
    "undecided",
    "not_finite",
    "raised",
    "no_memory",
    "stopped",
    "too_slow",
    "not_caught_up",
]
"""How a challenger ended: `better` is reported, not promoted; `undecided` after its longest lease; `stopped` since the
model's settings have changed, or are pinned. Of one with its own network: `too_slow` for `serving.slo`;
`not_caught_up` although it was taught for long."""


class PartitionReport(msgspec.Struct, frozen=True):
    """The offsets of one partition: `end - start = finished + passed + gaps + removed + pending`."""

    start: int
    end: int
    finished: int
    passed: Annotated[int, Reported("anabranch_ingest_passed_offsets", "Offsets sought over unread by skip-to-latest.")]
    gaps: int
    removed: int
    pending: Annotated[int, Reported("anabranch_ingest_lag_offsets", "Offsets not yet read.")]
    trained_through: Annotated[
        int,
        Reported("anabranch_learner_trained_through_offset", "Last offset up to which every event has its outcome."),
    ]
    incarnation: int = 0
    outcomes: dict[str, int] = {}
    """Events by outcome."""
    skipped: dict[str, int] = {}
    """Skipped events by reason."""
    seen_through: Annotated[
        int,
        Reported(
            "anabranch_learner_seen_through_offset",
            "Last offset that was read, whether or not its event waits for a label.",
        ),
    ] = -1
    """`trained_through` is before the first that waits."""
    waiting: int = 0
    """Events that wait for their label, or for the step after it."""
    waited: dict[str, int] = {}
    """How events that waited ended, by outcome; with `waiting` they are the events of the outcome waiting."""
    waited_skipped: dict[str, int] = {}
    """Those that were skipped, by reason."""
    files: int = 0
    """For the rows of a history: the number of files, whose offsets and events are summed."""
    history: int = 0
    """The pass over them, counted from 1; 0 for the partition of a topic."""


def _of_topics(partitions: Mapping[str, PartitionReport]) -> dict[tuple[str, ...], PartitionReport]:
    """Return those of topics, by topic and partition: rows of the history are counted by their own metrics."""
    return {name.rpartition(":")[::2]: each for name, each in partitions.items() if not each.history}


class MeasureReport(msgspec.Struct, frozen=True):
    """A measure of the task's predictions, with the limits of its 95 % interval, by window.

    Windows: `now`, the newest 5,000 new events before training on them; `faded`, with two classes, where 50,000 events
    more count half; `held_out`, the newest version on the holdout set, in which rare classes have more events than in
    the stream.
    """

    value: Annotated[
        dict[str, float],
        Reported("anabranch_learner_measure", "A measure of the task, as average_precision, by window.", "window"),
    ] = {}
    lower: Annotated[
        dict[str, float],
        Reported("anabranch_learner_measure_lower", "Lower limit of its 95 % interval.", "window"),
    ] = {}
    upper: Annotated[
        dict[str, float],
        Reported("anabranch_learner_measure_upper", "Upper limit of its 95 % interval.", "window"),
    ] = {}
    constant: Annotated[
        dict[str, float],
        Reported("anabranch_learner_measure_constant", "What one answer for all events has at best.", "window"),
    ] = {}
    higher: bool = True
    """Whether higher is better."""


def _of_measures(measures: Mapping[str, MeasureReport]) -> dict[tuple[str, ...], MeasureReport]:
    return {(name,): each for name, each in measures.items()}


class LabelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The events that wait for their labels, and the labels; counts are since the start of the process."""

    waiting: int
    """Events that wait now, or whose fate is decided and that are not trained on yet."""
    ready: int
    """Those whose fate is decided."""
    kept: Annotated[int, Reported("anabranch_learner_kept_labels", "Labels without an event, which may still come.")]
    bytes: Annotated[int, Reported("anabranch_learner_waiting_bytes", "Disk space of waiting events.")]
    bound: int
    """The most that it may be."""
    ended: Annotated[
        dict[str, int],
        Reported(
            "anabranch_learner_waited_rows", "Events that have waited for their label, by how they ended.", "outcome"
        ),
    ]
    """Over the life of the pipeline."""
    labels: Annotated[
        dict[str, int],
        Reported(
            "anabranch_learner_labels_total", "Late labels, and events without one, by what became of them.", "result"
        ),
    ]
    """Labels: matched, duplicate, unmatched, late, dropped, crowded; and events: timed_out, no_room, damaged."""
    lag_p50_seconds: float | None
    """Median time from an event to its label, by record times, of the last labels; None before the first."""
    lag_p99_seconds: float | None

    @Reported(
        "anabranch_learner_waiting_rows",
        "Events that wait for their label, by whether their fate is decided: they are ready for a step then.",
        "state",
    )
    def events(self) -> dict[str, int]:
        """Events that wait or are ready."""
        return {"waiting": self.waiting - self.ready, "ready": self.ready}

    @Reported(
        "anabranch_learner_label_lag_seconds",
        "Time from an event to its label, by record times, of the last labels.",
        "quantile",
    )
    def lags(self) -> dict[str, float]:
        """The known lags."""
        by_quantile = {"0.5": self.lag_p50_seconds, "0.99": self.lag_p99_seconds}
        return {quantile: seconds for quantile, seconds in by_quantile.items() if seconds is not None}


class ServedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a version has really answered, by the labels that came later."""

    rows: Annotated[int, Reported("anabranch_learner_served_rows", "Answers of a version whose label has come.")]
    """The newest 5,000 at most."""
    value: Annotated[
        dict[str, float],
        Reported("anabranch_learner_served_measure", "A measure of what a version has answered.", "measure"),
    ] = {}
    lower: Annotated[
        dict[str, float],
        Reported("anabranch_learner_served_measure_lower", "Lower limit of its 95 % interval.", "measure"),
    ] = {}
    upper: Annotated[
        dict[str, float],
        Reported("anabranch_learner_served_measure_upper", "Upper limit of its 95 % interval.", "measure"),
    ] = {}


def _of_versions(served: Mapping[str, ServedReport]) -> dict[tuple[str, ...], ServedReport]:
    return {(version,): each for version, each in served.items()}


class LiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of `[serving.stream]`, joined with late labels."""

    served: Annotated[dict[str, ServedReport], ReportedBy(_of_versions, "version")] = {}
    """By version, of the newest eight whose answers have labels; `all` are the newest answers of these."""
    answers: Annotated[
        dict[str, int],
        Reported(
            "anabranch_learner_served_answers_total", "Served answers, by what became of them at the learner.", "result"
        ),
    ] = {}
    """`matched` got their label, `late` were written after it, `unmatched` got none, `duplicate` had another before
    them, `unreadable` are no answers of this task; and `unanswered`: labelled events without an answer."""
    waiting: int = 0
    """Answers and events that wait."""
    part: float = 1.0
    """The part of the events that is joined, as far as memory allows."""


class TeacherReport(msgspec.Struct, frozen=True, kw_only=True):
    """The teacher of `[model.teacher]`; counts are since the start of the process."""

    name: str
    """Which teacher it is."""
    up: Annotated[bool, Reported("anabranch_learner_teacher_up", "1 while the teacher answers, 0 while it is away.")]
    rows: Annotated[
        dict[str, int],
        Reported(
            "anabranch_learner_teacher_rows_total",
            "New events by what the teacher returned for them in time: answered, unusable, late, failed, unasked.",
            "result",
        ),
    ]
    waited_seconds: Annotated[
        float, Reported("anabranch_learner_teacher_wait_seconds_total", "Time that steps waited for the teacher.")
    ]


class DeviceSharingReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the learner shares its device with serving."""

    policy: str
    servers: int
    """Living serving processes."""
    training: Annotated[
        float,
        Reported(
            "anabranch_device_sharing_training_ratio", "Part of the time of steps that was not given to requests."
        ),
    ]
    times: int
    """How often training has yielded since the start of the process."""
    yielded_seconds: float
    """How long in total."""
    wait_p99_seconds: float | None = None
    """99th percentile of the time it took to yield to a request; None if there was none."""
    micro_batch_size: int | None = None
    """Current micro-batch size in events; None: all of a step."""
    scheduling: str | None = None
    """CPU priority of training on shared cores, such as `nice 19 while a batch runs`; None: unchanged."""


class DeviceHealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the devices that the learner watches."""

    devices: Annotated[
        list[DeviceReport], ReportedBy(lambda devices: {(device.uuid,): device for device in devices}, "uuid")
    ] = []
    sniff_seconds: Annotated[
        dict[str, float],
        Reported(
            "anabranch_device_sniff_seconds",
            "Times of the last sniff test: a matrix product of each rank, and a collective.",
            "test",
        ),
    ] = {}
    joules_per_event: float | None = None
    """Energy of all devices by new events, over the last five seconds; None without new events."""


class StorageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The uploads to `[storage]`; counts are since the start of the process."""

    url: str
    lag_seconds: Annotated[
        dict[str, float],
        Reported(
            "anabranch_storage_lag_seconds",
            "How long the object store has lacked the newest checkpoint, version or erasure log; 0 while it has it.",
            "kind",
        ),
    ]
    uploaded_bytes: Annotated[
        int,
        Reported(
            "anabranch_storage_uploaded_bytes_total", "Bytes that were uploaded to the object store in the background."
        ),
    ]
    failures: Annotated[
        int,
        Reported(
            "anabranch_storage_failures_total",
            "Rounds of uploads to the object store that failed after the retries of its client.",
        ),
    ]


class BackfillReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far ingest has read the history of `[stream.backfill]`, over all passes."""

    topics: list[str]
    """Names of the history in `partitions`, one for each pass."""
    rows_read: Annotated[
        int,
        Reported(
            "anabranch_backfill_read_rows_total", "Rows of the history that were read, over the life of the pipeline."
        ),
    ]
    rows: Annotated[int, Reported("anabranch_backfill_rows", "Rows of the history in all passes.")]
    files_read: int
    """Files that were read to their end, counted once for each pass."""
    files: int
    file: str = ""
    """The file that is read; empty before the first and after the last."""
    rate: float = 0.0
    """Rows per second, over the last half minute."""
    seconds_left: float | None = None
    """Until the last row at this rate; None while no row is read."""
    done: bool = False
    """Whether ingest reads the topics."""

    @property
    def fraction(self) -> float:
        """The part of the rows that was read, 0 to 1; 1 only at the end."""
        return 1.0 if self.done else min(0.999, self.rows_read / max(1, self.rows))


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of a version on a part of the fleet with the one that the others serve."""

    stable: int
    """The newest version that all servers may serve."""
    version: int | None = None
    """The version on the canaries; None while there is none."""
    servers: list[str] = []
    """Ids of the canaries."""
    rows: int = 0
    """Events held out since it began."""
    required_rows: int
    """With how many the versions are compared first."""
    last: str | None = None
    """How the comparison before ended, as one sentence."""


class UndoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last record, as the learner's report has it."""

    number: int
    checkpoint: int
    """The checkpoint that the learner returned to."""
    offsets: int
    """Offsets that are skipped."""
    left: int
    """Offsets that are still to be read again; 0 at the end."""
    fraction: float
    """The part that was read again, 0 to 1; 1 only at the end."""


class ChallengerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A challenger that trains, or waits for its next lease, or has ended."""

    number: int
    """From 1, over the life of the pipeline."""
    values: dict[str, float]
    """Its settings, by key."""
    steps: int
    """Steps that it was compared on."""
    difference: float
    """Mean difference of its measure from the model's, over these steps; positive where it is better."""
    log_wealth: float
    """Evidence that it is better, and what that has to reach."""
    log_threshold: float
    taught: int = 0
    """Steps in which the model taught it, before it was compared; 0 unless it has its own network."""
    outcome: Judged | None = None
    """None: it has not ended."""
    step: int = 0
    """The step at which it ended."""


class SearchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of `[search]`."""

    values: Annotated[
        dict[str, float],
        Reported(
            "anabranch_search_setting", "The settings that the model trains with, by key of [search.space].", "key"
        ),
    ]
    given: dict[str, float]
    """Those of the config."""
    pinned: bool
    """Whether a person has fixed the model's settings."""
    challengers: list[ChallengerReport]
    """Those that have not ended."""
    history: list[ChallengerReport]
    """The newest that have ended, oldest first."""
    outcomes: Annotated[
        dict[str, int],
        Reported(
            "anabranch_search_ended_total",
            "Challengers by how they ended, over the life of the pipeline.",
            "outcome",
        ),
    ]
    steps: Annotated[
        int, Reported("anabranch_search_steps_total", "Steps of challengers, over the life of the pipeline.")
    ]

    @Reported("anabranch_search_challengers", "Challengers of [search] that have not ended.")
    def num_challengers(self) -> int:
        """How many have not ended."""
        return len(self.challengers)


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """One class among the newest events, as the model answered before it was trained on them."""

    support: int
    """Events of the class."""
    found: int
    """Those that the model answered so."""
    answered: int
    """How often it was the answer, rightly or not."""
    recall: float | None
    """Part of its events that were found; None without any."""
    precision: float | None
    """Part of the answers that were right; None without any."""


class SliceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A version on those held-out events that have one value of a feature, or values in one range."""

    values: str = ""
    """The range, in words."""
    rows: int
    """Events."""
    accuracy: float | None = None
    error: float | None = None
    """Mean absolute error of regression."""
    constant: float | None = None
    """What one answer for all these events has at best."""
    measures: dict[str, float] = {}
    """The measures that decide, where there are enough events for them."""
    compared: bool = False
    """Whether it was compared with the served version: else there is none, or there are too few events."""
    drop: float | None = None
    """How much worse it is than the served version: in accuracy, or as a fraction of the error."""
    upper: float | None = None
    """The upper one-sided 95 % limit of that."""
    worse: bool = False
    """Whether the version fails for it."""

    @property
    def score(self) -> float:
        """The accuracy, or the error."""
        return (self.error if self.accuracy is None else self.accuracy) or 0.0

    def words(self) -> str:
        """Return it in one line."""
        shown = "{:.4g}" if self.accuracy is None else "{:.1%}"
        words = [f"{shown.format(self.score)} of {self.rows:,} events"]
        words += [f"one answer has {shown.format(self.constant)}"] if self.constant is not None else []
        words += [f"{name} {value:.3g}" for name, value in self.measures.items()]
        if self.drop is not None and self.upper is not None:
            than = "worse" if self.drop > 0 else "better"
            words.append(f"{than} than the served version by {abs(self.drop):.4f} (at most {self.upper:.4f} worse)")
        elif not self.compared:
            words.append("not compared")
        return f"{f'({self.values}) ' if self.values else ''}{', '.join(words)}"


def worst_first(slices: Mapping[str, SliceReport]) -> list[tuple[str, SliceReport]]:
    """Return slices by name, those for which a version fails first, then by their score."""
    return sorted(slices.items(), key=lambda item: (not item[1].worse, item[1].accuracy or 0.0, -(item[1].error or 0)))


class InputReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest 1,000 events against those before, by feature; `predictions` are those of the model.

    Of the features it has the 20 with the largest index.
    """

    psi: Annotated[
        dict[str, float],
        Reported(
            "anabranch_learner_input_psi", "Population stability index of a feature, or of predictions.", "feature"
        ),
    ] = {}
    ks: Annotated[
        dict[str, float],
        Reported("anabranch_learner_input_ks", "Kolmogorov-Smirnov statistic of its known values.", "feature"),
    ] = {}
    missing: Annotated[
        dict[str, float],
        Reported("anabranch_learner_input_missing_ratio", "Part of its values that are missing.", "feature"),
    ] = {}
    drifted: list[str] = []
    """Those that have drifted, predictions last."""

    @Reported("anabranch_learner_drifted_input_psi", "The same of those that have drifted alone.", "feature")
    def drifted_psi(self) -> dict[str, float]:
        """The index of those that have drifted."""
        return {name: self.psi[name] for name in self.drifted if name in self.psi}


class BaselineReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rule without features, on the events that the model's own score is of."""

    rule: str
    """What it does, in words that follow *than*: such as *always answering 0*, or *the last label*."""
    scores: dict[str, float]
    """Accuracy, or for regression the error, by window: now and overall; of `constant` also old."""
    comparison: str = ""
    """How the model compares in the window now, such as *better than the last label by 3.1 points*; empty while that
    is not known."""
    worse: bool = False
    """Whether the model is worse in the window now, and not by chance."""


class LearnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a learner at one point in time."""

    pid: int
    launcher: int | None = None
    """Process id of the launcher of all ranks; None where there is one rank."""
    generation: int
    started: float
    """Seconds since 1970, as is `time`."""
    time: float
    strategy: str = ""
    steps: int
    """Steps over the life of the pipeline, restarts included."""
    steps_since_start: int = 0
    """Steps of this process."""
    checkpoint: Annotated[
        int | None, Reported("anabranch_checkpoint_number", "The newest checkpoint; 0 without one.")
    ] = None
    checkpoint_time: Annotated[
        float | None, Reported("anabranch_checkpoint_time_seconds", "When it was made, since 1970.")
    ] = None
    problems: list[str] = []
    """One sentence for each part that does not work; empty when the learner is healthy."""
    warnings: list[str] = []
    """One sentence for each workaround that the learner applied and a person may change, or early warning."""
    outcomes: dict[str, int] = {}
    """Events by outcome: trained, stored_only, held_out, dead_lettered, skipped."""
    answers: str = ""
    """From which probabilities the newest version answers, and how it decides; empty where `[task]` says nothing."""
    skipped: Annotated[
        dict[str, int], Reported("anabranch_ingest_skipped_rows", "Skipped events by reason.", "reason")
    ] = {}
    unknown_fields: int = 0
    """Events with fields that the schema does not have."""
    overweight: Annotated[
        int,
        Reported(
            "anabranch_ingest_overweight_rows_total",
            "Events whose weight was larger than schema.weight.max, and was lowered to it.",
        ),
    ] = 0
    clipped: Annotated[
        dict[str, int],
        Reported(
            "anabranch_learner_clipped_values_total",
            "Values of a learned number that its statistics took for nearer ones, since they are far from the others.",
            "feature",
        ),
    ] = {}
    letters_dropped: Annotated[
        dict[str, int],
        Reported(
            "anabranch_ingest_letters_dropped_total",
            "Dead letters that were not written: refused even without contents, or of a loop of pipelines.",
            "reason",
        ),
    ] = {}
    lag_seconds: Annotated[
        float,
        Reported(
            "anabranch_ingest_lag_seconds", "How long the next event has been there, on the partition that lags most."
        ),
    ] = 0.0
    lag_age_seconds: float | None = None
    """Age at `time` of the end offsets from the broker, to which lag is measured; None: there are none yet."""
    behind: Annotated[
        bool, Reported("anabranch_ingest_behind", "1 while [stream.lag_policy] holds, since lag is too long.")
    ] = False
    partitions: Annotated[dict[str, PartitionReport], ReportedBy(_of_topics, "topic", "partition")] = {}
    """By `topic:partition`."""
    labels: LabelReport | None = None
    """None without `[stream.labels]`."""
    live: LiveReport | None = None
    """None without `gate.live`, `[stream.labels]` or `[serving.stream]`."""
    teacher: TeacherReport | None = None
    """None without `[model.teacher]`."""
    backfill: BackfillReport | None = None
    """None without `[stream.backfill]`."""
    storage: StorageReport | None = None
    """None without `[storage]`."""
    accuracy: Annotated[
        dict[str, float],
        Reported(
            "anabranch_learner_accuracy_ratio",
            "Accuracy by window: of new events before training on them, and of held-out ones.",
            "window",
        ),
    ] = {}
    """Windows: now, overall, near_future, worst, worst_group, old, old_lowest; absent while it is unknown."""
    error: Annotated[
        dict[str, float],
        Reported(
            "anabranch_learner_absolute_error", "Mean absolute error of regression, over the same windows.", "window"
        ),
    ] = {}
    measures: Annotated[dict[str, MeasureReport], ReportedBy(_of_measures, "measure")] = {}
    """By name: measures of the task, as `average_precision`; the score of the task, accuracy or error, is not one."""
    measure: str = ""
    """The measure by which versions are judged besides the score, or the score where there is none."""
    measure_reason: str = ""
    """Why it is that one."""
    baselines: dict[str, BaselineReport] = {}
    """What the model has to beat: `constant`, `last_label`, and with `[schema.group]` `group`. Empty where a label is
    neither one class nor one number."""
    loss: Annotated[
        dict[str, float],
        Reported("anabranch_learner_loss", "Mean loss of new events before training on them.", "window"),
    ] = {}
    """Windows: now, overall."""
    window_rows: Annotated[
        int,
        Reported(
            "anabranch_learner_window_rows",
            "Events in the window now: it grows for as long as the accuracy stays the same.",
        ),
    ] = 0
    classes: Annotated[
        dict[str, float],
        Reported("anabranch_learner_class_accuracy_ratio", "Accuracy on held-out events.", "class"),
    ] = {}
    """Of those with the most held-out events."""
    groups: dict[str, float] = {}
    """Accuracy or error on held-out events by the hash of the group, of those with the most held-out events."""
    newest_classes: dict[str, ClassReport] = {}
    """By class, of the newest 5,000 events: the 64 with the most. Empty where an event has no single class."""
    slices: dict[str, SliceReport] = {}
    """The newest version by the slices of `gate.slices`, on the holdout set."""
    forgetting: Annotated[
        float | None,
        Reported(
            "anabranch_learner_forgetting_ratio",
            "Best accuracy ever less accuracy now on held-out events, mean over the classes; of regression, error.",
        ),
    ] = None
    drifts: int = 0
    """Changes of the stream that were noticed over the life of the pipeline."""
    drift_step: int | None = None
    """The step that showed the newest one."""
    search: SearchReport | None = None
    """None without `[search]`."""
    replay_ratio: Annotated[
        float, Reported("anabranch_learner_replay_ratio", "Events to replay for each new one in the next step.")
    ] = 0.0
    micro_batch_size: Annotated[
        int | None,
        Reported(
            "anabranch_learner_micro_batch_rows",
            "Events that go through the model at once at most; 0: all of a step.",
        ),
    ] = None
    exchanged_bytes: Annotated[
        int | None,
        Reported(
            "anabranch_learner_exchanged_bytes_total",
            "Bytes that rank 0 has sent to average gradients and other tensors over the ranks.",
        ),
    ] = None
    """None: they are not counted."""
    without_graphs: str = ""
    """Why steps do not run as CUDA graphs, where a CUDA device could; one sentence, or empty."""
    rates: dict[str, float] = {}
    """Per second over the last five seconds: steps, rows_new, rows_replay; the time of steps (step_seconds), and of
    waiting for replay and for checkpoints (replay_stall_seconds, checkpoint_stall_seconds); joules where devices are
    watched."""
    full_rates: dict[str, float] = {}
    """The same of the last five seconds in which events always waited to be read; empty before them."""
    checkpoint_seconds: float | None = None
    """Mean time to write a checkpoint of this process; None before the first."""
    replay_rows: dict[str, int] = {}
    """Events held, by tier."""
    replay_bytes: dict[str, int] = {}
    """Bytes that they take, by tier."""
    replay_capacity: int | None = None
    """Events that may be held; None without a store."""
    replay_bounds: dict[str, int] = {}
    """Bytes that each tier may hold."""
    replay_lost: int = 0
    """Events of the store whose payload a tier could not keep or give back, since the start of the process."""
    holdout_rows: Annotated[int, Reported("anabranch_holdout_rows", "Held-out events in the holdout set.")] = 0
    device_memory: Annotated[
        dict[str, int],
        Reported(
            "anabranch_learner_device_memory_bytes",
            "Memory of the learner's device by purpose; on a CPU that of the host.",
            "purpose",
        ),
    ] = {}
    inputs: InputReport | None = None
    """None with `learner.drift.inputs = false`."""
    device_sharing: DeviceSharingReport | None = None
    """None where the device is not shared."""
    device: DeviceHealthReport | None = None
    """None where no device is watched."""
    erased: int = 0
    """Erasure records that apply; their events are not trained on or stored from then on."""
    erased_through: int = 0
    """The last record whose events are gone from the store, the holdout set and all checkpoints."""
    undo: UndoReport | None = None
    """The last record of `anabranch undo`; None without one."""
    version: Annotated[int | None, Reported("anabranch_learner_version", "Number of the newest version published.")] = (
        None
    )
    verdict: str | None = None
    """Verdict of that version; None before the first of this process."""
    held_since: float | None = None
    """Since when versions have failed the gate in a row; None when the last one did not."""
    held_reasons: list[str] = []
    """Why the last one failed."""
    withdrawn: Annotated[
        int, Reported("anabranch_gate_withdrawn_total", "Times that monitoring withdrew the served versions.")
    ] = 0
    """Since the start of the process, as the two numbers of versions below."""
    servers: dict[str, int | None] = {}
    """The version of each server of the fleet that is alive, by its id; empty without `[storage]`."""
    canary: CanaryReport | None = None
    """None without `serving.canary`, and while no server has a version."""
    versions_published: Annotated[int, Reported("anabranch_versions_published_total", "Versions published.")] = 0
    publish_skipped: Annotated[
        int, Reported("anabranch_publish_skipped_total", "Versions that fell due while one was being written.")
    ] = 0
    extensions: dict[str, dict[str, Any]] = {}
    """Numbers of an extension's own, by its name and theirs."""

    @Reported(
        "anabranch_ingest_lag_time_seconds",
        "When the broker was asked for the ends to which lag is counted, in seconds since 1970; 0 before that.",
    )
    def lag_time(self) -> float | None:
        """When lag was measured."""
        return None if self.lag_age_seconds is None else self.time - self.lag_age_seconds

    @Reported(
        "anabranch_learner_group_accuracy_ratio", "Accuracy on held-out events, by the hash of the group.", "group"
    )
    def group_accuracy(self) -> dict[str, float]:
        """Of regression, groups have errors."""
        return self.groups if self.accuracy else {}

    @Reported(
        "anabranch_learner_baseline_score",
        "Accuracy of each baseline on the events of the model's own, by window; of regression, the error.",
        "baseline",
        "window",
    )
    def baseline_scores(self) -> dict[tuple[str, ...], float]:
        """What the model has to beat."""
        return {(name, window): value for name, each in self.baselines.items() for window, value in each.scores.items()}

    @Reported(
        "anabranch_learner_slice_score",
        "Accuracy on held-out events by slice, as gate.slices names them; of regression, the error.",
        "slice",
    )
    def slice_scores(self) -> dict[str, float]:
        """Of the newest version."""
        return {name: each.score for name, each in self.slices.items()}

    @Reported("anabranch_learner_problems", "Parts that do not work as they should.")
    def num_problems(self) -> int:
        """The number of problems."""
        return len(self.problems)

    @Reported("anabranch_gate_hold_seconds", "Time for which versions have failed in a row; 0 if none.")
    def hold_seconds(self) -> float | None:
        """For how long versions have been held back."""
        return None if self.held_since is None else max(0.0, self.time - self.held_since)


def no_better(report: LearnerReport, baseline: BaselineReport) -> list[str]:
    """Return the windows in which a model that has met several classes is no better than the baseline."""
    found = report.error or report.accuracy
    return [
        name
        for name, rule in baseline.scores.items()
        if name in found and (found[name] >= rule if report.error else found[name] <= rule < 1)
    ]


def served_text(served: ServedReport, first: str = "") -> str:
    """Return the measures of what a version has answered, with 95 % intervals; `first`: the one to begin with."""
    names = sorted(served.value, key=lambda name: name != first)
    each = ((name, served.value[name], served.lower[name], served.upper[name]) for name in names)
    return ", ".join(f"{name} {value:.3g} ({low:.3g} to {high:.3g})" for name, value, low, high in each)


def write_report(state_dir: Path, report: LearnerReport) -> None:
    """Replace the report atomically."""
    replace_file(state_dir / REPORT, msgspec.json.encode(report), durable=False)


def read_report(state_dir: Path) -> LearnerReport | None:
    """Read the newest report; None when no learner has written one that can be read."""
    try:
        return decoded(read_file(state_dir / REPORT, MOST_BYTES), LearnerReport)
    except (OSError, DamagedError):
        return None
