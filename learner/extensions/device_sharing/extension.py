"""Training leaves the device to requests: it yields between pieces of work, takes smaller ones, and counts the time."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from prometheus_client import Histogram
from torch import nn
from typing_extensions import override

from anabranch.learner.device.cpu_priority import can_restore, nice_level, step_back
from anabranch.learner.device.lease import Field, Servers, Slot, hold_learner
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.device_sharing.launches import LaunchLimiter, call_between_layers
from anabranch.learner.extensions.device_sharing.micro_batch_pacing import MicroBatchController, TrainingBudget
from anabranch.learner.settings.learner import RANK_TIMEOUT, DeviceSharingSettings
from anabranch.learner.settings.pipeline import ServedSettings
from anabranch.learner.status.report import DeviceSharingReport
from anabranch.learner.train.micro_batches import LaunchContext, StepHooks
from anabranch.learner.train.step_runner import StepRunner

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 1e-4, 1e-3
_POLL_FRACTION = 1 / 8
"""The interval of polls, as a part of the time that training has yielded."""
_LONGEST_SECONDS = 30.0
"""The longest stretch that training yields, so that it gets a micro-batch now and then in a flood of requests."""
_LONGEST_IN_STEP_SECONDS = RANK_TIMEOUT.total_seconds() / 10
"""The same over all passes of a step when there are other ranks: ranks of other hosts do not yield, wait at the end of
a pass, and receive nothing from this one until then."""
_LONGEST_WITHIN_SECONDS = 1.0
"""The same within one micro-batch in total: meanwhile the process handles no signal, and other ranks wait."""
_BACKGROUND_POLL_SECONDS = 5e-4
_LONGEST_CHUNK_SECONDS = 1.0
"""The longest that one chunk of a background thread waits, so that versions and checkpoints are made in a flood of
requests too."""
_INTERVAL_SECONDS = 0.5
_INTERVALS = 10
_MOST_WAITS = 4096

log = logging.getLogger(__name__)


class DeviceSharing(Extension):
    """Device sharing of one rank. Used by the training thread.

    On a CPU it also lets servers lower the priority of training while they run a batch; where the priority could not
    be raised again, it is lowered once, when the first server is seen.
    """

    name: ClassVar[str] = "device_sharing"

    def __init__(
        self,
        settings: DeviceSharingSettings,
        served: ServedSettings,
        servers: Servers,
        slot: Slot,
        device: torch.device,
        stop: threading.Event,
        waits: Histogram | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        """Take `fixed`, whether the size of micro-batches must not change."""
        self._runner: StepRunner | None = None
        self._rows_of_step: Callable[[], int] = int
        self._while_waiting: Callable[[], object] | None = None
        self._stop = stop
        self._settings, self._fixed = settings, fixed
        self._servers = servers
        self._slot = slot
        self._observed = waits
        self._launches = LaunchLimiter(device, within=settings.yield_at == "layer")
        # A request whose batch is not full yet keeps no CPU busy, but a device has to be empty when the batch comes.
        self._cpu = device.type == "cpu"
        self._field = Field.RUNNING if self._cpu else Field.WAITING
        self._scheduling: str | None = None
        self._restorable, self._usual = False, 0
        self._budget = TrainingBudget(settings.least)
        self._controller = MicroBatchController(served.slo.total_seconds())
        self._limit: int | None = None
        self._began: float | None = None
        self._trained = self._yielded = self._within = 0.0
        self._marks = deque([(0.0, 0.0)], maxlen=_INTERVALS)
        self._longest_in_step = self._left_in_step = float("inf")
        self._times, self._longest, self._since = 0, 0.0, 0
        self._waits: deque[float] = deque(maxlen=_MOST_WAITS)
        self._counts = (0, 0)
        self._due = self._refresh_due = 0.0

    def prepare(self, model: nn.Module, ranks: int) -> None:
        """Yield between the layers of a model too, where `device_sharing.yield_at` says so.

        `ranks`: how many train together.
        """
        if ranks > 1:
            self._longest_in_step = _LONGEST_IN_STEP_SECONDS
        if self._settings.yield_at == "layer":
            call_between_layers(model, self.yield_within_micro_batch)

    def begin(self, runner: StepRunner, rows_of_step: Callable[[], int], while_waiting: Callable[[], object]) -> None:
        """Set the size of micro-batches from now on.

        Args:
            runner: whose steps have `rows_of_step()` events on this rank.
            rows_of_step: may change with each step.
            while_waiting: called repeatedly while training yields, to show that it has not ended.
        """
        self._runner, self._rows_of_step, self._while_waiting = runner, rows_of_step, while_waiting

    def yield_to_serving(self, index: int) -> None:
        """Wait until no request needs the device, or it is training's turn.

        Called before each pass of the model over a micro-batch, with its index in the step.
        """
        if index == 0:
            self._left_in_step = self._longest_in_step
        self._within = _LONGEST_WITHIN_SECONDS
        self._launches.wait()
        self._yield(_LONGEST_SECONDS)

    def yield_within_micro_batch(self) -> None:
        """Do the same between layers within a micro-batch; called by the thread that runs the pass, one at a time."""
        before = self._yielded
        self._launches.wait_between_layers()
        self._yield(self._within)
        self._within -= self._yielded - before

    def _yield(self, longest: float) -> None:
        self._count()
        if time.monotonic() >= self._refresh_due:
            self._refresh()
        longest = min(longest, self._budget.left, self._left_in_step)
        if longest > 0 and not self._stop.is_set() and (since := self._servers.since(self._field)):
            self._wait(since, longest)
        self._began = time.monotonic()

    def pause(self) -> None:
        """Stop counting training time until the next micro-batch; called at step boundaries."""
        self._count()
        self._began = None

    @override
    def run_if_due(self) -> None:
        self.pause()
        if self._runner is None or time.monotonic() < self._due:
            return
        runner, rows = self._runner, self._rows_of_step()
        self._due = time.monotonic() + _INTERVAL_SECONDS
        counts = self._servers.total(Field.ANSWERED), self._servers.total(Field.LATE)
        answered, late = (max(0, now - before) for now, before in zip(counts, self._counts, strict=True))
        if not self._fixed:
            if runner.micro_batch_size != self._controller.rows:
                self._limit = runner.micro_batch_size  # by the config, or after running out of memory
            rows_now = self._controller.interval(min(rows, self._limit or rows), answered, late, self._longest)
            runner.micro_batch_size = rows_now or self._limit
        self._counts, self._longest = counts, 0.0
        self._slot[Field.ROWS] = runner.micro_batch_size or 0
        self._marks.append((self._trained, self._yielded))

    @override
    def report(self) -> Mapping[str, Any]:
        trained, yielded = (
            now - then for now, then in zip((self._trained, self._yielded), self._marks[0], strict=True)
        )
        report = DeviceSharingReport(
            policy=self._settings.policy,
            servers=self._servers.alive,
            training=trained / (trained + yielded) if trained + yielded else 1.0,
            times=self._times,
            yielded_seconds=self._yielded,
            wait_p99_seconds=float(np.percentile(self._waits, 99)) if self._waits else None,
            micro_batch_size=self._slot[Field.ROWS] or None,
            scheduling=self._scheduling,
        )
        return {"device_sharing": report}

    def _count(self) -> None:
        if self._began is not None:
            seconds = time.monotonic() - self._began
            self._trained += seconds
            self._budget.trained(seconds)

    def _refresh(self) -> None:
        """Map new servers; on a CPU let them set the priority of training, and restore it where one died in a batch."""
        self._refresh_due = time.monotonic() + _INTERVAL_SECONDS
        self._servers.refresh()
        if not self._cpu or not (self._servers.alive or self._slot[Field.PROCESS]):
            return
        if self._scheduling is None:
            nice, self._usual = nice_level(self._settings.least), os.getpriority(os.PRIO_PROCESS, 0)
            self._restorable = can_restore()
            self._scheduling = f"nice {nice} while a batch runs" if self._restorable else step_back(nice)
            log.info("training waits for serving: %s", self._scheduling)
        if self._restorable:
            self._slot.publish_threads(max(self._usual, nice_level(self._settings.least)), self._usual)
            if not self._servers.since(self._field):
                self._slot.set_level(Field.USUAL)

    def _wait(self, since: int, longest: float) -> None:
        self._launches.drain()
        begin = time.monotonic()
        self._slot[Field.YIELDING] = time.monotonic_ns()
        self._times += 1
        if since != self._since:
            self._record_wait(max(0.0, (self._slot[Field.YIELDING] - since) / 1e9))
        self._since = since
        while self._servers.since(self._field) and (waited := time.monotonic() - begin) < longest:
            if self._stop.wait(min(_LONGEST_POLL_SECONDS, max(_SHORTEST_POLL_SECONDS, waited * _POLL_FRACTION))):
                break
            if self._while_waiting is not None:
                self._while_waiting()
        self._slot[Field.YIELDING] = 0
        seconds = time.monotonic() - begin
        self._yielded += seconds
        self._left_in_step -= seconds
        self._budget.yielded(seconds)

    def _record_wait(self, wait: float) -> None:
        """Record how long it took to yield to a request, once per request."""
        self._longest = max(self._longest, wait)
        self._waits.append(wait)
        if self._observed is not None:
            self._observed.observe(wait)


def step_hooks(
    sharing: DeviceSharing | None, launch_context: LaunchContext, before_chunk: Callable[[], object] = bool
) -> StepHooks:
    """Return the hooks of a trainer that yields to serving before each pass of the model, if the device is shared."""
    return StepHooks(None if sharing is None else sharing.yield_to_serving, launch_context, before_chunk)


@contextlib.contextmanager
def device_sharing(
    settings: DeviceSharingSettings,
    served: ServedSettings,
    state_dir: Path,
    device: torch.device,
    stop: threading.Event,
    waits: Histogram | None = None,
    *,
    fixed: bool = False,
) -> Iterator[DeviceSharing | None]:
    """Yield the sharing of a device with the servers of a state directory; None where it is not shared.

    Once `stop` is set, training yields no more, so that it ends soon.
    """
    if settings.policy == "exclusive":
        yield None
        return
    servers = Servers(state_dir, served.timeout)
    try:
        with hold_learner(state_dir) as slot:
            yield DeviceSharing(settings, served, servers, slot, device, stop, waits, fixed=fixed)
    finally:
        servers.close()


class BackgroundYield:
    """Waits while a request needs the device. Any thread may call it; the training thread has `DeviceSharing`."""

    def __init__(self, servers: Servers, stop: threading.Event, longest: float = _LONGEST_CHUNK_SECONDS) -> None:
        """`servers` is read by nobody else; `longest`: seconds that a call waits at most."""
        self._servers = servers
        self._stop = stop
        self._longest = longest
        self._refresh_due = 0.0
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self) -> None:
        """Return once no request waits, or the learner stops, or the call has waited long enough."""
        end = time.monotonic() + self._longest
        while self._a_request_waits() and time.monotonic() < end:
            if self._stop.wait(_BACKGROUND_POLL_SECONDS):
                return

    def close(self) -> None:
        """Unmap the marks of the servers; a thread that still calls this waits for no request any more."""
        with self._lock:
            self._closed = True
            self._servers.close()

    def _a_request_waits(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            if time.monotonic() >= self._refresh_due:
                self._refresh_due = time.monotonic() + _INTERVAL_SECONDS
                self._servers.refresh()
            return bool(self._servers.since(Field.WAITING))


@contextlib.contextmanager
def background_yield(
    settings: DeviceSharingSettings,
    served: ServedSettings,
    state_dir: Path,
    device: torch.device,
    stop: threading.Event,
) -> Iterator[Callable[[], object]]:
    """Yield what background threads call before each chunk of work on the device.

    It does nothing where the device is not shared, or is a CPU, whose cores the kernel gives to serving.
    """
    if settings.policy == "exclusive" or device.type == "cpu":
        yield bool
        return
    servers = Servers(state_dir, served.timeout)
    background = BackgroundYield(servers, stop)
    try:
        yield background
    finally:
        background.close()
