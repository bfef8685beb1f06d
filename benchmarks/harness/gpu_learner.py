"""A whole learner in a process, over events in memory, and the plain loop that it is compared with.

The learner is the product's own, with its store, publisher and checkpoints; its source is a pool of events in the same
process, so that neither a broker nor an ingest process is needed. Between turns the source has no events, and the
learner waits for some.
"""

import multiprocessing
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional

from anabranch.ingest.events.block import Array, Block, BlockLayout, Coverage, Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.assembly import learn
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.factory import build_on_device
from anabranch.learner.settings.learner import (
    CheckpointSettings,
    DeviceSharingSettings,
    LearnerSettings,
    VersionsSettings,
)
from anabranch.learner.settings.pipeline import PipelineSettings, ServedSettings
from anabranch.learner.train.optimizers import build_optimizer
from anabranch.replay.row_layout import RowLayout
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.tiers.memory import MemoryTier
from benchmarks.harness.gpu_models import CLASSES, Workload

NAME = "gpu"
SLO = timedelta(milliseconds=20)
ROOT = Path(__file__).resolve().parents[2]
_HELD_OUT = 100
"""One event of so many is held out, as `gate.holdout_fraction` is by default."""
_POOL_BATCHES = 8
_PATIENCE_SECONDS = 600.0
_ROOM = 1.3


@dataclass(frozen=True)
class Saving:
    """How often the learner publishes and checkpoints, in seconds."""

    publish: float = 3600.0
    checkpoint: float = 3600.0


def spec_of(workload: Workload, state_dir: Path, device: str, saving: Saving, policy: str) -> PipelineSettings:
    """Return the settings of the learner: the defaults, but for what the workload names."""
    row_bytes = RowLayout(workload.schema.payload()).row_bytes
    learner = {
        "batch_size": workload.batch_size,
        "device": device,
        "max_grad_norm": float("inf"),
        "status": "127.0.0.1:0",
        "max_delay": "1s",
    }
    replay = {"capacity": workload.stored, "device_bytes": int(_ROOM * workload.stored * row_bytes) + 1_000_000}
    spec = PipelineSettings(
        name=NAME,
        state_dir=state_dir,
        stream=StreamSettings(topics=("events",)),
        schema=workload.events,
        model=workload.model,
        learner=LearnerSettings.model_validate(learner),
        replay=ReplaySettings.model_validate(replay),
        versions=VersionsSettings(publish_every=timedelta(seconds=saving.publish)),
        checkpoints=CheckpointSettings(every=timedelta(seconds=saving.checkpoint)),
        device_sharing=DeviceSharingSettings.model_validate({"policy": policy}),
        serving=ServedSettings(slo=SLO),
    )
    return spec.below(ROOT)


def pool_of(workload: Workload, rows: int) -> dict[str, Array]:
    """Return made-up events, `x` and `y`."""
    generator = np.random.default_rng(0)
    shape = (rows, *workload.shape)
    whole = workload.dtype == "uint8"
    x = generator.integers(0, 256, shape, np.uint8) if whole else generator.standard_normal(shape, np.float32)
    return {"x": x, "y": generator.integers(0, CLASSES, rows)}


