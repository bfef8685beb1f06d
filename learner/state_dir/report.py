"""The learner's report: `learner.json` in the state directory, replaced atomically about once a second.

A file rather than an address, because its readers (`anabranch status`, serving's `/api/status`, the supervisor) share
the state directory by contract, and because the last report of a dead learner is useful. `time` gives its age.
"""

from datetime import timedelta
from pathlib import Path

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file
from learner.state_dir.search.control import SearchReport
from learner.state_dir.undo_file import UndoReport

REPORT = "learner.json"
LAG_STALE = timedelta(seconds=10)
"""Lag that is older is not reported as current. Ingest asks for the end offsets of partitions every second."""


class PartitionReport(msgspec.Struct, frozen=True):
    """The offsets of one partition: `end - start = finished + passed + gaps + removed + pending`."""

    start: int
    end: int
    finished: int
    passed: int
    gaps: int
    removed: int
    pending: int
    trained_through: int
    incarnation: int = 0
    outcomes: dict[str, int] = {}
    """Events by outcome."""
    skipped: dict[str, int] = {}
    """Skipped events by reason."""
    seen_through: int = -1
    """The last offset with an outcome or an event that waits; `trained_through` is before the first that waits."""
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


class LabelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The events that wait for their labels, and the labels; counts are since the start of the process."""

    waiting: int
    """Events that wait now, or whose fate is decided and that are not trained on yet."""
    ready: int
    """Those whose fate is decided."""
    kept: int
    """Labels that are kept, since their event may still come."""
    bytes: int
    """Disk space of waiting events."""
    bound: int
    """The most that it may be."""
    ended: dict[str, int]
    """How waiting events ended over the life of the pipeline, by outcome."""
    labels: dict[str, int]
    """Labels by what became of them: matched, duplicate, unmatched, late, dropped, crowded; and events: timed_out,
    no_room, damaged."""
    lag_p50_seconds: float | None
    """Median time from an event to its label, by record times, of the last labels; None before the first."""
    lag_p99_seconds: float | None


class TeacherReport(msgspec.Struct, frozen=True, kw_only=True):
    """The teacher of `[model.teacher]`; counts are since the start of the process."""

    name: str
    """Which teacher it is."""
    up: bool
    """Whether it answered the last time that it was asked."""
    rows: dict[str, int]
    """New events by what it returned for them in time: answered, unusable, late, failed, unasked."""
    waited_seconds: float
    """How long steps waited for it."""


class DeviceSharingReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the learner shares its device with serving."""

    policy: str
    servers: int
    """Living serving processes."""
    training: float
    """Fraction of the time of the last steps in which training did not yield, 0 to 1."""
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


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The health of one NVIDIA device; None or absent where the device does not report a value."""

    uuid: str
    name: str
    silence_seconds: float = 0.0
    """How long the device has not answered; 0 while it does."""
    memory_used: int | None = None
    """Bytes, of all processes."""
    memory_total: int | None = None
    utilization: float | None = None
    """Fraction of the last second in which a kernel ran, 0 to 1."""
    temperatures: dict[str, float] = {}
    """Degrees Celsius by sensor: gpu, memory."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    energy: float | None = None
    """Joules since the driver was loaded, of all processes."""
    clocks: dict[str, float] = {}
    """Hertz by clock: sm, memory."""
    slowdown: list[str] = []
    """Why clocks are below their maximum: idle, power_cap, thermal, hardware_thermal, power_brake and others."""
    ecc_errors: dict[str, int] = {}
    """Memory errors since the driver was loaded: corrected, uncorrected."""
    ecc_lifetime_errors: dict[str, int] = {}
    """The same over the life of the device."""
    remapped_rows: dict[str, int] = {}
    """Rows of memory with a spare: corrected, uncorrected by cause; pending and failed are 1 or 0."""
    xids: dict[str, int] = {}
    """Xid events since the start of the learner, by number."""
    pcie_replays: int | None = None
    nvlink_active: int | None = None
    """NVLink connections that are up; None without any."""
    nvlink_errors: int | None = None
    processes: dict[str, int] = {}
    """Bytes of device memory by process id."""
    warnings: list[str] = []
    """One sentence for each early warning."""
    problems: list[str] = []


class DeviceHealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the devices that the learner watches."""

    devices: list[DeviceReport] = []
    sniff_seconds: dict[str, float] = {}
    """Times of the last sniff test: by rank those of a matrix product, and that of a collective."""
    joules_per_event: float | None = None
    """Energy of all devices by new events, over the last five seconds; None without new events."""


class StorageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The uploads to `[storage]`; counts are since the start of the process."""

    url: str
    lag_seconds: dict[str, float]
    """How long the object store has lacked the newest checkpoint, version or erasure log, by kind; 0 if none."""
    uploaded_bytes: int
    failures: int
    """Rounds of uploads in which a request failed, after its retries."""


class BackfillReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far ingest has read the history of `[stream.backfill]`, over all passes."""

    topics: list[str]
    """Names of the history in `partitions`, one for each pass."""
    rows_read: int
    """Rows over the life of the pipeline."""
    rows: int
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
    checkpoint: int | None = None
    """The newest checkpoint."""
    checkpoint_time: float | None = None
    """When it was made."""
    problems: list[str] = []
    """One sentence for each part that does not work; empty when the learner is healthy."""
    warnings: list[str] = []
    """One sentence for each workaround that the learner applied and a person may change, or early warning."""
    outcomes: dict[str, int] = {}
    """Events by outcome: trained, stored_only, held_out, dead_lettered, skipped."""
    skipped: dict[str, int] = {}
    """Skipped events by reason."""
    unknown_fields: int = 0
    """Events with fields that the schema does not have."""
    overweight: int = 0
    """Events since the start whose weight was larger than `schema.weight.max`, and was lowered to it."""
    clipped: dict[str, int] = {}
    """By learned number, values since the start that it learned from as if they were nearer to the others."""
    letters_dropped: dict[str, int] = {}
    """Dead letters that were not written, by reason, since the start of the process."""
    lag_seconds: float = 0.0
    """How long the next event without outcome has been there, on the partition that lags most."""
    lag_age_seconds: float | None = None
    """Age at `time` of the end offsets from the broker, to which lag is measured; None: there are none yet."""
    behind: bool = False
    """Whether `[stream.lag_policy]` holds, because that became longer than `high`."""
    partitions: dict[str, PartitionReport] = {}
    """By `topic:partition`."""
    labels: LabelReport | None = None
    """None without `[stream.labels]`."""
    teacher: TeacherReport | None = None
    """None without `[model.teacher]`."""
    backfill: BackfillReport | None = None
    """None without `[stream.backfill]`."""
    storage: StorageReport | None = None
    """None without `[storage]`."""
    accuracy: dict[str, float] = {}
    """By window: now, overall, near_future, worst, worst_group, old, old_lowest; absent while it is unknown."""
    error: dict[str, float] = {}
    """For regression the mean absolute error by window, in place of the accuracy."""
    simplest: dict[str, float] = {}
    """Accuracy or error by window, now, overall and old, of the simplest rule: always the most frequent class, or for
    regression the mean. Empty where a label is neither one class nor one number."""
    loss: dict[str, float] = {}
    """Mean loss of new events before training on them, by window: now, overall."""
    window_rows: int = 0
    """Events in the window now of accuracy or error."""
    classes: dict[str, float] = {}
    """Accuracy on held-out events by class, of those with the most held-out events."""
    groups: dict[str, float] = {}
    """Accuracy or error on held-out events by the hash of the group, of those with the most held-out events."""
    forgetting: float | None = None
    """Best accuracy ever less accuracy now on held-out events, mean over the classes; for regression, error."""
    drifts: int = 0
    """Changes of the stream that were noticed over the life of the pipeline."""
    drift_step: int | None = None
    """The step that showed the newest one."""
    search: SearchReport | None = None
    """None without `[search]`."""
    replay_ratio: float = 0.0
    """Events to replay for each new one in the next step."""
    micro_batch_size: int | None = None
    """Largest number of events that go through the model at once; None: all of a step."""
    exchanged_bytes: int | None = None
    """Bytes that rank 0 of this process has sent to average tensors over the ranks; None: they are not counted."""
    rates: dict[str, float] = {}
    """Per second over the last five seconds: steps, rows_new, rows_replay, and joules where devices are watched."""
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
    holdout_rows: int = 0
    device_memory: dict[str, int] = {}
    """Bytes that the learner takes on its device, by purpose, such as `weights`; on a CPU those of the host."""
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
    version: int | None = None
    """The newest version published."""
    verdict: str | None = None
    """Verdict of that version; None before the first of this process."""
    held_since: float | None = None
    """Since when versions have failed the gate in a row; None when the last one did not."""
    held_reasons: list[str] = []
    """Why the last one failed."""
    withdrawn: int = 0
    """Times that monitoring withdrew the served versions, since the start of the process."""
    servers: dict[str, int | None] = {}
    """The version of each server of the fleet that is alive, by its id; empty without `[storage]`."""
    canary: CanaryReport | None = None
    """None without `serving.canary`, and while no server has a version."""
    versions_published: int = 0
    publish_skipped: int = 0


def simplest_rule(report: LearnerReport) -> str:
    """Return what the simplest rule always answers."""
    return "the mean" if report.error else "the most frequent class"


def no_better(report: LearnerReport) -> list[str]:
    """Return the windows in which a model that has met several classes is no better than the simplest rule."""
    found = report.error or report.accuracy
    return [
        name
        for name, rule in report.simplest.items()
        if name in found and (found[name] >= rule if report.error else found[name] <= rule < 1)
    ]


def write_report(state_dir: Path, report: LearnerReport) -> None:
    """Replace the report atomically."""
    replace_file(state_dir / REPORT, msgspec.json.encode(report), durable=False)


def read_report(state_dir: Path) -> LearnerReport | None:
    """Read the newest report; None when no learner has written one that can be read."""
    try:
        return decoded(read_file(state_dir / REPORT, MOST_BYTES), LearnerReport)
    except (OSError, DamagedError):
        return None
