"""What a plan computes with: the load that the user gives, and the constants that were measured."""

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is to come."""

    rate: float
    """Events a second."""
    days: float = 30.0
    """How long the pipeline has run on the day that is planned for, besides the first one."""
    requests_per_second: float = 0.0
    """Requests of one row each."""
    drive_tbw: float | None = None
    """Terabytes that may be written to the drive in its life."""
    retention_seconds: float | None = None
    """How long the topic keeps events."""


class Constants(msgspec.Struct, kw_only=True):
    """What was measured, in bytes and seconds; None: it was not."""

    source: str
    """Where it was measured: `run` or, of the model alone, `model`."""
    parameters: int
    """Number of the parameters that are trained, and of the elements of buffers."""
    base_bytes: int = 0
    """Size of the frozen weights."""
    device: str = "cpu"
    """The learner's."""
    device_total_bytes: int | None = None
    row_bytes: int | None = None
    """Bytes of a stored event; None without a store."""
    learner_bytes: int | None = None
    """Host memory of the learner, without the store, and on a CPU without what the ledger counts."""
    ingest_bytes: int | None = None
    """Host memory of the ingest process, without the ring."""
    serving_bytes: int | None = None
    """Host memory of a serving process."""
    version_bytes: int | None = None
    """Size of a version on the disk."""
    checkpoint_bytes: int | None = None
    """Size of a checkpoint's files without stored and held-out events."""
    report_bytes: int | None = None
    """Size of the reports that learner and serving replace."""
    publish_seconds: float | None = None
    """Time between versions, where one often falls due while another is written."""
    checkpoint_seconds: float | None = None
    """Time that writing a checkpoint takes."""
    step_seconds: float | None = None
    """Time of a step."""
    delivery_seconds: float | None = None
    """From the end of the step after which a version is published to its first answer: scoring, writing, loading; the
    median."""
    delivery_p99_seconds: float | None = None
    saturation_rate: float | None = None
    """Events a second while some wait."""
    full_step_seconds: float | None = None
    """Time of a step meanwhile."""
    full_step_rows: float | None = None
    """New events of such a step."""
    stall_seconds_per_event: float | None = None
    """Time that steps wait for replay, of one new event, meanwhile."""
    checkpoint_stall_seconds_per_event: float | None = None
    """Time that the loop waits for checkpoints, likewise."""
    disk_bytes_per_second: float | None = None
    """Rate at which the disk of `state_dir` takes a file, with its fsync."""
    request_seconds: float | None = None
    """Median time of a request."""
    remarks: list[str] = []
    """Why some were not measured, and how to measure them."""
