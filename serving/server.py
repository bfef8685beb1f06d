"""The serving process: its parts, its start, and the order of its stop."""

import asyncio
import gc
import logging
import os
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta

import msgspec
import prometheus_client
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.errors import SettingsError
from learner.device_sharing.lease import hold_server
from serving.config import ServingSettings
from serving.dashboard.status import Overview
from serving.http.app import build_app
from serving.http.listening_socket import address_of, listen
from serving.http.log_limit import limited_lines
from serving.http.server import HttpServer
from serving.inference.batcher import Batcher
from serving.inference.service import Service
from serving.inference.shadow import Shadow
from serving.metrics import ServingMetrics
from serving.model.deployment import Deployment
from serving.model.device import device_errors, use_device, use_precision
from serving.model.loaded_version import ServedVersion
from serving.reporting.report import STOPPED, ServingReport, write_report
from serving.reporting.worker_pool import PoolWorker
from serving.rollout.hot_swap import VersionSwapper

log = logging.getLogger("anabranch.serving")

REPORT_EVERY = timedelta(seconds=1)
_POLL_EVERY = timedelta(milliseconds=50)


def serve(
    deployment: Deployment,
    settings: ServingSettings,
    stop: threading.Event,
    worker: PoolWorker | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Answer requests until `stop` is set. Called in the main thread; signal handlers are not changed.

    Args:
        deployment: what is served.
        settings: how it is served.
        stop: ends it.
        worker: this process, if it is one of several; None otherwise.
        listener: the socket that the workers share.

    Raises:
        SettingsError: the model cannot be built, the address or the port cannot be taken, or TLS files cannot be read.
        DeviceError: the device is lost, or has too little memory at start.
    """
    with device_errors(deployment.device):
        use_device(deployment.device)
        use_precision(deployment.precision, deployment.device)
        deployment.check()
    try:
        deployment.state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SettingsError(f"state_dir: cannot write to {deployment.state_dir}: {exc.strerror}") from exc
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    threads = torch.get_num_threads() // (2 * settings.workers)  # the rest is for event loops and the learner
    torch.set_num_threads(max(1, threads))
    with listener or listen(settings.host, settings.port) as socket_, limited_lines():
        asyncio.run(_Process(deployment, settings, socket_, worker).run(stop))


class _Process:
    """One run of the serving process."""

    def __init__(
        self, deployment: Deployment, settings: ServingSettings, listener: socket.socket, worker: PoolWorker | None
    ) -> None:
        self._deployment = deployment
        self._settings = settings
        self._listener = listener
        self._worker = worker
        self._address = address_of(settings, listener)
        self._metrics = worker.metrics() if worker else ServingMetrics(CollectorRegistry())
        self._started = time.time()
        self._bugs: list[BaseException] = []
        self._report_problems: list[str] = []

    async def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, then stop in this order, within the time that a request may take:

        1. requests that wait for a newer version are answered 503;
        2. the listener is closed, requests in flight are answered, connections are closed;
        3. the swap's thread ends, then the model's;
        4. the last report is written, with `ready` false.

        A bug in a thread stops the process too, and is raised here; if the device is lost, as DeviceError.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            mark = stack.enter_context(hold_server(self._deployment.state_dir, self._settings.slo))
            device = self._deployment.device
            batcher = stack.enter_context(Batcher(self._settings, self._bugs.append, mark, device))
            self._swap = VersionSwapper(
                self._deployment,
                self._settings.max_batch,
                self._metrics,
                on_swap=lambda: loop.call_soon_threadsafe(self._service.swapped),
                on_error=self._bugs.append,
            )
            self._shadow = Shadow(
                *(self._deployment, self._settings.shadow, self._settings.max_batch, self._metrics),
                served=lambda: self._swap.current,
                is_idle=lambda: batcher.is_idle,
                on_error=self._bugs.append,
            )
            self._service = Service(
                *(self._deployment, self._settings, self._swap, batcher, self._shadow, self._worker, self._bugs)
            )
            self._batcher = batcher
            self._overview = Overview(self._deployment, self._swap, self._settings.baseline, self._worker)
            app = build_app(self._service, self._settings, self._metrics, self._overview, self._report)
            http = HttpServer(app, self._settings, self._deployment.folder, shared=self._worker is not None)
            http.load()
            gc.freeze()  # a collection of all imported objects would block requests for a tenth of a second
            gc.enable()
            stack.enter_context(self._swap)
            stack.enter_context(self._shadow)
            log.info("serving %s on %s/v2/models/%s", self._deployment.name, self._address, self._deployment.name)
            await asyncio.gather(self._answer(stop, http), self._until(stop, http))
        self._write(msgspec.structs.replace(self._report(), ready=False, problems=[STOPPED]))
        if self._bugs:
            with device_errors():
                raise self._bugs[0]

    async def _answer(self, stop: threading.Event, http: HttpServer) -> None:
        """Answer requests; a worker without a version waits for its first while another worker serves."""
        while self._worker and self._worker.others_serve() and not (self._swap.current or stop.is_set() or self._bugs):
            await asyncio.sleep(_POLL_EVERY.total_seconds())
        await http.serve(self._listener)

    async def _until(self, stop: threading.Event, http: HttpServer) -> None:
        due = sample_due = 0.0
        reported: ServedVersion | None = None
        try:
            while not (stop.is_set() or self._bugs):
                now = time.monotonic()
                if now >= due or reported is not self._swap.current:
                    reported = self._swap.current
                    due = now + REPORT_EVERY.total_seconds()
                    await asyncio.to_thread(self._write, self._report())
                if now >= sample_due:
                    sample_due = now + REPORT_EVERY.total_seconds()
                    await asyncio.to_thread(self._overview.sample, self._report())
                await asyncio.sleep(_POLL_EVERY.total_seconds())
        finally:
            self._service.stop()
            http.stop()

    def _report(self) -> ServingReport:
        version = self._service.version
        request_p50, request_p99 = self._metrics.request_percentiles()
        freshness_p50, freshness_p99 = self._metrics.freshness_percentiles()
        problems = [
            *([] if version else ["no version can be served yet"]),
            *([self._batcher.problem] if self._batcher.problem else []),
            *self._swap.problems,
            *self._report_problems,
            *([self._deployment.device_problem] if self._deployment.device_problem else []),
        ]
        self._metrics.problems.set(len(problems))
        return ServingReport(
            pid=os.getpid(),
            started=self._started,
            time=time.time(),
            address=self._address,
            ready=version is not None,
            version=version.number if version else None,
            version_since=self._swap.since,
            trained_through=version.trained_through if version else "",
            swaps=self._metrics.swap_outcomes(),
            pinned=self._swap.state.pinned,
            refused=self._swap.refused,
            freshness_p50_seconds=freshness_p50,
            freshness_p99_seconds=freshness_p99,
            requests=self._metrics.requests(),
            requests_per_second=self._metrics.requests_per_second(),
            request_p50_seconds=request_p50,
            request_p99_seconds=request_p99,
            shadow=self._shadow.report,
            problems=problems,
        )

    def _write(self, report: ServingReport) -> None:
        try:
            if self._worker is not None:
                self._worker.write(report)
            else:
                write_report(self._deployment.state_dir, report)
            self._report_problems = []
        except OSError as exc:
            if not self._report_problems:
                log.warning("cannot write %s: %s", self._deployment.state_dir, exc)
            self._report_problems = [f"cannot write the report into {self._deployment.state_dir}: {exc.strerror}"]
