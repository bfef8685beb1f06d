"""`serving.workers` above 1: one process listens, starts the workers, which answer, and restarts those that die."""

import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec

from anabranch.config.loader import Config
from anabranch.core.failures import state_errors
from anabranch.core.logs import log_arguments
from anabranch.core.temporary_files import temporary_folder
from anabranch.runtime.child_process import Part
from anabranch.runtime.lifecycle import Exit
from anabranch.runtime.supervisor import Supervisor
from anabranch.serving.http.listening_socket import UNTIL_GONE, address_of, listen_patiently, load_certificate
from anabranch.serving.reporting.report import STOPPED, ServingReport, write_report
from anabranch.serving.reporting.worker_pool import COUNTS_VARIABLE, WorkerPool

_POLL_SECONDS = 0.05
_REPORT_EVERY = timedelta(seconds=1)
_BEYOND_TIMEOUT = timedelta(seconds=5)

log = logging.getLogger("anabranch.serving")


def serve_by_workers(config: Config, stop: threading.Event) -> Exit:
    """Keep the workers alive until `stop` is set (DONE), or one of them ends in a way that a restart cannot fix.

    Raises:
        SettingsError: certificate and key cannot be used, the address or the port cannot be taken, or this user may
            not write to the state directory.
        DependencyError: the state directory cannot be written for now.
    """
    settings = config.pipeline.serving
    load_certificate(settings.tls, config.folder)  # each worker would find out by itself, seconds later
    with state_errors(f"state_dir: cannot write to {config.state_dir}"):
        config.state_dir.mkdir(parents=True, exist_ok=True)
    with (
        listen_patiently(settings.host, settings.port, UNTIL_GONE) as listener,
        temporary_folder("anabranch-serving-") as folder,
    ):
        pool = WorkerPool(folder, settings.workers)
        parts = [_part(config, pool, number, listener.fileno()) for number in range(pool.size)]
        aggregator = _ReportAggregator(config.state_dir, pool)
        log.info("%d workers serve on %s", pool.size, address_of(settings, listener))
        # A worker's report goes before the next of its number writes one.
        supervisor = Supervisor(parts, on_death=lambda part: pool.remove(parts.index(part)))
        ended = None
        try:
            supervisor.start()
            while ended is None and not stop.wait(_POLL_SECONDS):
                ended = supervisor.check()
                aggregator.publish()
        finally:
            listener.close()
            supervisor.stop()
            aggregator.close()
    return ended or Exit.DONE


def _part(config: Config, pool: WorkerPool, number: int, descriptor: int) -> Part:
    command = (sys.executable, "-P", "-m", "anabranch.serving", *config.arguments(), "--supervised", *log_arguments())
    options = ("--worker", str(number), "--pool", str(pool.folder), "--listener", str(descriptor))
    return Part(
        f"serving worker {number}",
        (*command, *options),
        pool.path(number),
        environment={COUNTS_VARIABLE: str(pool.folder)},
        stop_timeout=config.pipeline.serving.drain + config.pipeline.serving.timeout + _BEYOND_TIMEOUT,
        descriptors=(descriptor,),
    )


class _ReportAggregator:
    """Writes `serving.json` from the workers' reports, about once a second and when the served version changes."""

    def __init__(self, state_dir: Path, pool: WorkerPool) -> None:
        self._state_dir = state_dir
        self._pool = pool
        self._started = time.time()
        self._due = 0.0
        self._served: tuple[object, ...] = ()
        self._last: ServingReport | None = None
        self._complained = False

    def publish(self) -> None:
        report = self._pool.joined(os.getpid(), self._started)
        if report is None:
            return
        served = (report.version, report.workers, report.ready)
        if time.monotonic() >= self._due or served != self._served:
            self._served, self._due = served, time.monotonic() + _REPORT_EVERY.total_seconds()
            self._write(report)

    def close(self) -> None:
        """Say that it has stopped."""
        if self._last is not None:
            self._write(
                msgspec.structs.replace(self._last, time=time.time(), ready=False, workers=0, problems=[STOPPED])
            )

    def _write(self, report: ServingReport) -> None:
        self._last = report
        try:
            write_report(self._state_dir, report)
            self._complained = False
        except OSError as exc:
            if not self._complained:
                log.warning("cannot write %s: %s", self._state_dir, exc)
            self._complained = True
