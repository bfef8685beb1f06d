"""Judges the health of a device by its last readings: rules as data, and pure functions that apply them.

Trends are early warnings: the device works, and may not for long. What cannot be trusted any more is fatal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from anabranch.learner.device.reading import DeviceInfo, Reading
from anabranch.learner.settings.learner import DeviceSettings

_SPAN_SECONDS = 20.0
"""The time over which temperatures are averaged, to extrapolate the averages."""
_SPANS, _SPANS_AHEAD = 5, 3
_OVERDUE = 1.5
"""Seconds, or times `device.every` where that is longer, after which an answer is overdue."""
_ROW = 2
"""Readings in a row that have to slow down for a reason: one alone is a peak of power."""
_THERMAL = {"thermal", "hardware_thermal"}
_BRAKE = {"hardware", "power_brake"}
_FAR_BELOW = 0.9
"""Fraction of the power limit below which a slowdown is not due to the limit."""


class Level(IntEnum):
    """How grave a symptom is, and what follows."""

    EARLY = 1
    """The device works, and may not for long: a warning, and a checkpoint."""
    PROBLEM = 2
    """The device has failed in part or does not answer: a problem, and a checkpoint."""
    FATAL = 3
    """The device cannot be trusted any more: a problem, and the learner ends without a checkpoint."""


class Symptom(msgspec.Struct, frozen=True):
    """What a rule found."""

    rule: str
    """Name of the rule, which stays the same while the symptom lasts."""
    level: Level
    sentence: str


@dataclass(frozen=True)
class Rise:
    """A counter that rose within the window."""

    field: str
    """Of a reading, such as `pcie_replays`, or `ecc_errors.corrected`."""
    level: Level
    what: str
    least: Callable[[DeviceSettings], int] = lambda _: 1
    """How much it has to rise."""


RISES: Sequence[Rise] = (
    Rise("ecc_errors.uncorrected", Level.FATAL, "memory errors that ECC could not correct"),
    Rise("remapped_rows.failed", Level.FATAL, "rows of memory for which no spare one is left"),
    Rise("remapped_rows.uncorrected", Level.EARLY, "rows of memory that spare ones replace after errors not corrected"),
    Rise(
        "ecc_errors.corrected",
        Level.EARLY,
        "memory errors that ECC corrected",
        lambda given: given.corrected_errors,
    ),
    Rise("pcie_replays", Level.EARLY, "replays of PCIe packets", lambda settings: settings.pcie_replays),
    Rise("nvlink_errors", Level.EARLY, "replays and recoveries of NVLink", lambda settings: settings.nvlink_errors),
)
"""Counters, the gravest first. Only a rise counts, since most of them began before the process."""


@dataclass(frozen=True)
class Flag:
    """A value of the newest reading that is not 0."""

    field: str
    level: Level
    sentence: str


FLAGS: Sequence[Flag] = (
    Flag("remapped_rows.failed", Level.PROBLEM, "no spare row of memory is left: have the device replaced"),
    Flag("remapped_rows.pending", Level.EARLY, "a row of memory is replaced at the next reset: reset the device soon"),
    Flag("recovery", Level.PROBLEM, "the driver asks for a reset of the device"),
)
"""What may have been so before the process, and ends it therefore not."""


class Xid(NamedTuple):
    """What one of NVIDIA's error numbers means for the learner."""

    meaning: str
    level: Literal["early", "fatal"]
    """`fatal`: what is on the device cannot be trusted, or the device needs a reset."""
    of_links: bool = False
    """Whether it concerns NVLink alone: fatal only where ranks exchange gradients by it."""


