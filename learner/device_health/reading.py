"""What one query of a device returns. Imports no torch and no NVML."""

import msgspec


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the process lives."""

    uuid: str
    """`GPU-...` or `MIG-...`."""
    name: str
    slowdown_celsius: float | None = None
    """Temperature at which the device slows down."""
    memory_max_celsius: float | None = None
    """Temperature of the memory at which the device slows down."""
    nvlinks: int = 0
    """NVLink connections that were up at the start."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of a device at one point in time; None where the device does not report a value.

    Counters are those of the driver: they began before the process.
    """

    time: float
    """When the query began, in seconds of the watch's clock."""
    memory_used: int | None = None
    """Bytes, as is `memory_total`."""
    memory_total: int | None = None
    utilization: float | None = None
    """Fraction of the time in which a kernel ran, 0 to 1."""
    temperature: float | None = None
    """Degrees Celsius, as is `memory_temperature`."""
    memory_temperature: float | None = None
    power: float | None = None
    """Watts, as is `power_limit`."""
    power_limit: float | None = None
    energy: float | None = None
    """Joules since the driver was loaded."""
    sm_clock: float | None = None
    """Hertz, as is `memory_clock`."""
    memory_clock: float | None = None
    slowdown: int | None = None
    """Why clocks are below their maximum: bits of NVML's `nvmlClocksEventReason...`."""
    corrected: int | None = None
    """Memory errors that ECC corrected since the driver was loaded."""
    uncorrected: int | None = None
    """Memory errors that ECC could not correct since then."""
    lifetime_corrected: int | None = None
    """Corrected memory errors over the life of the device."""
    lifetime_uncorrected: int | None = None
    remapped_corrected: int | None = None
    """Rows of memory that spares replace, because of corrected errors."""
    remapped_uncorrected: int | None = None
    """The same, because of errors that could not be corrected."""
    remap_pending: int | None = None
    """1 while a row is replaced at the next reset only."""
    remap_failed: int | None = None
    """1 once there was no spare row left."""
    pcie_replays: int | None = None
    nvlink_active: int | None = None
    """NVLink connections that are up, of `DeviceInfo.nvlinks`; None without NVLink."""
    nvlink_errors: int | None = None
    """Replays and recoveries of all NVLink connections."""
    recovery: int | None = None
    """What the driver says the device needs: 0 nothing, else `NVML_GPU_RECOVERY_ACTION_...`."""
    xids: tuple[int, ...] = ()
    """Xid events since the last reading."""
    processes: dict[int, int] | None = None
    """Bytes of device memory by process id."""
    lost: str | None = None
    """NVML's error, when it reports that the device is gone or needs a reset; all else is None then."""


SLOWDOWN_REASONS = {
    "idle": 0x1,
    "clock_setting": 0x2,
    "power_cap": 0x4,
    "hardware": 0x8,
    "sync_boost": 0x10,
    "thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
    "display": 0x100,
}
"""NVML's bits by the names that reports and metrics have."""


def slowdown_names(bits: int | None) -> list[str]:
    """Return the names of the reasons in `bits`."""
    return [name for name, bit in SLOWDOWN_REASONS.items() if (bits or 0) & bit]
