"""What the learner says of itself: `learner.json` in the state directory, replaced atomically about once a second.

A file rather than an address, because whoever asks (`anabranch status`, serving's `/api/status`, the supervisor) shares
the state directory by contract, and because the last words of a dead learner are worth reading. `time` tells its age.
"""

from datetime import timedelta
from pathlib import Path

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file

REPORT = "learner.json"
LAG_STALE = timedelta(seconds=10)
"""Lag that is older is not told as the lag of now. Ingest asks for the ends of partitions every second."""


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
    """Serving processes that live."""
    training: float
    """Of the time of the last steps, the part that was not given to requests: 0 to 1."""
    times: int
    """How often it gave way since the start of the process."""
    yielded_seconds: float
    """How long altogether."""
    wait_p99_seconds: float | None = None
    """How long it took at the 99th percentile to give way to a request; None if there was none."""
    micro_batch_size: int | None = None
    """Events of a micro-batch now; None: all of a step."""
    scheduling: str | None = None
    """By which the kernel lets its threads wait for those of serving, such as `nice 19`; None: by nothing."""


class LearnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a learner."""

    pid: int
    launcher: int | None = None
    """The process that started it and the other ranks; None where there is one rank."""
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
    """One sentence for each part that does not work as it should; empty when all is well."""
    warnings: list[str] = []
    """One sentence for each thing that was done to go on, and that a person may want to change."""
    outcomes: dict[str, int] = {}
    """Events by outcome: trained, stored_only, held_out, dead_lettered, skipped."""
    skipped: dict[str, int] = {}
    """Skipped events by reason."""
    unknown_fields: int = 0
    """Events that had fields which the schema does not know."""
    lag_seconds: float = 0.0
    """How long the next event without outcome has been there, on the partition that lags most."""
    lag_age_seconds: float | None = None
    """How long before `time` the broker was asked for the ends to which lag is counted; None: it has told none yet."""
    behind: bool = False
    """Whether `[stream.lag_policy]` holds, because that became longer than `high`."""
    partitions: dict[str, PartitionReport] = {}
    """By `topic:partition`."""
    accuracy: dict[str, float] = {}
    """By window: now, overall, near_future, worst, worst_group, old, old_lowest; absent if it cannot be told yet."""
    error: dict[str, float] = {}
    """For regression the mean absolute error by window, in place of the accuracy."""
    loss: dict[str, float] = {}
    """Mean loss of new events before training on them, by window: now, overall."""
    window_rows: int = 0
    """Events in the window now of accuracy or error."""
    classes: dict[str, float] = {}
    """Accuracy on held-out events by class, of those with the most held-out events."""
    groups: dict[str, float] = {}
    """Accuracy or error on held-out events by the hash of the group, likewise."""
    forgetting: float | None = None
    """Best accuracy ever less accuracy now on held-out events, mean over the classes; for regression, error."""
    drifts: int = 0
    """Changes of the stream that were noticed over the life of the pipeline."""
    drift_step: int | None = None
    """The step that showed the newest one."""
    replay_ratio: float = 0.0
    """Events to replay for each new one in the next step."""
    rates: dict[str, float] = {}
    """Per second over the last five seconds: steps, rows_new, rows_replay."""
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
    device_sharing: DeviceSharingReport | None = None
    """None where the device is not shared."""
    erased: int = 0
    """Records of what is erased; none of it is trained on or stored from then on."""
    erased_through: int = 0
    """The last of them of which nothing is left in store, holdout set and checkpoints."""
    version: int | None = None
    """The newest version published."""
    verdict: str | None = None
    """Of that; None before the first of this process."""
    held_since: float | None = None
    """Since when versions have failed the gate in a row; None when the last one did not."""
    held_reasons: list[str] = []
    """Why the last one failed."""
    withdrawn: int = 0
    """Times that the watch found what was served worse, since the start of the process."""
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
