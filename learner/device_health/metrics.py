"""Metrics of the learner's devices."""

from collections.abc import Callable, Mapping, Sequence

from anabranch.core.state_metrics import StateCounter, StateGauge
from learner.state_dir.report import DeviceHealthReport, DeviceReport


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