@dataclass
class MemorySource:
    """Plays `BlockReader`: blocks of one step each while a turn runs, and otherwise none."""

    workload: Workload
    running: threading.Event = field(default_factory=threading.Event)
    polled: deque[float] = field(default_factory=deque)
    """When each block was taken, by `time.perf_counter`."""
    problem: str | None = None
    ends_time: float | None = None
    reads_history = False
    history: None = None
    unknown_fields = overweight = 0
    local: tuple[()] = ()

    def __post_init__(self) -> None:
        self.letters_dropped: Counter[str] = Counter()
        self.tombstones: Counter[str] = Counter()
        self._rows = self.workload.batch_size + max(1, self.workload.batch_size // _HELD_OUT)
        pool = pool_of(self.workload, _POOL_BATCHES * self._rows)
        self._blocks = [self._block(pool, index * self._rows) for index in range(_POOL_BATCHES)]
        self._next = 0
        self.partitions = [Partition(TopicPartition("events", 0), 0, None)]

    def _block(self, pool: Mapping[str, Array], begin: int) -> dict[str, Array]:
        columns = BlockLayout(self.workload.schema).empty(self._rows)
        columns["labelled"][:] = True
        columns["weight"][:] = 1
        columns["label"][:] = pool["y"][begin : begin + self._rows]
        columns["feature.x"][:] = pool["x"][begin : begin + self._rows]
        columns["outcome"][self.workload.batch_size :] = Outcome.HELD_OUT
        return columns

    def poll(self, timeout: timedelta) -> Block | None:
        if not self.running.wait(timeout.total_seconds()):
            return None
        begin, self._next = self._next, self._next + self._rows
        columns = dict(self._blocks[begin // self._rows % _POOL_BATCHES])
        columns["offset"] = np.arange(begin, begin + self._rows)
        columns["time_ms"] = np.full(self._rows, int(time.time() * 1000))
        columns["outcome"] = columns["outcome"].copy()
        columns["reason"] = columns["reason"].copy()
        self.polled.append(time.perf_counter())
        return Block(columns, (Coverage(0, begin, begin + self._rows),))

    def _ignore(self, *_args: Any, **_kwargs: Any) -> None:
        """There is neither a broker nor a process."""

    open = close = receive = release = commit = pause = resume = pass_over = _ignore


class LearnerProcess:
    """A learner in a process, which trains in turns; ends with the context."""

    def __init__(
        self,
        workload: Workload,
        state_dir: Path,
        device: str,
        saving: Saving = Saving(),
        policy: str = "exclusive",
    ) -> None:
        self.state_dir = state_dir
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        arguments = (workload, state_dir, device, saving, policy, theirs)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "LearnerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # it may not answer, or there may be no time left
            self._process.kill()
        with suppress(OSError):  # a forked process has this end too, and reads no end of file
            self._ours.send(None)
        self._ours.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()

    def begin(self, warm_up: float, seconds: float) -> None:
        """Train for `warm_up`, then for `seconds`, which are measured."""
        self._ours.send((warm_up, seconds))

    def end(self) -> float:
        """Return the steps a second of the turn that began."""
        return float(self._answer())

    def turn(self, warm_up: float, seconds: float) -> float:
        """Train, and return the steps a second."""
        self.begin(warm_up, seconds)
        return self.end()

    def memory(self) -> tuple[int, int]:
        """Return the most bytes of device memory that tensors took, without the store, and the model's parameters."""
        self._ours.send("memory")
        most, parameters = self._answer()
        return most, parameters

    def _answer(self) -> Any:
        if not self._ours.poll(_PATIENCE_SECONDS):
            raise SystemExit("the learner does not answer")
        try:
            answer = self._ours.recv()
        except EOFError:
            raise SystemExit("the learner ended; its error is above") from None
        return answer


def _serve(
    workload: Workload, state_dir: Path, device: str, saving: Saving, policy: str, connection: Connection
) -> None:
    source, stop, tiers = MemorySource(workload), threading.Event(), list[MemoryTier]()
    allocate = MemoryTier.__init__

    def recorded(tier: MemoryTier, *arguments: Any, **named: Any) -> None:
        allocate(tier, *arguments, **named)
        tiers.append(tier)

    MemoryTier.__init__ = recorded  # type: ignore[method-assign]
    control = (source, workload, device, tiers, connection, stop)
    threading.Thread(target=_control, args=control, daemon=True).start()
    try:
        learn(spec_of(workload, state_dir, device, saving, policy), stop, source=cast("BlockReader", source))
    finally:
        connection.close()


def _control(
    source: MemorySource,
    workload: Workload,
    device: str,
    tiers: Sequence[MemoryTier],
    connection: Connection,
    stop: threading.Event,
) -> None:
    """Answer the commands of the benchmark, until its None or its end."""
    try:
        while (command := connection.recv()) is not None:
            if command == "memory":
                most = torch.cuda.max_memory_allocated() if device != "cpu" else 0
                store = sum(tier.slots * tier.slot_bytes for tier in tiers)
                connection.send((max(0, most - store), _parameters(workload)))
            else:
                connection.send(_turn(source, *command))
    except (EOFError, OSError):
        pass
    stop.set()


def _parameters(workload: Workload) -> int:
    model = build_on_device(workload.model, ROOT, torch.device("cpu"))
    return sum(weight.numel() for weight in model.parameters())


def _turn(source: MemorySource, warm_up: float, seconds: float) -> float:
    """Let the learner train, and return the steps a second between the first and the last block of the turn.

    It takes one block a step; the first, which may wait for the build of the learner, begins the warm-up. A turn ends
    after its second block at the earliest.
    """
    source.polled.clear()
    source.running.set()
    while not source.polled:
        time.sleep(0.001)
    time.sleep(warm_up)
    source.polled.clear()
    time.sleep(seconds)
    while len(source.polled) < 2:
        time.sleep(0.001)
    source.running.clear()
    time.sleep(0.2)  # until the last step has ended, and no block is taken any more
    times = list(source.polled)
    return (len(times) - 1) / (times[-1] - times[0])


class PlainLoop:
    """A plain PyTorch loop with the learner's model, optimizer, precision and numbers of events.

    New events come from pinned memory, old ones from a pool on the device. The loop never waits for the device, except
    at the end of a turn.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        settings = LearnerSettings()
        self._device, self._rows = device, workload.batch_size
        self._model = build_on_device(workload.model, ROOT, device).train()
        self._optimizer = build_optimizer(settings.optimizer, self._model.parameters())
        self._precision = choose_precision(settings.precision, device)
        pool = pool_of(workload, max(workload.stored, _POOL_BATCHES * self._rows))
        self._x, self._y = (torch.from_numpy(pool[name]) for name in ("x", "y"))
        self._old_x, self._old_y = self._x.to(device), self._y.to(device)
        if device.type == "cuda":
            self._x, self._y = self._x.pin_memory(), self._y.pin_memory()
        self._next = 0

    def turn(self, warm_up: float, seconds: float) -> float:
        """Train, and return the steps a second."""
        self._train(warm_up)
        begin = time.perf_counter()
        steps = self._train(seconds)
        return steps / (time.perf_counter() - begin)

    def _train(self, seconds: float) -> int:
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            self._step()
            steps += 1
            if not steps % 8:
                self._synchronize()  # otherwise thousands of steps are queued at the end
        self._synchronize()
        return steps

    def _step(self) -> None:
        begin = self._next = (self._next + self._rows) % (len(self._x) - self._rows)
        new = slice(begin, begin + self._rows)
        x, y = (each[new].to(self._device, non_blocking=True) for each in (self._x, self._y))
        old = torch.randint(len(self._old_x), (self._rows,), device=self._device)
        x, y = torch.cat([x, self._old_x[old]]), torch.cat([y, self._old_y[old]])
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision.autocast(self._device):
            output = self._model(x)
        functional.cross_entropy(output.float(), y).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def plain_loop(workload: Workload, device: torch.device) -> Iterator[PlainLoop]:
    """A plain loop, whose memory is released with the context."""
    loop = PlainLoop(workload, device)
    yield loop
    del loop
    if device.type == "cuda":
        torch.cuda.empty_cache()
