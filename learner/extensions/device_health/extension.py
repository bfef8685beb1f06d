"""The health of NVIDIA devices: read and judged, so that the learner ends before a failing one costs training.

One thread reads, and may hang in the driver. The other one judges, and so notices when there is no reading. The loop
acts between steps on what was found, and checks one attribute while all is well.
"""

import contextlib
import logging
import os
import queue
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.core.state_metrics import StateCollector
from anabranch.learner.device.health_rules import Level, Symptom, judge
from anabranch.learner.device.nvml import Nvml, NvmlDevice, NvmlError, NvmlMissingError, answer_in_time
from anabranch.learner.device.reading import DeviceInfo, DeviceReport, DeviceState, Reading
from anabranch.learner.extension import Extension
from anabranch.learner.settings.learner import DeviceSettings
from anabranch.learner.status.report import DeviceHealthReport
from anabranch.learner.train.parallelism import COLLECTIVE

_GRACE_SECONDS = 5.0
"""How long the loop has to end after a fatal symptom: it may hang in a call of CUDA."""
_CLEAR_SECONDS = 60.0
"""A symptom that was away for so long is logged, and asks for a checkpoint, when it is back."""
_KEPT = 50
_FEWEST = 5
"""Results that a device needs before it is compared with them."""
_IN_A_ROW = 3
"""Tests in a row in which a device has to be slow: one alone may have shared the device with requests."""
_AGAIN = timedelta(seconds=10)
"""Time until a test is repeated in which a device was slow."""

log = logging.getLogger(__name__)


class DeviceHistory:
    """The readings of one device within the window, and its symptoms. Used by the thread that judges."""

    def __init__(self, info: DeviceInfo, settings: DeviceSettings, now: float, ranks: int) -> None:
        self.info = info
        self._settings = settings
        self._ranks = ranks
        self._readings = [Reading(time=now)]
        self._last_seen: dict[str, float] = {}
        self.asked_since: float | None = None
        """When the first query began that has no answer; set by the thread that reads."""
        self.symptoms: list[Symptom] = []
        """Those of the last `judge`, the gravest first."""
        self.xids: dict[str, int] = {}
        """Xid events since the start, by number."""

    def add(self, reading: Reading) -> None:
        """Add a reading, and drop those that are older than the window."""
        self._readings.append(reading)
        oldest = reading.time - self._settings.window.total_seconds()
        count = next(i for i, each in enumerate(self._readings) if each.time >= oldest)
        del self._readings[:count]
        for number in reading.xids:
            self.xids[str(number)] = self.xids.get(str(number), 0) + 1

    def judge(self, now: float) -> list[Symptom]:
        """Judge the readings; return the symptoms that are new, or graver than before."""
        silence = self._silence(now)
        self.symptoms = judge(self._readings, self.info, self._settings, silence=silence, ranks=self._ranks)
        fresh = []
        for symptom in self.symptoms:
            key = f"{symptom.rule} {symptom.level}"
            if now - self._last_seen.get(key, float("-inf")) > _CLEAR_SECONDS:
                fresh.append(symptom)
            self._last_seen[key] = now
        return fresh

    def report(self, now: float) -> DeviceReport:
        """Return the newest reading for `learner.json` and the metrics."""
        reading, info = self._readings[-1], self.info
        return DeviceReport(
            uuid=info.uuid,
            name=info.name,
            **{name: getattr(reading, name) for name in DeviceState.__struct_fields__},
            silence_seconds=self._silence(now),
            xids=dict(self.xids),
            warnings=[each.sentence for each in self.symptoms if each.level is Level.EARLY],
            problems=[each.sentence for each in self.symptoms if each.level > Level.EARLY],
        )

    def _silence(self, now: float) -> float:
        since = self.asked_since
        return 0.0 if since is None else max(0.0, now - since)