XIDS: dict[int, Xid] = {
    46: Xid("the device stopped processing", "fatal"),
    48: Xid("a memory error could not be corrected", "fatal"),
    62: Xid("the internal micro-controller halted", "fatal"),
    63: Xid("a row of memory is to be replaced by a spare one at the next reset", "early"),
    64: Xid("a row of memory could not be replaced by a spare one", "fatal"),
    74: Xid("an NVLink connection failed", "fatal", of_links=True),
    79: Xid("the device has fallen off the bus", "fatal"),
    92: Xid("the rate of corrected memory errors is high", "early"),
    94: Xid("a memory error that could not be corrected was contained in one process", "early"),
    95: Xid("a memory error could be neither corrected nor contained", "fatal"),
    109: Xid("a switch of contexts timed out", "early"),
    119: Xid("the GPU system processor did not answer the driver", "fatal"),
    120: Xid("the GPU system processor failed", "fatal"),
    140: Xid("a memory error was not recovered from", "fatal"),
    143: Xid("the device could not be initialised", "fatal"),
    154: Xid("the driver asks for a recovery action", "early"),
    156: Xid("a resource of the device is to be retired at the next reset", "early"),
    157: Xid("a resource of the device could not be retired", "fatal"),
    158: Xid("the device timed out and needs a reset", "fatal"),
    171: Xid("an error of the device's memory could not be corrected", "fatal"),
    172: Xid("an error of the device's caches could not be corrected", "fatal"),
}
"""By number.

Sources: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors) for the meaning and the
immediate action, and NVIDIA, "Health Validation: Xid Checks" (docs.nvidia.com/health-validation) for those that are
critical. Numbers that are not listed are of applications or of graphics, such as 13, 31, 43 and 45: the process that is
at fault gets an error of CUDA, and others continue. So it is with 94 and 109, which are early: NVML does not say whose
they are, and where it is the learner, CUDA's error ends it anyway.
"""


def judge(
    readings: Sequence[Reading], info: DeviceInfo, settings: DeviceSettings, *, silence: float = 0.0, ranks: int = 1
) -> list[Symptom]:
    """Return the symptoms of a device, the gravest first.

    Args:
        readings: those of `settings.window`, the oldest first; at least one.
        info: limits of the device.
        settings: thresholds.
        silence: seconds for which a query has had no answer.
        ranks: processes that train together; an error of NVLink is fatal for several.
    """
    newest = readings[-1]
    found = [*_silence(silence, settings), *_xids(readings, ranks)]
    if newest.lost is not None:
        found.append(Symptom("lost", Level.FATAL, f"NVML reports: {newest.lost}"))
    else:
        found += [*_rises(readings, settings), *_flags(newest), *_links(newest.nvlink_active, info, ranks)]
        found += [*_slowdown(readings), *_heat(readings, info, settings)]
    return sorted(found, key=lambda symptom: -symptom.level)


def is_usable(reading: Reading) -> bool:
    """Return whether a learner that starts may use a device: it is there, needs no reset, and has spare rows."""
    return reading.lost is None and not reading.recovery and not reading.remapped_rows.get("failed")


def rise(readings: Sequence[Reading], field: str) -> int:
    """Return how much a counter rose over the readings; 0 where it is not reported, or was reset."""
    last = next((value for each in reversed(readings) if (value := _value(each, field)) is not None), None)
    if last is None:
        return 0
    first = next(value for each in readings if (value := _value(each, field)) is not None)
    return max(0, int(last) - int(first))


def _value(reading: Reading, field: str) -> float | None:
    name, _, key = field.partition(".")
    value = getattr(reading, name)
    return value.get(key) if key else value  # type: ignore[no-any-return]


def extrapolated(means: Sequence[float]) -> float:
    """Return the highest of the next three values, given the last three: each rise is that before times their ratio.

    A load that begins heats by less and less, which ends below the limit; the ratio is at most 1.
    """
    first, second = means[-2] - means[-3], means[-1] - means[-2]
    ratio = min(1.0, second / first) if first > 0 else 0.0
    return means[-1] + max(0.0, second) * sum(ratio**span for span in range(1, _SPANS_AHEAD + 1))


def _silence(seconds: float, settings: DeviceSettings) -> Iterator[Symptom]:
    timeout = settings.timeout.total_seconds()
    overdue = min(timeout, _OVERDUE * max(1.0, settings.every.total_seconds()))
    if seconds >= overdue:
        # The sentence stays the same while it lasts; the exact time is a metric.
        level, shown = (Level.PROBLEM, timeout) if seconds >= timeout else (Level.EARLY, overdue)
        yield Symptom("silence", level, f"it has not answered for more than {shown:g} s")


