"""The serving process: its parts, its start, and the order of its stop."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta

import msgspec
import prometheus_client
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.errors import SettingsError
from anabranch.core.tracing.spans import tracing
from anabranch.learner.device.lease import hold_server
from anabranch.learner.object_storage.fleet import server_id
from anabranch.serving.dashboard.status import Overview
from anabranch.serving.fleet.host import FleetHost, refuse_learners_directory
from anabranch.serving.http.app import build_app
from anabranch.serving.http.listening_socket import address_of, listen_patiently
from anabranch.serving.http.request_body import BodyReader
from anabranch.serving.http.server import HttpServer, limited_lines
from anabranch.serving.inference.batcher import Batcher
from anabranch.serving.inference.service import Service
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.device import device_errors, use_device, use_precision
from anabranch.serving.reporting.report import STOPPED, ServingReport, read_report, write_report
from anabranch.serving.reporting.worker_pool import PoolWorker
from anabranch.serving.rollout.hot_swap import VersionSwapper
from anabranch.serving.settings import ServingSettings
from anabranch.serving.transports import answer_log, answer_stream, grpc_server

log = logging.getLogger("anabranch.serving")

REPORT_EVERY = timedelta(seconds=1)
_POLL_EVERY = timedelta(milliseconds=50)
_NEW_OBJECTS = 10_000
"""New objects that are not freed, after which the garbage collector runs. Requests leave it none, and those of 64
clients at once have thousands: by Python's 700 it went over those in progress up to 160 times a second."""