class SpeedCheck:
    """The sniff test, since a device that fails often slows down first. Used by the loop's thread.

    It compares the times of a matrix product with those of earlier tests, and of other ranks.
    """

    def __init__(self, measure: Callable[[], Mapping[str, float]], deviation: float) -> None:
        """`measure` returns seconds by name; one is slow from the fraction `deviation` above the median on."""
        self._measure = measure
        self._deviation = deviation
        self._before: dict[str, deque[float]] = {}
        self._slow: dict[str, int] = {}
        self.seconds: Mapping[str, float] = {}
        """The times of the last test."""
        self.warning: str | None = None
        """One sentence when a device was slow three times in a row. Any thread may read it."""

    def run(self) -> timedelta | None:
        """Run the test; return when to repeat it, or None when all is as usual."""
        try:
            self.seconds = self._measure()
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            return None  # it is run again when it is due
        slow = slow_ones(self.seconds, self._before, self._deviation)
        self._slow = {name: self._slow.get(name, 0) + 1 for name in slow}
        for name, seconds in self.seconds.items():
            if name not in slow:
                self._before.setdefault(name, deque(maxlen=_KEPT)).append(seconds)
        named = [f"{name} by {slow[name]:.0%}" for name, count in self._slow.items() if count >= _IN_A_ROW]
        before, self.warning = self.warning, f"the sniff test is slow: {', '.join(named)}" if named else None
        if self.warning is not None and before is None:
            log.warning("%s", self.warning)
        return _AGAIN if slow and not named else None


def slow_ones(
    seconds: Mapping[str, float], before: Mapping[str, Sequence[float]], deviation: float
) -> dict[str, float]:
    """Return by how much the slow ones are above the median, as a fraction: of their earlier times, or of the ranks."""
    ranks = [time for name, time in seconds.items() if name != COLLECTIVE]
    found = {}
    for name, now in seconds.items():
        medians = [statistics.median(before[name])] if len(before.get(name, ())) >= _FEWEST else []
        if name != COLLECTIVE and len(ranks) > 1:
            medians.append(statistics.median(ranks))
        excess = max((now / median - 1 for median in medians), default=0.0)
        if excess > deviation:
            found[name] = excess
    return found


