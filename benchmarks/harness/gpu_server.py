"""A server's batcher and swapper in a process, without HTTP: requests are calls at times that are fixed in advance.

A request's time begins at its arrival, whether or not the process was free then.
"""

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from torch import Tensor

from anabranch.learner.device.lease import hold_server
from anabranch.learner.model.factory import build_model
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Manifest, Verdict, Versions, reference_to
from anabranch.serving.inference.batcher import Batcher
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.rollout.hot_swap import VersionSwapper
from anabranch.serving.settings import ServingSettings
from benchmarks.harness.gpu_learner import NAME, ROOT, SLO
from benchmarks.harness.gpu_models import Workload

_PATIENCE_SECONDS = 600.0
_FIRST_SECONDS = 300.0
_KEPT = 5


class VersionWriter:
    """Publishes versions that differ in one weight, as a learner would."""

    def __init__(self, workload: Workload, state_dir: Path) -> None:
        self._workload = workload
        self._versions = Versions(state_dir / "versions")
        model = workload.model
        self._weights: dict[str, Tensor] = build_model(model.factory, model.args, ROOT).state_dict()
        self._number = 0

    def publish(self) -> None:
        """Publish one more version, and delete an old one."""
        self._number += 1
        with torch.no_grad():
            next(iter(self._weights.values())).mul_(0.999)
        progress = PartitionProgress(self._number, incarnation=0, time_ms=int(time.time() * 1000))
        manifest = Manifest(
            number=self._number,
            generation=1,
            parent=self._number - 1 or None,
            time=time.time(),
            step=self._number,
            trained_through={"events:0": progress},
            metrics={},
            schema=self._workload.schema.digest,
            encoders={},
            model=reference_to(self._workload.model),
            files={},
        )
        self._versions.write(self._weights, manifest, Verdict("pass"))
        self._versions.delete(self._number - _KEPT)


@dataclass(frozen=True)
class Answers:
    """The results of a turn.

    Attributes:
        seconds: from the arrival of each request to its answer.
        busy: fraction of the turn in which the model ran.
        versions: that answered.
    """

    seconds: NDArray[np.float64]
    busy: float
    versions: int

    def percentile(self, q: float) -> float:
        """Return a percentile of the seconds."""
        return float(np.percentile(self.seconds, q))


class ServerProcess:
    """A server in a process, which answers in turns; ends with the context."""

    def __init__(self, workload: Workload, state_dir: Path, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(workload, state_dir, device, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # it may not answer, or there may be no time left
            self._process.kill()
        with contextlib.suppress(OSError):  # a forked process has this end too, and reads no end of file
            self._ours.send(None)
        self._ours.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()

    def begin(self, rate: float, seconds: float) -> None:
        """Answer `rate` requests a second for some seconds."""
        self._ours.send((rate, seconds))

    def end(self) -> Answers:
        """Return the answers of the turn that began."""
        if not self._ours.poll(_PATIENCE_SECONDS):
            raise SystemExit("the server does not answer")
        try:
            answers = self._ours.recv()
        except EOFError:
            raise SystemExit("the server ended; its error is above") from None
        assert isinstance(answers, Answers)
        return answers

    def turn(self, rate: float, seconds: float) -> Answers:
        """Answer requests, and return the answers."""
        self.begin(rate, seconds)
        return self.end()


class _Server:
    """Runs in the server's process."""

    def __init__(self, workload: Workload, state_dir: Path, device: str) -> None:
        name = device if device == "cpu" else "cuda"
        self._deployment = Deployment(NAME, workload.schema, workload.model, ROOT, state_dir, torch.device(name))
        self._settings = ServingSettings.model_validate({"max_delay": "1ms"})
        self._features = {"x": np.zeros((1, *workload.shape), workload.dtype)}
        self.busy = 0.0
        self._errors: list[BaseException] = []

    async def serve(self, connection: Connection) -> None:
        swapper = VersionSwapper(
            self._deployment,
            self._settings.max_batch,
            ServingMetrics(CollectorRegistry()),
            lambda: None,
            self._errors.append,
        )
        loop = asyncio.get_running_loop()
        with (
            hold_server(self._deployment.state_dir, SLO) as mark,
            swapper,
            Batcher(self._settings, self._errors.append, mark) as batcher,
        ):
            while (command := await loop.run_in_executor(None, _received, connection)) is not None:
                connection.send(await self._turn(swapper, batcher, *command))

    async def _turn(self, swapper: VersionSwapper, batcher: Batcher, rate: float, seconds: float) -> Answers:
        end = time.monotonic() + _FIRST_SECONDS
        while swapper.current is None:
            if self._errors or time.monotonic() > end:
                raise SystemExit(f"no version is served: {swapper.problems} {self._errors}")
            await asyncio.sleep(0.01)
        begin, busy = time.perf_counter() + 0.05, self.busy
        times, versions, tasks = list[float](), set[int](), list[asyncio.Task[None]]()
        for index in range(max(1, int(rate * seconds))):
            arrival = begin + index / rate
            if (wait := arrival - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self._answer(swapper, batcher, arrival, times, versions)))
        await asyncio.gather(*tasks)
        part = (self.busy - busy) / (time.perf_counter() - begin)
        return Answers(np.array(times), part, len(versions))

    async def _answer(
        self, swapper: VersionSwapper, batcher: Batcher, arrival: float, times: list[float], versions: set[int]
    ) -> None:
        version = swapper.current
        assert version is not None
        await batcher.predict(version, self._features, 1)
        times.append(time.perf_counter() - arrival)
        versions.add(version.number)


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _serve(workload: Workload, state_dir: Path, device: str, connection: Connection) -> None:
    server = _Server(workload, state_dir, device)
    run = ServedVersion.run

    def timed(version: ServedVersion, features: Mapping[str, Any], embed: bool = False) -> dict[str, Any]:
        begin = time.perf_counter()
        try:
            return run(version, features, embed)
        finally:
            if threading.current_thread().name == "serving-model":  # not the swapper's, which warms versions up
                server.busy += time.perf_counter() - begin

    ServedVersion.run = timed  # type: ignore[method-assign]
    try:
        asyncio.run(server.serve(connection))
    finally:
        connection.close()