def _xids(readings: Sequence[Reading], ranks: int) -> Iterator[Symptom]:
    with_events = list(filter(None, map(attrgetter("xids"), readings)))
    for number in dict.fromkeys(number for xids in with_events for number in xids if number in XIDS):
        xid = XIDS[number]
        fatal = xid.level == "fatal" and (ranks > 1 or not xid.of_links)
        yield Symptom(f"xid {number}", Level.FATAL if fatal else Level.EARLY, f"Xid {number}: {xid.meaning}")


def _rises(readings: Sequence[Reading], settings: DeviceSettings) -> Iterator[Symptom]:
    for rule in RISES:
        count = rise(readings, rule.field)
        if count >= rule.least(settings):
            minutes = settings.window.total_seconds() / 60
            yield Symptom(rule.field, rule.level, f"{count} {rule.what} within {minutes:.0f} min")


def _flags(newest: Reading) -> Iterator[Symptom]:
    for rule in FLAGS:
        if _value(newest, rule.field):
            yield Symptom(f"{rule.field} now", rule.level, rule.sentence)


def _links(active: int | None, info: DeviceInfo, ranks: int) -> Iterator[Symptom]:
    if active is not None and active < info.nvlinks:
        sentence = f"{info.nvlinks - active} of {info.nvlinks} NVLink connections are down"
        yield Symptom("nvlink_active", Level.PROBLEM if ranks > 1 else Level.EARLY, sentence)


def _slowdown(readings: Sequence[Reading]) -> Iterator[Symptom]:
    """Yield what slows the device in the last readings, besides the limit of its power, which is usual."""
    last = readings[-_ROW:]
    if len(last) < _ROW:
        return
    if all(_THERMAL.intersection(reading.slowdown) for reading in last):
        yield Symptom("slowdown thermal", Level.EARLY, "it slows down because it is hot")
    elif all(_BRAKE.intersection(reading.slowdown) and _far_below_limit(reading) for reading in last):
        yield Symptom("slowdown brake", Level.EARLY, "the hardware slows it down far below its power limit")


def _far_below_limit(reading: Reading) -> bool:
    return reading.power is None or reading.power_limit is None or reading.power < _FAR_BELOW * reading.power_limit


def _heat(readings: Sequence[Reading], info: DeviceInfo, settings: DeviceSettings) -> Iterator[Symptom]:
    limits = {"gpu": info.slowdown_celsius, "memory": info.memory_max_celsius}
    for sensor, limit in limits.items():
        value = readings[-1].temperatures.get(sensor)
        if limit is None or value is None or value < limit - settings.temperature_margin:
            continue
        what, rule = ("its memory", "memory_temperature") if sensor == "memory" else ("it", "temperature")
        if value >= limit:
            yield Symptom(rule, Level.EARLY, f"{what} is at {value:.0f} °C, and slows down from {limit:.0f} °C on")
            continue
        means = _means(readings, sensor)
        # For some spans in a row, since the begin of a load and a failing fan are the same at first.
        if len(means) == _SPANS and all(extrapolated(means[i : i + 3]) >= limit for i in range(_SPANS - 2)):
            sentence = f"{what} is at {value:.0f} °C and rises: it slows down from {limit:.0f} °C on"
            yield Symptom(rule, Level.EARLY, sentence)


def _means(readings: Sequence[Reading], sensor: str) -> list[float]:
    """Return the means of the last spans, the oldest first; fewer where a span has no value."""
    end = readings[-1].time
    spans: list[list[float]] = [[] for _ in range(_SPANS)]
    for reading in reversed(readings):
        index = int((end - reading.time) // _SPAN_SECONDS)
        if index >= len(spans):
            break
        if (value := reading.temperatures.get(sensor)) is not None:
            spans[index].append(value)
    return [sum(span) / len(span) for span in reversed(spans) if span]