class DeviceHealth(Extension):
    """Watches devices. `start` starts its threads."""

    name: ClassVar[str] = "device_health"

    def __init__(
        self,
        devices: Sequence[NvmlDevice],
        settings: DeviceSettings,
        request_checkpoint: Callable[[], object],
        metrics: StateCollector[DeviceHealthReport] | None = None,
        *,
        ranks: int = 1,
        speed: SpeedCheck | None = None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Start nothing yet.

        Args:
            devices: queried by one thread, in this order.
            settings: how often, and thresholds.
            request_checkpoint: called by `run_if_due` for an early warning.
            metrics: updated after each judgement, also while the loop hangs.
            ranks: processes that train together.
            speed: run by `run_if_due` every `settings.sniff_every`.
            clock: in seconds.
            end: ends the process when the loop does not.
        """
        self._devices = devices
        self._settings = settings
        self._request_checkpoint = request_checkpoint
        self._metrics = metrics
        self._speed = speed
        self._clock = clock
        self._end = end
        now = clock()
        self._histories = [DeviceHistory(device.info, settings, now, ranks) for device in devices]
        self._inbox: queue.SimpleQueue[tuple[DeviceHistory, Reading]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._needed = self._checkpoint_needed = False
        self._speed_due = now + settings.sniff_every.total_seconds()
        self._fatal: str | None = None
        self._hard_end = float("inf")
        self._judged = now
        self.newest = DeviceHealthReport()
        """The state of the devices as of the last judgement."""

    @property
    @override
    def problem(self) -> str | None:
        if self._clock() - self._judged > self._settings.timeout.total_seconds():
            return "the devices are not watched any more: see the log"
        return _sentence((report.uuid, report.problems) for report in self.newest.devices)

    @property
    @override
    def warning(self) -> str | None:
        early = _sentence((report.uuid, report.warnings) for report in self.newest.devices)
        slow = None if self._speed is None else self._speed.warning
        return "; ".join(sentence for sentence in (early, slow) if sentence) or None

    def start(self) -> None:
        """Start both threads."""
        for name, run in (("device-reader", self._read_always), ("device-watch", self._judge_always)):
            threading.Thread(target=run, name=name, daemon=True).start()

    @override
    def report(self) -> Mapping[str, Any]:
        return {"device": self.newest}

    @override
    def close(self) -> None:
        # Waits for no thread, since one may hang. After a fatal symptom they continue until the process ends.
        if self._fatal is None:
            self._closed.set()

    @override
    def run_if_due(self) -> None:
        # Acts on the last judgements, and queries nothing: requests a checkpoint, or ends the process with code 1.
        if not self._needed:
            return
        self._needed = False
        if self._fatal is not None:
            log.error("%s; the learner ends, to go on from the newest checkpoint", self._fatal)
            sys.exit(1)
        if self._checkpoint_needed:
            self._checkpoint_needed = False
            self._request_checkpoint()
        if self._speed is not None and self._clock() >= self._speed_due:
            before, again = self._speed.warning, self._speed.run()
            self._speed_due = self._clock() + (again or self._settings.sniff_every).total_seconds()
            if self._speed.warning is not None and before is None:
                self._request_checkpoint()

    def read(self) -> None:
        """Query all devices once. May hang."""
        for device, history in zip(self._devices, self._histories, strict=True):
            now = self._clock()
            if history.asked_since is None:
                history.asked_since = now
            reading = device.read(now)
            if reading is not None:
                history.asked_since = None
                self._inbox.put((history, reading))

    def judge(self) -> None:
        """Judge what was read so far, and set what has to be done. Called by one thread."""
        while not self._inbox.empty():
            history, reading = self._inbox.get()
            history.add(reading)
        now = self._judged = self._clock()
        for history in self._histories:
            for symptom in history.judge(now):
                self._respond(history.info.uuid, symptom, now)
        self.newest = DeviceHealthReport(
            devices=[history.report(now) for history in self._histories],
            sniff_seconds={} if self._speed is None else dict(self._speed.seconds),
        )
        if self._metrics is not None:
            self._metrics.update(self.newest)
        self._needed = self._needed or (self._speed is not None and now >= self._speed_due)
        if now >= self._hard_end:
            log.error("the training loop does not end; exiting without cleanup")
            self._end(1)
            self._closed.set()

    def _respond(self, uuid: str, symptom: Symptom, now: float) -> None:
        log.log(logging.WARNING if symptom.level is Level.EARLY else logging.ERROR, "%s: %s", uuid, symptom.sentence)
        if symptom.level is Level.FATAL:
            self._fatal = self._fatal or f"{uuid}: {symptom.sentence}"
            self._hard_end = min(self._hard_end, now + _GRACE_SECONDS)
        elif self._fatal is None:
            self._checkpoint_needed = True
        self._needed = True

    def _read_always(self) -> None:
        while not self._closed.is_set():
            self.read()
            self._closed.wait(self._settings.every.total_seconds())

    def _judge_always(self) -> None:
        longest = min(self._settings.every.total_seconds(), self._settings.timeout.total_seconds(), 1.0) / 2
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):  # there is no reading, which is judged too
                history, reading = self._inbox.get(timeout=longest)
                history.add(reading)
            self.judge()


def watch_devices(
    settings: DeviceSettings,
    devices: Sequence[torch.device],
    request_checkpoint: Callable[[], object],
    metrics: StateCollector[DeviceHealthReport] | None = None,
    *,
    ranks: int = 1,
    speed: SpeedCheck | None = None,
) -> DeviceHealth | None:
    """Start to watch the devices of this process; return None where there is nothing to watch, or `enabled` is off.

    With `device.enabled = "on"`, a device that cannot be watched for now ends the process with code 1.

    Args:
        settings: how often, and thresholds.
        devices: of the ranks of this host.
        request_checkpoint: called between steps, for an early warning.
        metrics: updated after each judgement.
        ranks: processes that train together.
        speed: of the devices of all ranks; None: they are not timed.

    Raises:
        SettingsError: `device.enabled = "on"`, and there is no NVIDIA device, or no NVML.
    """
    if settings.enabled == "off":
        return None
    try:
        opened = _open(devices)
    except NvmlError as exc:
        sentence = f'device.enabled = "{settings.enabled}", but {exc}'
        if settings.enabled == "on" and isinstance(exc, NvmlMissingError):
            raise SettingsError(sentence) from exc
        if settings.enabled == "on":
            log.error("%s", sentence)  # noqa: TRY400 the sentence says all
            sys.exit(1)
        log.info("the health of the device is not watched: %s", exc)
        return None
    health = DeviceHealth(opened, settings, request_checkpoint, metrics, ranks=ranks, speed=speed)
    health.start()
    return health


def _open(devices: Sequence[torch.device]) -> Sequence[NvmlDevice]:
    """Return the devices, by the UUIDs that torch has of them."""
    for device in devices:
        if device.type != "cuda":
            raise NvmlMissingError(f"{device} is no NVIDIA device")
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]

    def open_all() -> Sequence[NvmlDevice]:
        nvml = Nvml()
        return [nvml.open(uuid) for uuid in uuids]

    return answer_in_time(open_all)


def _sentence(found: Iterable[tuple[str, Sequence[str]]]) -> str | None:
    return "; ".join(f"device {uuid}: {', '.join(sentences)}" for uuid, sentences in found if sentences) or None
