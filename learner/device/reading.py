"""What one query of a device returns, and what is reported of it. Imports no torch and no NVML."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from anabranch.core.reported import Reported


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


class DeviceState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of an NVIDIA device at one point in time; None or absent where the device does not report a value.

    Counters are those of the driver: they began before the process.
    """

    memory_used: Annotated[
        int | None,
        Reported("anabranch_device_memory_used_bytes", "Memory of the device in use, by all processes."),
    ] = None
    memory_total: Annotated[int | None, Reported("anabranch_device_memory_capacity_bytes", "Memory of the device.")] = (
        None
    )
    utilization: Annotated[
        float | None, Reported("anabranch_device_utilization_ratio", "Part of the time in which a kernel ran.")
    ] = None
    """In the last second, 0 to 1."""
    temperatures: Annotated[
        dict[str, float], Reported("anabranch_device_temperature_celsius", "Temperature.", "sensor")
    ] = {}
    """Sensors: gpu, memory."""
    power: Annotated[float | None, Reported("anabranch_device_power_watts", "Power.")] = None
    power_limit: Annotated[float | None, Reported("anabranch_device_power_limit_watts", "Limit of the power.")] = None
    energy: Annotated[
        float | None, Reported("anabranch_device_energy_joules_total", "Energy since the driver was loaded.")
    ] = None
    """Of all processes."""
    clocks: Annotated[dict[str, float], Reported("anabranch_device_clock_hertz", "Clock.", "clock")] = {}
    """Clocks: sm, memory."""
    slowdown: list[str] = []
    """Why clocks are below their maximum: idle, power_cap, thermal, hardware_thermal, power_brake and others."""
    ecc_errors: Annotated[
        dict[str, int],
        Reported("anabranch_device_ecc_errors_total", "Memory errors since the driver was loaded.", "kind"),
    ] = {}
    """Kinds: corrected, uncorrected."""
    ecc_lifetime_errors: Annotated[
        dict[str, int],
        Reported("anabranch_device_ecc_lifetime_errors", "Memory errors over the life of the device.", "kind"),
    ] = {}
    remapped_rows: Annotated[
        dict[str, int],
        Reported(
            "anabranch_device_remapped_rows",
            "Rows of memory with a spare, by cause; pending and failed are 1 or 0.",
            "state",
        ),
    ] = {}
    """Causes: corrected, uncorrected; `pending`: a row is replaced at the next reset only; `failed`: none was left."""
    pcie_replays: Annotated[int | None, Reported("anabranch_device_pcie_replays_total", "Replays of PCIe packets.")] = (
        None
    )
    nvlink_active: Annotated[
        int | None, Reported("anabranch_device_nvlink_active", "NVLink connections that are up.")
    ] = None
    """None without NVLink."""
    nvlink_errors: Annotated[
        int | None, Reported("anabranch_device_nvlink_errors_total", "Replays and recoveries of NVLink.")
    ] = None
    processes: dict[str, int] = {}
    """Bytes of device memory by process id."""

    @Reported("anabranch_device_slowdown", "1 for each reason why clocks are below their maximum.", "reason")
    def slowdowns(self) -> Mapping[str, float]:
        """The reasons."""
        return dict.fromkeys(self.slowdown, 1)


class Reading(DeviceState, frozen=True, kw_only=True, gc=False):
    """One query of a device."""

    time: float
    """When the query began, in seconds of the watch's clock."""
    recovery: int | None = None
    """What the driver says the device needs: 0 nothing, else `NVML_GPU_RECOVERY_ACTION_...`."""
    xids: tuple[int, ...] = ()
    """Xid events since the last reading."""
    lost: str | None = None
    """NVML's error, when it reports that the device is gone or needs a reset; all else is unknown then."""


class DeviceReport(DeviceState, frozen=True, kw_only=True):
    """The health of one device."""

    uuid: str
    name: str
    silence_seconds: Annotated[
        float,
        Reported("anabranch_device_silence_seconds", "How long the device has not answered; 0 while it does."),
    ] = 0.0
    xids: Annotated[
        dict[str, int],
        Reported("anabranch_device_xid_events_total", "Xid events since the start of the learner.", "xid"),
    ] = {}
    """By number."""
    warnings: list[str] = []
    """One sentence for each early warning."""
    problems: list[str] = []

    @Reported("anabranch_device_symptoms", "Early warnings and problems of the device.", "level")
    def symptoms(self) -> Mapping[str, float]:
        """How many there are of each."""
        return {"warning": len(self.warnings), "problem": len(self.problems)}
