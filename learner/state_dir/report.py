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
    """CPU priority of training while it shares cores with serving, such as `nice 19`; None: unchanged."""


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
    accuracy: dict[str, float] = {}
    """By window: now, overall, near_future, worst, worst_group, old, old_lowest; absent while it is unknown."""
    error: dict[str, float] = {}
    """For regression the mean absolute error by window, in place of the accuracy."""
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
    replay_ratio: float = 0.0
    """Events to replay for each new one in the next step."""
    micro_batch_size: int | None = None
    """Largest number of events that go through the model at once; None: all of a step."""
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
    versions_published: int = 0
    publish_skipped: int = 0


def write_report(state_dir: Path, report: LearnerReport) -> None:
    """Replace the report atomically."""
    replace_file(state_dir / REPORT, msgspec.json.encode(report), durable=False)


def read_report(state_dir: Path) -> LearnerReport | None:
    """Read the newest report; None when no learner has written one that can be read."""
    try:
        return decoded(read_file(state_dir / REPORT, MOST_BYTES), LearnerReport)
    except (OSError, DamagedError):
        return None
