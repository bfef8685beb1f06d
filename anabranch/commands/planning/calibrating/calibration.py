"""The calibration: the learner and serving of a pipeline, for some seconds, on synthetic events in a temporary folder.

1. Both run at the planned rate: steps, versions, freshness, memory, requests.
2. Events come as fast as they are read: the rate at which the pipeline saturates, and what it waits for.
3. The ingest process alone, and the disk alone.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec

from anabranch.commands.planning.calibrating.differences import differences_of
from anabranch.commands.planning.calibrating.metrics import FreshnessSum, LearnerCounters, read_counters, read_freshness
from anabranch.commands.planning.calibrating.process_usage import (
    PeakMemory,
    cpu_of_parts,
    is_counted,
    usable_cores,
    written_bytes,
)
from anabranch.commands.planning.calibrating.requests import time_requests
from anabranch.commands.planning.calibrating.state_files import pages, write_rate
from anabranch.commands.planning.calibrating.synthetic_events import Synthetic, synthetic_messages
from anabranch.commands.planning.calibrating.synthetic_pipeline import (
    PROGRAM,
    CalibrationSpec,
    calibrated_stream,
    synthetic_source,
)
from anabranch.commands.planning.constants import Constants, Load
from anabranch.commands.planning.run_constants import process_sizes, set_delivery, sizes_of
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.core.files import existing_folder
from anabranch.core.temporary_files import temporary_folder
from anabranch.runtime.embedded_broker import free_port
from anabranch.runtime.lifecycle import stop_on_signals
from ingest.events.schema import Schema
from learner.state_dir.report import LearnerReport, read_report
from serving.reporting.report import ServingReport
from serving.reporting.report import read_report as read_serving_report

_START_SECONDS = 300.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0
_SHARES = {"steady": 0.5, "flood": 0.3, "ingest": 0.1, "requests": 0.1}
"""Parts of the time of a calibration."""
_WARM_UP = 0.25
"""Part of the time at each rate before it is measured."""
_STORED_EVENTS = 50_000
_STORED_BYTES = 500_000_000
"""The store of a calibration has no more than these, so that it is full soon."""
_LAST_WORDS = 400
_REPORTS_PER_SECOND = 2.0
_LEAST_VERSIONS = 3
_LEAST_CHECKPOINTS = 2
_PUBLISHED = 5
"""Checkpoints and versions that are due at the planned rate, at least."""

Say = Callable[[str], object]


def calibrate(config: Config, load: Load, seconds: float, say: Say) -> Constants:
    """Run the pipeline on synthetic events for `seconds`, and return what was measured.

    `say` receives what is done next. Nothing outside a temporary folder next to `state_dir` is written.

    Raises:
        SettingsError: the model or the settings do not work, or the format cannot hold the schema.
    """
    pipeline = config.pipeline
    schema = Schema(pipeline.events)
    stream = calibrated_stream(pipeline.stream)
    messages = synthetic_messages(schema, stream, load.event_bytes, load.events_per_message, pipeline.seed)
    above = existing_folder(config.state_dir.parent).resolve()
    with stop_on_signals() as stop, temporary_folder(".anabranch-plan-", above) as folder:
        spec = _write_spec(config, load, messages, folder, seconds)
        constants = Constants(source="calibration", parameters=0, event_bytes=messages.event_bytes)
        constants.differences = differences_of(config.pipeline, load, messages)
        say("starting the learner and serving on synthetic events")
        with _Processes(config.path, folder, stop) as processes:
            _measure(processes, config, constants, load, seconds, say)
        say("measuring ingest and the disk alone")
        constants.ingest_rate = _ingest_rate(config, spec, seconds * _SHARES["ingest"], stop)
        constants.disk_bytes_per_second = write_rate(folder)
        _end_if(stop)
    return constants


class _Processes:
    """The learner and serving, killed when the context ends."""

    def __init__(self, config: Path, folder: Path, stop: threading.Event) -> None:
        """Start nothing yet; `stop` ends each wait by KeyboardInterrupt."""
        self._config, self.folder, self._stop = config, folder, stop
        self.state_dir = folder / "var"
        self.spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=CalibrationSpec)
        self._logs: dict[str, Path] = {}
        self._popen: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "_Processes":
        for part in ("learner", "serving"):
            self._start(part)
        self.peak = PeakMemory(self.pid("learner"), self.pid("serving"))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._popen.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._popen.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, part: str) -> None:
        command = [sys.executable, "-P", *PROGRAM, "--part", part, "--spec", str(self.folder / "spec.json")]
        command += ["-c", str(self._config), "--supervised", "--log-level", "warning"]
        self._logs[part] = self.folder / f"{part}.log"
        with self._logs[part].open("wb") as output:
            self._popen[part] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )

    def pid(self, part: str) -> int:
        """Return the process id of the learner or serving."""
        return self._popen[part].pid

    def cpu(self) -> dict[str, float]:
        """Return the CPU time of each part so far."""
        return cpu_of_parts(self.pid("learner"), self.pid("serving"))

    @property
    def report(self) -> LearnerReport | None:
        """The newest report of the learner."""
        return read_report(self.state_dir)

    @property
    def serving_report(self) -> ServingReport | None:
        """The newest report of serving."""
        return read_serving_report(self.state_dir)

    def counters(self) -> LearnerCounters:
        """Return the learner's counters."""
        found = read_counters(self.spec.status)
        if found is None:
            self._check()
            raise SettingsError(f"the learner of the calibration does not answer on {self.spec.status}")
        return found

    def freshness(self) -> FreshnessSum:
        """Return the freshness that serving has measured."""
        report = self.serving_report
        found = None if report is None else read_freshness(report.address)
        if found is None:
            self._check()
            raise SettingsError("serving does not answer in the calibration")
        return found

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait, and sample the memory; return whether `until` came true.

        Raises:
            SettingsError: a process has ended.
        """
        end = time.monotonic() + seconds
        while not (done := until()) and time.monotonic() < end:
            self._check()
            self.peak.sample()
            self._stop.wait(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))
            _end_if(self._stop)
        return done

    def _check(self) -> None:
        for part, process in self._popen.items():
            if (code := process.poll()) is not None:
                words = self._logs[part].read_text(errors="replace").strip()[-_LAST_WORDS:]
                raise SettingsError(
                    f'the {part} of the calibration ended with exit code {code}; run "anabranch doctor". '
                    f"Its log ends with: {' '.join(words.split())}"
                )


def _measure(processes: _Processes, config: Config, constants: Constants, load: Load, seconds: float, say: Say) -> None:
    """Fill the constants that the running pipeline shows."""

    def is_serving() -> bool:
        serving, report = processes.serving_report, processes.report
        return report is not None and report.steps > 0 and serving is not None and serving.version is not None

    if not processes.wait(_START_SECONDS, is_serving):
        raise SettingsError(f"no version is served {_START_SECONDS:.0f} s after the start of the calibration")
    say(f"measuring at {load.rate:,.0f} events a second")
    _steady(processes, config, constants, load, seconds * _SHARES["steady"])
    say("timing requests")
    serving = processes.serving_report
    assert serving is not None
    schema = Schema(config.pipeline.events)
    constants.request_seconds = time_requests(
        serving.address, config.pipeline.name, schema, seconds * _SHARES["requests"]
    )
    say("measuring the rate at which it saturates")
    saved = _flood(processes, constants, seconds * _SHARES["flood"])
    _sizes(processes, config, constants, 0.0 if config.pipeline.replay.slower else saved)


def _steady(processes: _Processes, config: Config, constants: Constants, load: Load, seconds: float) -> None:
    """Measure at the planned rate."""
    processes.wait(seconds * _WARM_UP)
    seconds *= 1 - _WARM_UP
    learner, serving = processes.pid("learner"), processes.pid("serving")
    first = processes.freshness()
    before, report, begin = processes.counters(), processes.report, time.monotonic()
    pids = (learner, serving)
    wrote = [written_bytes(pid) for pid in pids]
    processes.wait(seconds)
    after, last, took = processes.counters(), processes.report, time.monotonic() - begin
    assert report is not None
    assert last is not None
    wrote = [written_bytes(pid) - first for pid, first in zip(pids, wrote, strict=True)]
    done = after.since(before)
    if done.steps:
        constants.step_seconds = done.step_seconds / done.steps
    if (published := last.versions_published - report.versions_published) >= _LEAST_VERSIONS:
        constants.publish_seconds = (last.time - report.time) / published  # each report may be a second old
    if is_counted():
        constants.report_bytes_per_second = _reports(processes.state_dir, wrote[1] / took)
    served, fresh = processes.serving_report, processes.freshness().mean_since(first)
    if served is not None and constants.step_seconds is not None:
        set_delivery(config.pipeline, constants, load.rate, (fresh, served.freshness_p99_seconds))


def _reports(state_dir: Path, serving: float) -> float:
    """Return the bytes a second of both reports, given those that serving wrote, which writes nothing else.

    Files that are replaced soon reach the disk on some file systems only.
    """
    sizes = {name: pages((state_dir / f"{name}.json").stat().st_size) for name in ("learner", "serving")}
    return serving + min(1.0, serving / sizes["serving"]) * sizes["learner"] * _REPORTS_PER_SECOND


def _flood(processes: _Processes, constants: Constants, seconds: float) -> float:
    """Measure as many events as are read; return how many came between two checkpoints, 0 where none was written."""
    Path(processes.spec.flood).touch()
    processes.wait(seconds * _WARM_UP)
    before, used, begin = processes.counters(), processes.cpu(), time.monotonic()
    processes.wait(seconds * (1 - _WARM_UP))
    after, now, took = processes.counters(), processes.cpu(), time.monotonic() - begin
    done = after.since(before)
    if done.steps and done.rows:
        constants.saturation_rate = done.rows / took
        if is_counted():
            constants.cores = usable_cores()
            constants.cpu_seconds_per_event = {part: (now[part] - used[part]) / done.rows for part in now}
        constants.full_step_seconds, constants.full_step_rows = done.step_seconds / done.steps, done.rows / done.steps
        constants.stall_seconds_per_event = done.stall_seconds / done.rows
        constants.checkpoint_stall_seconds_per_event = done.checkpoint_stall_seconds / done.rows
    if after.checkpoints:
        constants.checkpoint_seconds = after.checkpoint_seconds / after.checkpoints
    return done.rows / written if (written := after.checkpoints - before.checkpoints) else 0.0


def _sizes(processes: _Processes, config: Config, constants: Constants, saved: float) -> None:
    """Read sizes of files and processes, and of the model."""
    report = processes.report
    assert report is not None
    sizes_of(config.pipeline, report, processes.state_dir, constants)
    if is_counted():
        process_sizes(config, report, constants, processes.peak, saved)


def _ingest_rate(config: Config, spec: CalibrationSpec, seconds: float, stop: threading.Event) -> float | None:
    """Return the events a second of the ingest process alone, of one block at least."""
    source = synthetic_source(config.pipeline, spec)
    rows, begin, last = 0, None, time.monotonic() + _START_SECONDS
    try:
        source.open()
        while (now := time.monotonic()) < last and (begin is None or not rows or now < begin + seconds):
            _end_if(stop)
            block = source.poll(timedelta(seconds=_POLL_SECONDS))
            if block is None:
                continue
            if begin is None:  # the first blocks were read while nobody received them
                begin = time.monotonic()
            else:
                rows += len(block)
            source.release(block)
    finally:
        source.close()
    return None if begin is None or not rows else rows / (time.monotonic() - begin)


def _write_spec(config: Config, load: Load, messages: Synthetic, folder: Path, seconds: float) -> CalibrationSpec:
    """Write the messages and what the processes of the calibration read."""
    replay = config.pipeline.replay
    path = folder / "messages.bin"
    path.write_bytes(msgspec.msgpack.encode(messages.values))
    sizes = [int(replay.device_bytes), *(int(tier.bytes) for tier in replay.slower.values())]
    spec = CalibrationSpec(
        state_dir=str(folder / "var"),
        messages=str(path),
        rate=load.rate / load.events_per_message,
        flood=str(folder / "flood"),
        status=f"127.0.0.1:{free_port()}",
        checkpoint_seconds=seconds * _SHARES["steady"] / _LEAST_CHECKPOINTS,
        publish_seconds=seconds * _SHARES["steady"] / _PUBLISHED,
        store_fraction=min(1.0, _STORED_EVENTS / replay.capacity, _STORED_BYTES / max(sizes)),
    )
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    return spec


def _end_if(stop: threading.Event) -> None:
    """End the calibration after a signal, so that its folder is removed."""
    if stop.is_set():
        raise KeyboardInterrupt
