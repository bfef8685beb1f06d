"""Reads NVIDIA devices through NVML, the library of the driver, by the package `nvidia-ml-py`.

NVML needs no CUDA context and takes no device memory. Each call may hang when the driver does: call it from a thread
that nothing waits for. Imports no torch.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from anabranch.learner.device.reading import DeviceInfo, Reading

_T = TypeVar("_T")
_LIBRARY = "libnvidia-ml.so.1"
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of the union that has a field's value, by NVML's type number."""
_COUNTERS: Mapping[str, Sequence[str]] = {
    "ecc_errors.corrected": ("ECC_SBE_VOL_TOTAL",),
    "ecc_errors.uncorrected": ("ECC_DBE_VOL_TOTAL",),
    "ecc_lifetime_errors.corrected": ("ECC_SBE_AGG_TOTAL",),
    "ecc_lifetime_errors.uncorrected": ("ECC_DBE_AGG_TOTAL",),
    "remapped_rows.corrected": ("REMAPPED_COR",),
    "remapped_rows.uncorrected": ("REMAPPED_UNC",),
    "remapped_rows.pending": ("REMAPPED_PENDING",),
    "remapped_rows.failed": ("REMAPPED_FAILURE",),
    "pcie_replays": ("PCIE_REPLAY_COUNTER",),
    "nvlink_errors": ("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
    "recovery": ("GET_GPU_RECOVERY_ACTION",),
    "temperatures.memory": ("MEMORY_TEMP",),
    "energy": ("TOTAL_ENERGY_CONSUMPTION",),
}
"""Fields of a reading by the `NVML_FI_DEV_...` values that they are the sum of; all are queried by one call."""
SLOWDOWNS = {
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
"""Bits of NVML's `nvmlClocksEventReason...`."""
_PATIENCE_SECONDS = 10.0
"""How long a start waits for NVML, which may hang in the driver."""
_MOST_LINKS = 18
_PROCESSES_EVERY = 10
"""Readings between two lists of processes, the one query that is not short."""


def named_devices(visible: str) -> list[int | str]:
    """Return what a value of `CUDA_VISIBLE_DEVICES` names: numbers, and UUIDs or their beginnings.

    Like CUDA, it ends with the first entry that is neither.
    """
    named: list[int | str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            named.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            named.append(entry)
        else:
            break
    return named


class NvmlError(Exception):
    """NVML cannot be used for now: the driver fails or hangs, or the device is gone."""


class NvmlMissingError(NvmlError):
    """There is no package, no library, or no NVIDIA device: that stays so."""


def answer_in_time(work: Callable[[], _T]) -> _T:
    """Return the result of `work`, which runs in a thread; raises NvmlError when that takes too long."""
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as exc:  # noqa: BLE001 the top of a thread: it is raised below
            errors.append(exc)

    thread = threading.Thread(target=run, name="nvml-start", daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    if errors:
        raise errors[0]
    if not results:
        raise NvmlError(f"NVML has not answered within {_PATIENCE_SECONDS:.0f} s")
    return results[0]


class Nvml:
    """The library, initialised. Raises NvmlError where there is none."""

    def __init__(self) -> None:
        try:
            ctypes.CDLL(_LIBRARY)  # before the package, whose import takes longer
        except OSError:
            raise NvmlMissingError(f"there is no {_LIBRARY}, which belongs to NVIDIA's driver") from None
        try:
            import pynvml
        except ImportError:
            raise NvmlMissingError("nvidia-ml-py is not installed: pip install 'anabranch[gpu]'") from None
        self.api: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as exc:
            raise NvmlError(f"NVML: {exc}") from exc

    def uuids(self) -> list[str | None]:
        """Return the devices of this machine in the order of their PCI addresses; None for one that is gone."""
        found: list[str | None] = []
        for index in range(self.api.nvmlDeviceGetCount()):
            try:
                found.append(str(self.api.nvmlDeviceGetUUID(self.api.nvmlDeviceGetHandleByIndex(index))))
            except self.api.NVMLError:
                found.append(None)
        return found

    def visible(self, environment: Mapping[str, str] = os.environ) -> list[str | None]:
        """Return the devices that CUDA shows to a process with this environment; None for one that is gone.

        An index in `CUDA_VISIBLE_DEVICES` is taken by the order of PCI addresses. Like CUDA, it ends at the first entry
        that names no device, and the start of a UUID is enough.
        """
        every, named = self.uuids(), environment.get("CUDA_VISIBLE_DEVICES")
        if named is None:
            return every
        found: list[str | None] = []
        for name in named_devices(named):
            if isinstance(name, str) and name.startswith("MIG-"):
                found.append(name)
                continue
            if isinstance(name, int):
                matches = every[name : name + 1]
            else:
                matches = [uuid for uuid in every if uuid and uuid.startswith(name)]
            if len(matches) != 1:
                break
            found.append(matches[0])
        return found

    def open(self, uuid: str) -> "NvmlDevice":
        """Return a device; raises NvmlError when NVML has none of this UUID, which may lack its `GPU-` or `MIG-`."""
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        errors: list[Exception] = []
        for name in names:
            try:
                return NvmlDevice(self.api, name)
            except self.api.NVMLError as exc:
                errors.append(exc)
        raise NvmlError(f"NVML has no device {uuid}: {errors[0]}") from errors[0]


class NvmlDevice:
    """One device, or one MIG instance: its own memory and processes, and all else of the device that it is part of."""

    def __init__(self, api: Any, uuid: str) -> None:
        self._api = api
        self._handle = self._board = api.nvmlDeviceGetHandleByUUID(uuid)
        if uuid.startswith("MIG-"):
            self._board = api.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
        self._unsupported: set[str] = set()
        self._fields = self._supported_fields()
        self._events = self._register()
        self._links = [link for link in range(_MOST_LINKS) if self._link_state(link)]
        self._count = 0
        self._processes: dict[str, int] | None = None
        self.info = DeviceInfo(
            uuid=uuid,
            nvlinks=len(self._links),
            name=str(self._ask("name", lambda: api.nvmlDeviceGetName(self._board)) or "NVIDIA device"),
            slowdown_celsius=self._ask("slowdown", lambda: self._threshold(api.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)),
            memory_max_celsius=self._ask("memory max", lambda: self._threshold(api.NVML_TEMPERATURE_THRESHOLD_MEM_MAX)),
        )

    def read(self, now: float) -> Reading | None:
        """Query the device; `now` is the reading's time. Returns None when it gives no answer for now."""
        api = self._api
        try:
            memory = api.nvmlDeviceGetMemoryInfo(self._handle)
            return self._reading(now, memory)
        except api.NVMLError as exc:
            xids = self._take_xids()
            if exc.value in self._lost_codes:
                return Reading(time=now, lost=str(exc), xids=xids)
            return Reading(time=now, xids=xids) if xids else None

    @property
    def _lost_codes(self) -> tuple[int, int, int]:
        api = self._api
        return api.NVML_ERROR_GPU_IS_LOST, api.NVML_ERROR_RESET_REQUIRED, api.NVML_ERROR_GPU_NOT_FOUND

    def _reading(self, now: float, memory: Any) -> Reading:
        api, board, ask = self._api, self._board, self._ask
        utilization = ask("utilization", lambda: api.nvmlDeviceGetUtilizationRates(board).gpu)
        if self._count % _PROCESSES_EVERY == 0:
            self._processes = ask("processes", self._list_processes)
        self._count += 1
        counters = self._query_fields()
        hot = ask("temperature", lambda: api.nvmlDeviceGetTemperature(board, api.NVML_TEMPERATURE_GPU))
        hot_memory = counters.get("temperatures.memory") or None  # 0 where there is no sensor
        milliwatts = ask("power", lambda: api.nvmlDeviceGetPowerUsage(board))
        limit = ask("power limit", lambda: api.nvmlDeviceGetEnforcedPowerLimit(board))
        sm_clock = ask("sm clock", lambda: api.nvmlDeviceGetClockInfo(board, api.NVML_CLOCK_SM))
        memory_clock = ask("memory clock", lambda: api.nvmlDeviceGetClockInfo(board, api.NVML_CLOCK_MEM))
        reasons = ask("slowdown reasons", lambda: api.nvmlDeviceGetCurrentClocksEventReasons(board)) or 0
        return Reading(
            time=now,
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            utilization=_scaled(utilization, 0.01),
            temperatures=_known(gpu=hot, memory=hot_memory),
            power=_scaled(milliwatts, 1e-3),
            power_limit=_scaled(limit, 1e-3),
            energy=_scaled(counters.get("energy"), 1e-3),
            clocks=_known(sm=_scaled(sm_clock, 1e6), memory=_scaled(memory_clock, 1e6)),
            slowdown=[name for name, bit in SLOWDOWNS.items() if reasons & bit],
            ecc_errors=_below("ecc_errors", counters),
            ecc_lifetime_errors=_below("ecc_lifetime_errors", counters),
            remapped_rows=_below("remapped_rows", counters),
            pcie_replays=counters.get("pcie_replays"),
            nvlink_active=self._count_links(),
            nvlink_errors=counters.get("nvlink_errors"),
            processes=self._processes or {},
            recovery=counters.get("recovery"),
            xids=self._take_xids(),
        )

    def _ask(self, name: str, query: Callable[[], _T]) -> _T | None:
        """Return a query's answer; None where the device has none, of which it is not asked again.

        Raises NVMLError when the device is gone.
        """
        if name in self._unsupported:
            return None
        api = self._api
        try:
            return query()
        except api.NVMLError as exc:
            if exc.value in self._lost_codes:
                raise
            if exc.value in (
                api.NVML_ERROR_NOT_SUPPORTED,
                api.NVML_ERROR_NO_PERMISSION,
                api.NVML_ERROR_FUNCTION_NOT_FOUND,
                api.NVML_ERROR_INVALID_ARGUMENT,
            ):
                self._unsupported.add(name)
        except AttributeError:  # this version of the package has no such query
            self._unsupported.add(name)
        return None

    def _threshold(self, which: int) -> float:
        return float(self._api.nvmlDeviceGetTemperatureThreshold(self._board, which))

    def _supported_fields(self) -> list[tuple[str, int]]:
        """Return reading fields with the number of NVML's value, where this version of the package has a number."""
        named = [(field, f"NVML_FI_DEV_{name}") for field, names in _COUNTERS.items() for name in names]
        numbers = [(field, getattr(self._api, name, None)) for field, name in named]
        return [(field, number) for field, number in numbers if number is not None]

    def _query_fields(self) -> dict[str, int]:
        """Return all of `_COUNTERS` that the device reports."""
        numbers = [number for _, number in self._fields]
        values = self._ask("fields", lambda: self._api.nvmlDeviceGetFieldValues(self._board, numbers))
        found: dict[str, int] = {}
        for (field, _), value in zip(self._fields, values or (), strict=False):
            if value.nvmlReturn == self._api.NVML_SUCCESS and value.valueType < len(_VALUES):
                found[field] = found.get(field, 0) + int(getattr(value.value, _VALUES[value.valueType]))
        return found

    def _link_state(self, link: int) -> int | None:
        return self._ask(f"link {link}", lambda: int(self._api.nvmlDeviceGetNvLinkState(self._board, link)))

    def _count_links(self) -> int | None:
        """Return how many of the links are up; None without any, or when the state of one cannot be had for now."""
        states = {link: self._link_state(link) for link in self._links}
        unclear = [link for link, state in states.items() if state is None and f"link {link}" not in self._unsupported]
        return None if unclear or not states else sum(map(bool, states.values()))

    def _list_processes(self) -> dict[str, int]:
        listed: Iterable[Any] = self._api.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {str(process.pid): int(process.usedGpuMemory or 0) for process in listed}

    def _register(self) -> Any:
        """Return a set of events to which the driver adds Xid events; None where it does not support that."""
        api = self._api
        try:
            events = api.nvmlEventSetCreate()
            api.nvmlDeviceRegisterEvents(self._board, api.nvmlEventTypeXidCriticalError, events)
        except api.NVMLError:
            return None
        return events

    def _take_xids(self) -> tuple[int, ...]:
        found: list[int] = []
        if self._events is not None:
            with contextlib.suppress(self._api.NVMLError):  # a timeout: there are no more
                while len(found) < 100:
                    found.append(int(self._api.nvmlEventSetWait_v2(self._events, 0).eventData))
        return tuple(found)


def _known(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _below(field: str, counters: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of a field with names."""
    return {name.removeprefix(f"{field}."): count for name, count in counters.items() if name.startswith(f"{field}.")}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
