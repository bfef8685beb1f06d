"""The learner's side of device sharing: it gives way to requests at borders of its work, and counts what that costs."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from prometheus_client import Histogram

from learner.config import DeviceSharingSettings
from learner.device_sharing.cpu_priority import nice_level, step_back
from learner.device_sharing.launch_depth import Ahead
from learner.device_sharing.layer_hooks import look_between_layers
from learner.device_sharing.lease import Field, Servers, Slot, hold_learner
from learner.device_sharing.micro_batch_pacing import Allowance, Pace
from learner.distributed.process_group import SILENCE
from learner.state_dir.report import DeviceSharingReport
from learner.training.trainer import Trainer

_LOOK_SECONDS = 1e-4
_LONGEST_SECONDS = 30.0
"""Training gives way for so long at a stretch, so that it gets a micro-batch now and then in a flood of requests."""
_LONGEST_IN_PASS_SECONDS = SILENCE.total_seconds() / 10
"""The same in all micro-batches of a pass where there are other ranks: those of other hosts give way to nobody, wait at
its end, and hear nothing of this one until then."""
_LONGEST_WITHIN_SECONDS = 1.0
"""The same within a micro-batch, all in all: meanwhile the process hears no signal, and other ranks wait in theirs."""
_INTERVAL_SECONDS = 0.5
_INTERVALS = 10
_MOST_WAITS = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """On which a learner shares its device with serving."""

    settings: DeviceSharingSettings
    slo: timedelta
    """The 99th percentile of the time that an answer may take."""
    patience: timedelta
    """A request that waits for longer is of a server that hangs."""
    fixed: bool = False
    """Whether the size of micro-batches is not to be changed."""


class DeviceSharing:
    """One rank's. Used by the thread that trains.

    On a CPU the kernel takes cores away from training besides, once there has been a server: at `step_back`.
    """

    def __init__(
        self,
        terms: Terms,
        servers: Servers,
        slot: Slot,
        device: torch.device,
        stop: threading.Event,
        waits: Histogram | None = None,
    ) -> None:
        self.while_waiting: Callable[[], None] | None = None
        """Called again and again while training gives way: others want to hear that it has not ended."""
        self._stop = stop
        self._terms = terms
        self._servers = servers
        self._slot = slot
        self._observed = waits
        self._ahead = Ahead(device)
        # A request whose batch is not full yet keeps no CPU busy, but a device has to be empty when the batch comes.
        self._cpu = device.type == "cpu"
        self._field = Field.RUNNING if self._cpu else Field.WAITING
        self._scheduling: str | None = None
        self._allowance = Allowance(terms.settings.least)
        self._pace = Pace(terms.slo.total_seconds())
        self._limit: int | None = None
        self._began: float | None = None
        self._trained = self._yielded = self._within = 0.0
        self._marks = deque([(0.0, 0.0)], maxlen=_INTERVALS)
        self._longest_in_pass = self._left_in_pass = float("inf")
        self._times, self._longest, self._since = 0, 0.0, 0
        self._waits: deque[float] = deque(maxlen=_MOST_WAITS)
        self._counts = (0, 0)
        self._due = self._look_due = 0.0

    def attend(self, trainer: Trainer, ranks: int) -> None:
        """Have a trainer give way, where the settings say; `ranks`: how many train together."""
        if ranks > 1:
            self._longest_in_pass = _LONGEST_IN_PASS_SECONDS
        trainer.give_way = self.give_way
        if self._terms.settings.yield_at == "layer":
            look_between_layers(trainer.model, self.give_way_within)

    def give_way(self, place: int) -> None:
        """Return when no request needs the device, or it is training's turn.

        Called before each micro-batch of a pass, of which it is the one at `place`.
        """
        if place == 0:
            self._left_in_pass = self._longest_in_pass
        self._within = _LONGEST_WITHIN_SECONDS
        self._give_way(_LONGEST_SECONDS)

    def give_way_within(self) -> None:
        """Do the same at a border within a micro-batch; by whatever thread goes through it, one at a time."""
        before = self._yielded
        self._give_way(self._within)
        self._within -= self._yielded - before

    def _give_way(self, longest: float) -> None:
        self._ahead.wait()
        self._count()
        if time.monotonic() >= self._look_due:
            self._look()
        longest = min(longest, self._allowance.left, self._left_in_pass)
        if longest > 0 and not self._stop.is_set() and (since := self._servers.since(self._field)):
            self._wait(since, longest)
        self._began = time.monotonic()

    def pause(self) -> None:
        """Note that no step is on; called at step boundaries."""
        self._count()
        self._began = None

    def steer(self, trainer: Trainer, rows: int) -> None:
        """Set the size of micro-batches, twice a second; called at step boundaries.

        Args:
            trainer: whose size is set, unless the terms say that it is fixed.
            rows: events of a step on this rank.
        """
        self.pause()
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _INTERVAL_SECONDS
        counts = self._servers.total(Field.ANSWERED), self._servers.total(Field.LATE)
        answered, late = (max(0, now - before) for now, before in zip(counts, self._counts, strict=True))
        if not self._terms.fixed:
            if trainer.micro_batch_size != self._pace.rows:
                self._limit = trainer.micro_batch_size  # by the config, or for want of memory
            paced = self._pace.interval(min(rows, self._limit or rows), answered, late, self._longest)
            trainer.micro_batch_size = paced or self._limit
        self._counts, self._longest = counts, 0.0
        self._slot[Field.ROWS] = trainer.micro_batch_size or 0
        self._marks.append((self._trained, self._yielded))

    @property
    def report(self) -> DeviceSharingReport:
        """What is to be told of it."""
        trained, yielded = (
            now - then for now, then in zip((self._trained, self._yielded), self._marks[0], strict=True)
        )
        return DeviceSharingReport(
            policy=self._terms.settings.policy,
            servers=self._servers.alive,
            training=trained / (trained + yielded) if trained + yielded else 1.0,
            times=self._times,
            yielded_seconds=self._yielded,
            wait_p99_seconds=float(np.percentile(self._waits, 99)) if self._waits else None,
            micro_batch_size=self._slot[Field.ROWS] or None,
            scheduling=self._scheduling,
        )

    def _count(self) -> None:
        if self._began is not None:
            seconds = time.monotonic() - self._began
            self._trained += seconds
            self._allowance.trained(seconds)

    def _look(self) -> None:
        """Look for servers that have come, and on a CPU step back for the first one."""
        self._look_due = time.monotonic() + _INTERVAL_SECONDS
        self._servers.refresh()
        if self._cpu and self._scheduling is None and self._servers.alive:
            self._scheduling = step_back(nice_level(self._terms.settings.least))
            log.info("training waits for serving: %s", self._scheduling)

    def _wait(self, since: int, longest: float) -> None:
        self._ahead.drain()
        begin = time.monotonic()
        self._slot[Field.YIELDING] = time.monotonic_ns()
        self._times += 1
        if since != self._since:
            self._note(max(0.0, (self._slot[Field.YIELDING] - since) / 1e9))
        self._since = since
        while self._servers.since(self._field) and time.monotonic() - begin < longest:
            if self._stop.wait(_LOOK_SECONDS):
                break
            if self.while_waiting is not None:
                self.while_waiting()
        self._slot[Field.YIELDING] = 0
        seconds = time.monotonic() - begin
        self._yielded += seconds
        self._left_in_pass -= seconds
        self._allowance.gave_way(seconds)

    def _note(self, wait: float) -> None:
        """Take note of how long it took to give way to a request, once for each."""
        self._longest = max(self._longest, wait)
        self._waits.append(wait)
        if self._observed is not None:
            self._observed.observe(wait)


@contextlib.contextmanager
def device_sharing(
    terms: Terms, state_dir: Path, device: torch.device, stop: threading.Event, waits: Histogram | None = None
) -> Iterator[DeviceSharing | None]:
    """Share the device with the servers of a state directory; None: it is not shared.

    Once `stop` is set training gives way no more, so that it comes to its end.
    """
    if terms.settings.policy == "exclusive":
        yield None
        return
    servers = Servers(state_dir, terms.patience)
    try:
        with hold_learner(state_dir) as slot:
            yield DeviceSharing(terms, servers, slot, device, stop, waits)
    finally:
        servers.close()