def serve(
    deployment: Deployment,
    settings: ServingSettings,
    stop: threading.Event,
    worker: PoolWorker | None = None,
    listener: socket.socket | None = None,
    patience: timedelta = timedelta(0),
) -> None:
    """Answer requests until `stop` is set. Called in the main thread; signal handlers are not changed.

    Args:
        deployment: what is served.
        settings: how it is served.
        stop: ends it.
        worker: this process, if it is one of several; None otherwise.
        listener: the socket that the workers share.
        patience: how long to wait for a port that is taken.

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
    with listener or listen_patiently(settings.host, settings.port, patience) as socket_, limited_lines():
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
        self._id = server_id(listener.getsockname()[1])
        self._metrics = worker.metrics() if worker else ServingMetrics(CollectorRegistry())
        self._started = time.time()
        self._bugs: list[BaseException] = []
        self._report_problems: list[str] = []
        self._fleet: FleetHost | None = None
        self._stopped = asyncio.Event()
        self._grpc_address = ""

    async def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, then stop in this order, after `serving.drain` within the time of a request:

        1. for `serving.drain`, all is answered as before, but for the question whether the server is ready;
        2. requests that wait for a newer version are answered 503;
        3. the listener is closed, requests in flight are answered, connections are closed; messages that were read are
           answered, and the consumer group is left;
        4. the swap's thread ends, then the model's; the log of answers is written;
        5. the last report is written, with `ready` false.

        A bug in a thread stops the process too, and is raised here; if the device is lost, as DeviceError.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            stack.enter_context(self._tracing())
            mark = stack.enter_context(hold_server(self._deployment.state_dir, self._settings.slo))
            device, waited = self._deployment.device, self._metrics.queue_wait.inc
            batcher = stack.enter_context(Batcher(self._settings, self._bugs.append, mark, device, waited))
            self._swap = VersionSwapper(
                self._deployment,
                self._settings.max_batch,
                self._metrics,
                on_swap=lambda: loop.call_soon_threadsafe(self._service.swapped),
                on_error=self._bugs.append,
                server=self._id,
                is_idle=lambda: batcher.is_idle,
            )
            self._service = Service(
                self._deployment, self._settings, self._swap, batcher, self._metrics, self._bugs, self._worker
            )
            self._batcher = batcher
            baseline, links = self._settings.baseline, self._settings.links
            self._overview = Overview(self._deployment, self._swap, baseline, self._worker, links)
            bodies = BodyReader(self._settings)
            app = build_app(self._service, self._settings, self._metrics, self._overview, self._report, bodies)
            http = HttpServer(app, self._settings, self._deployment.folder, shared=self._worker is not None)
            http.load()
            self._calls = grpc_server(self._service, self._settings, self._metrics, bodies, self._deployment.folder)
            name = self._id if self._worker is None else f"{self._id}-{self._worker.number}"
            self._answers = answer_stream(
                self._deployment, self._settings, self._service, self._metrics, self._bugs.append, name
            )
            self._log = answer_log(self._deployment, self._settings, self._metrics, name)
            if self._log is not None:
                self._service.log_answer = self._log.add
                self._log.start()
                stack.callback(self._log.stop)
            stack.enter_context(_short_and_rare_collections())
            if self._worker is None or self._worker.acts_for_all:
                self._fleet = self._fleet_host()
            if self._fleet is not None:
                stack.enter_context(self._fleet)
            stack.enter_context(self._swap)
            stack.enter_context(self._service.shadow)
            log.info("serving %s on %s/v2/models/%s", self._deployment.name, self._address, self._deployment.name)
            await asyncio.gather(
                self._answer(stop, http),
                self._answer_calls(stop),
                self._answer_messages(),
                self._until(stop, http),
            )
        self._write(msgspec.structs.replace(self._report(), ready=False, problems=[STOPPED]))
        if self._bugs:
            with device_errors():
                raise self._bugs[0]

    def _tracing(self) -> AbstractContextManager[None]:
        deployment, left_out = self._deployment, self._metrics.tracing_left_out
        return tracing(
            deployment.tracing, "serving", deployment.folder, lambda reason, count: left_out.labels(reason).inc(count)
        )

    async def _answer(self, stop: threading.Event, http: HttpServer) -> None:
        await self._may_answer(stop)
        await http.serve(self._listener)

    async def _answer_calls(self, stop: threading.Event) -> None:
        if self._calls is not None:
            await self._may_answer(stop)
            self._grpc_address = await self._calls.start()
            await self._stopped.wait()
            await self._calls.stop()

    async def _answer_messages(self) -> None:
        if self._answers is not None:
            self._answers.start()
            await self._stopped.wait()
            await asyncio.to_thread(self._answers.stop)

    async def _may_answer(self, stop: threading.Event) -> None:
        """A worker without a version waits for its first while another worker serves."""
        while self._worker and self._worker.others_serve() and not (self._swap.current or stop.is_set() or self._bugs):
            await asyncio.sleep(_POLL_EVERY.total_seconds())

    async def _until(self, stop: threading.Event, http: HttpServer) -> None:
        due = sample_due = 0.0
        end: float | None = None
        reported: object = None
        try:
            while not self._bugs:
                now = time.monotonic()
                if stop.is_set() and end is None:
                    end, due = now + self._settings.drain.total_seconds(), 0.0
                    self._service.draining = True
                if end is not None and now >= end:
                    break
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
            self._stopped.set()

    def _report(self) -> ServingReport:
        version = self._service.version
        request_p50, request_p99 = self._metrics.request_percentiles()
        freshness_p50, freshness_p99 = self._metrics.freshness_percentiles()
        problems = [
            *([] if version else ["no version can be served yet"]),
            *([self._batcher.problem] if self._batcher.problem else []),
            *self._swap.problems,
            *(self._fleet.problems if self._fleet is not None else []),
            *(self._answers.problems.values() if self._answers is not None else []),
            *([self._log.problem] if self._log is not None and self._log.problem else []),
            *self._report_problems,
            *([self._deployment.device_problem] if self._deployment.device_problem else []),
        ]
        self._metrics.problems.set(len(problems))
        lag = self._fleet.lag_seconds if self._fleet is not None else None
        self._metrics.follow_lag.set(lag or 0.0)
        return ServingReport(
            pid=os.getpid(),
            started=self._started,
            time=time.time(),
            address=self._address,
            grpc_address=self._grpc_address,
            ready=version is not None and not self._service.draining,
            version=version.number if version else None,
            version_since=self._swap.since,
            trained_through=version.trained_through if version else "",
            swaps=self._metrics.swap_outcomes(),
            pinned=self._swap.state.pinned,
            refused=self._swap.refused,
            freshness_p50_seconds=freshness_p50,
            freshness_p99_seconds=freshness_p99,
            requests=self._metrics.requests(),
            answered=dict(self._service.answered),
            requests_per_second=self._metrics.requests_per_second(),
            request_p50_seconds=request_p50,
            request_p99_seconds=request_p99,
            shadow=self._service.shadow.report,
            stream=self._answers.report() if self._answers is not None else None,
            log=self._log.report() if self._log is not None else None,
            server=self._fleet.server if self._fleet is not None else None,
            follow_lag_seconds=lag,
            skew=dict(self._service.skew.psi),
            warnings=list(self._service.skew.warnings),
            model_problem=self._batcher.problem,
            problems=problems,
        )

    def _fleet_host(self) -> FleetHost | None:
        deployment, storage = self._deployment, self._deployment.storage
        if storage is None:
            return None
        refuse_learners_directory(deployment.state_dir, storage)
        return FleetHost(
            storage,
            deployment.versions,
            self._id,
            self._settings.slo,
            lambda: read_report(deployment.state_dir),
            self._bugs.append,
            lambda: bool(self._bugs),
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


@contextlib.contextmanager
def _short_and_rare_collections() -> Iterator[None]:
    """Collect garbage, but not often, and only among objects that are made from now on."""
    gc.freeze()  # a collection of all imported objects would block requests for a tenth of a second
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    gc.enable()
    try:
        yield
    finally:
        gc.set_threshold(*before)
