"""Watches devices from two daemon threads, and acts on what is found between two steps.

One thread reads, and may hang in the driver. The other one judges, and so notices when there is no reading. The loop
calls `act_if_needed` between steps, which checks one attribute while all is well.
"""

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from anabranch.core.state_metrics import StateCollector
from learner.device_health.config import DeviceSettings
from learner.device_health.reading import DeviceInfo, Reading, slowdown_names
from learner.device_health.rules import Level, Symptom, judge
from learner.device_health.sniff_test import SniffTest
from learner.state_dir.report import DeviceHealthReport, DeviceReport

_Number = TypeVar("_Number", int, float)
_GRACE_SECONDS = 5.0
"""How long the loop has to end after a fatal symptom: it may hang in a call of CUDA."""
_CLEAR_SECONDS = 60.0
"""A symptom that was away for so long is logged, and asks for a checkpoint, when it is back."""

log = logging.getLogger(__name__)


class ReadableDevice(Protocol):
    """A device that can be queried."""

    @property
    def info(self) -> DeviceInfo:
        """What does not change."""
        ...

    def read(self, now: float) -> Reading | None:
        """Query the device; None when it gives no answer for now. May hang."""
        ...


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
            silence_seconds=self._silence(now),
            memory_used=reading.memory_used,
            memory_total=reading.memory_total,
            utilization=reading.utilization,
            temperatures=_known(gpu=reading.temperature, memory=reading.memory_temperature),
            power=reading.power,
            power_limit=reading.power_limit,
            energy=reading.energy,
            clocks=_known(sm=reading.sm_clock, memory=reading.memory_clock),
            slowdown=slowdown_names(reading.slowdown),
            ecc_errors=_known(corrected=reading.corrected, uncorrected=reading.uncorrected),
            ecc_lifetime_errors=_known(corrected=reading.lifetime_corrected, uncorrected=reading.lifetime_uncorrected),
            remapped_rows=_known(
                corrected=reading.remapped_corrected,
                uncorrected=reading.remapped_uncorrected,
                pending=reading.remap_pending,
                failed=reading.remap_failed,
            ),
            xids=dict(self.xids),
            pcie_replays=reading.pcie_replays,
            nvlink_active=reading.nvlink_active,
            nvlink_errors=reading.nvlink_errors,
            processes={str(pid): used for pid, used in (reading.processes or {}).items()},
            warnings=[each.sentence for each in self.symptoms if each.level is Level.EARLY],
            problems=[each.sentence for each in self.symptoms if each.level > Level.EARLY],
        )

    def _silence(self, now: float) -> float:
        since = self.asked_since
        return 0.0 if since is None else max(0.0, now - since)


class HealthWatch:
    """Watches devices. `start` starts its threads; `act_if_needed` is for the loop's thread, all else for any."""

    def __init__(
        self,
        devices: Sequence[ReadableDevice],
        settings: DeviceSettings,
        request_checkpoint: Callable[[], object],
        metrics: StateCollector[DeviceHealthReport] | None = None,
        *,
        ranks: int = 1,
        sniff: SniffTest | None = None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Start nothing yet.

        Args:
            devices: queried by one thread, in this order.
            settings: how often, and thresholds.
            request_checkpoint: called by `act_if_needed` for an early warning.
            metrics: updated after each judgement.
            ranks: processes that train together.
            sniff: the sniff test, run by `act_if_needed` every `settings.sniff_every`.
            clock: seconds.
            end: ends the process when the loop does not.
        """
        self._devices = devices
        self._settings = settings
        self._request_checkpoint = request_checkpoint
        self._metrics = metrics
        self._sniff = sniff
        self._clock = clock
        self._end = end
        now = clock()
        self._histories = [DeviceHistory(device.info, settings, now, ranks) for device in devices]
        self._inbox: queue.SimpleQueue[tuple[DeviceHistory, Reading]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._needed = self._checkpoint_needed = False
        self._sniff_due = now + settings.sniff_every.total_seconds()
        self._fatal: str | None = None
        self._hard_end = float("inf")
        self._judged = now
        self.report = DeviceHealthReport()
        """The state of the devices as of the last judgement."""

    @property
    def problem(self) -> str | None:
        """One sentence when a device has failed or does not answer."""
        if self._clock() - self._judged > self._settings.timeout.total_seconds():
            return "the devices are not watched any more: see the log"
        return _sentence((report.uuid, report.problems) for report in self.report.devices)

    @property
    def warning(self) -> str | None:
        """One sentence on what may soon be a problem."""
        early = _sentence((report.uuid, report.warnings) for report in self.report.devices)
        slow = None if self._sniff is None else self._sniff.warning
        return "; ".join(sentence for sentence in (early, slow) if sentence) or None

    def start(self) -> None:
        """Start both threads."""
        for name, run in (("device-reader", self._read_always), ("device-watch", self._judge_always)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        """Let the threads end, and wait for none: one may hang. After a fatal symptom they go on until the end."""
        if self._fatal is None:
            self._closed.set()

    def act_if_needed(self) -> None:
        """Act on the last judgements: request a checkpoint, run the sniff test, or end the process with code 1.

        Called between steps. Nothing is queried here.
        """
        if not self._needed:
            return
        self._needed = False
        if self._fatal is not None:
            log.error("%s; the learner ends, to go on from the newest checkpoint", self._fatal)
            sys.exit(1)
        if self._checkpoint_needed:
            self._checkpoint_needed = False
            self._request_checkpoint()
        if self._sniff is not None and self._clock() >= self._sniff_due:
            before, again = self._sniff.warning, self._sniff.run()
            self._sniff_due = self._clock() + (again or self._settings.sniff_every).total_seconds()
            if self._sniff.warning is not None and before is None:
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
        self.report = DeviceHealthReport(
            devices=[history.report(now) for history in self._histories],
            sniff_seconds={} if self._sniff is None else dict(self._sniff.seconds),
        )
        if self._metrics is not None:
            self._metrics.update(self.report)
        self._needed = self._needed or (self._sniff is not None and now >= self._sniff_due)
        if now >= self._hard_end:
            log.error("the training loop does not end; leaving without a clean end")
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


def _known(**values: _Number | None) -> dict[str, _Number]:
    """Return the values that are known."""
    return {name: value for name, value in values.items() if value is not None}


def _sentence(found: Iterable[tuple[str, Sequence[str]]]) -> str | None:
    return "; ".join(f"device {uuid}: {', '.join(sentences)}" for uuid, sentences in found if sentences) or None
