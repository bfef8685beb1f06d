"""Replaces torch.cuda on a CPU, records streams, events and copies, and checks their order.

Tensors of a "CUDA" device are CPU tensors with a recorded device: code under test takes its CUDA branches, and computes
correct results at once. The recorder keeps the program order of each stream, the edges that events add (vector clocks),
and where each storage is read and written::

    with CudaRecorder() as cuda:
        copy = Transfer((), torch.device("cuda")).copy(column)
    cuda.check()                                # raises AssertionError with all problems
    assert cuda.waits == Counter()              # host waits by call site

`check` finds: a read or write without an edge from the write or read before it; device memory that is freed while
another stream uses it, without `record_stream` and without an edge back; `non_blocking` copies of pageable memory; host
accesses to memory that a queued copy still reads or writes. An operation on tensors of two devices raises, as on a
device. Accesses through numpy arrays that exist before a copy are not seen: report them by `host_reads(tensor)` and
`host_writes(tensor)`.

A CUDA graph is the list of operations that ran while it was captured, on the same tensors: `replay` runs these again,
and no Python. It is one entry "launch" of the log. As on a device, a capture changes nothing, and what waits for the
device or copies from pageable memory raises in it.

Not covered: generators, autocast, torch.compile, collectives, and the time that anything takes. Threads are covered
when they start inside the block.
"""

import contextlib
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from anabranch.replay import sample_plan

HOST = torch.device("cpu")
_OURS = (str(Path(torch.__file__).parent), __file__, contextlib.__file__, threading.__file__, "<")
_WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
"""Operations whose result, or its shape, the host waits for."""

_MOVING = {"copy_", "_foreach_copy_", "_to_copy", "to"}
"""Operations that take tensors of two devices; in inference mode `to` arrives whole."""
_INDEXING = {"index", "index_put_", "_index_put_impl_"}

Clock = dict["FakeStream", int]
"""For each stream, the number of its operations that are known to be done."""


@dataclass(frozen=True)
class Happening:
    """One entry of `CudaRecorder.log`, in program order."""

    kind: str
    """"op", "launch" (of a graph), "copy", "wait" (of the host), "record", "wait_event" or "record_stream"."""
    name: str
    stream: "FakeStream | None"
    site: str
    thread: str


@dataclass(eq=False)
class _Memory:
    """One storage: its device, and the last accesses by stream."""

    reference: StorageWeakRef
    device: torch.device
    size: int
    begin: int
    owner: "FakeStream | None"
    """The stream that allocated it; None on the host."""
    site: str
    pinned: bool = False
    write: "tuple[FakeStream, int, str] | None" = None
    reads: "dict[FakeStream, tuple[int, str]]" = field(default_factory=dict)
    used: "dict[FakeStream, tuple[int, str]]" = field(default_factory=dict)
    recorded: "set[FakeStream]" = field(default_factory=set)


class FakeStream:
    """Replaces torch.cuda.Stream."""

    _numbers: ClassVar[Iterator[int]] = iter(range(1, 1 << 30))

    def __init__(self, device=None, priority=0, **_kwargs):
        recorder = CudaRecorder.active()
        self.device = recorder.indexed(device)
        self.priority = priority
        self.stream_id = self.cuda_stream = next(self._numbers)
        self.clock: Clock = {}
        recorder.streams.append(self)

    def __repr__(self):
        return f"stream {self.stream_id} of {self.device}"

    def __enter__(self):
        self._streams = CudaRecorder.active().stream(self)
        self._streams.__enter__()
        return self

    def __exit__(self, *error):
        self._streams.__exit__(None, None, None)

    def record_event(self, event=None):
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event):
        recorder = CudaRecorder.active()
        with recorder.lock:
            recorder.record("wait_event", repr(event), self)
            _join(self.clock, event.clock)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        CudaRecorder.active().host_waits("Stream.synchronize", self.clock)

    def query(self):
        return CudaRecorder.active().asked(self.clock)


class FakeEvent:
    """Replaces torch.cuda.Event."""

    def __init__(self, *_args, **options):
        self.options = options
        self.clock: Clock = {}
        self.stream: FakeStream | None = None

    def record(self, stream=None):
        recorder = CudaRecorder.active()
        with recorder.lock:
            self.stream = stream or recorder.current_stream()
            recorder.record("record", "Event.record", self.stream)
            self.clock = dict(self.stream.clock)

    def wait(self, stream=None):
        (stream or CudaRecorder.active().current_stream()).wait_event(self)

    def synchronize(self):
        CudaRecorder.active().host_waits("Event.synchronize", self.clock)

    def query(self):
        return CudaRecorder.active().asked(self.clock)

    def elapsed_time(self, _end):
        return 0.0


class FakeGraph:
    """Replaces torch.cuda.CUDAGraph."""

    def __init__(self, **_options):
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._own: set[int] = set()
        self._generator = torch.get_rng_state()

    def pool(self):
        return 0, 1

    def record(self, func, args, kwargs):
        """Run an operation of the capture, and return its result."""
        name = func.overloadpacket.__name__
        if name in _WAITING:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                self._before.setdefault(storage._cdata, (storage, storage.clone()))
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in known]
        self._own |= {tensor.untyped_storage()._cdata for tensor in fresh}
        writes = any(kind == "write" for _, kind in _parameters(func))
        if (fresh and not name.startswith(("empty", "new_empty"))) or writes:
            self._operations.append((func, args, kwargs, fresh))
        self._keep.append(result)
        return result

    def begin(self):
        self._generator, self._keep = torch.get_rng_state(), list[Any]()

    def end(self):
        """Put back what the operations have changed: they were only captured."""
        for storage, before in self._before.values():
            storage.copy_(before)
        torch.set_rng_state(self._generator)
        self._before.clear()

    def replay(self):
        recorder = CudaRecorder.active()
        with recorder.lock:
            stream = recorder.current_stream()
            site = recorder.record("launch", "CUDAGraph.replay", stream)
            count = recorder._launch(stream)
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for func, args, kwargs, fresh in self._operations:
                inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
                result = func(*args, **kwargs)
                values = [one for one in _tensors(result) if one.untyped_storage()._cdata not in inputs]
                for static, value in zip(fresh, values, strict=True):
                    static.copy_(value)
        with recorder.lock:
            for func, args, kwargs, _ in self._operations:
                reads, writes, _ = _accesses(func, args, kwargs)
                for tensors, changes in ((reads, False), (writes, True)):
                    for tensor in tensors:
                        memory = recorder.memory_of(tensor)
                        if memory.device.type == "cuda":
                            recorder._touch(memory, stream, count, writes=changes, name="replay", site=site)


class CudaRecorder:
    """Patches torch while its block runs; see the module. One at a time."""

    _active: ClassVar["CudaRecorder | None"] = None

    def __init__(self, devices=1, *, busy=False, memory=80 << 30):
        """Args: `devices`, their number; `busy`, whether `query` of events and streams returns False, as if queued work
        never ended; `memory`, bytes of each device."""
        self.devices, self.busy, self.memory = devices, busy, memory
        self.lock = threading.RLock()
        self.log: list[Happening] = []
        self.problems: list[str] = []
        self.waits: Counter[str] = Counter()
        """Host waits by call site, `learner/train/trainer.py Trainer.step`."""
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """Calls of set_device, set_per_process_memory_fraction and empty_cache, in order."""
        self.live_bytes = self.peak_bytes = 0
        """Device memory in use, all devices together; a free is noticed at the next operation."""
        self.streams: list[FakeStream] = []
        self._memories: dict[int, _Memory] = {}
        self._registered: dict[int, int] = {}
        self._host: Clock = {}
        self._local = threading.local()
        self._sync_debug_mode: int | str = 0
        self._stack = contextlib.ExitStack()
        self._defaults: dict[torch.device, FakeStream] = {}

    @classmethod
    def active(cls):
        assert cls._active is not None, "the recorder's block has ended"
        return cls._active

    # What the code under test finds in torch.

    def __enter__(self):
        assert CudaRecorder._active is None, "one recorder at a time"
        CudaRecorder._active = self
        stack = self._stack
        stack.callback(setattr, CudaRecorder, "_active", None)
        for name, fake in self._fakes().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda *given: self._record_stream(*given)))
        start = threading.Thread.start
        recorder = self

        def start_recorded(thread):
            run = thread.run

            def run_recorded():
                with recorder._modes():
                    run()

            thread.run = run_recorded  # type: ignore[method-assign]
            start(thread)

        stack.enter_context(mock.patch.object(threading.Thread, "start", start_recorded))
        sample_plan._ones.cache_clear()  # of an earlier recorder, whose device they are on
        stack.enter_context(self._modes())
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _modes(self):
        stack = contextlib.ExitStack()
        stack.enter_context(_Dispatch(self))
        stack.enter_context(_Functions(self))
        return stack

    def _fakes(self):
        return {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "is_available": lambda: True,
            "init": lambda: None,
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_current_stream_capturing": lambda: self._capturing() is not None,
            "CUDAGraph": FakeGraph,
            "graph": self._graph,
            "graph_pool_handle": lambda: (0, 1),
            "get_sync_debug_mode": lambda: self._sync_debug_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "_sync_debug_mode", mode),
            "device_count": lambda: self.devices,
            "current_device": lambda: self._index(),
            "set_device": self._set_device,
            "device": self._device_context,
            "stream": self.stream,
            "set_stream": lambda stream: self._currents().__setitem__(stream.device, stream),
            "current_stream": self.current_stream,
            "default_stream": self.default_stream,
            "synchronize": self._synchronize,
            "empty_cache": lambda: self.calls.append(("empty_cache", ())),
            "set_per_process_memory_fraction": lambda *args: self.calls.append(("memory_fraction", args)),
            "mem_get_info": lambda device=None: (self.memory - self.live_bytes, self.memory),
            "memory_allocated": lambda device=None: self.live_bytes,
            "memory_reserved": lambda device=None: self.live_bytes,
            "max_memory_allocated": lambda device=None: self.peak_bytes,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "peak_bytes", self.live_bytes),
            "get_device_name": lambda device=None: "recorder",
            "get_device_capability": lambda device=None: (9, 0),
            "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
            "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8) for _ in range(self.devices)],
            "set_rng_state": lambda state, device="cuda": None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "cudart": lambda: self,
        }

    def cudaHostRegister(self, address, size, _flags):
        self._registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self._registered[address]
        return 0

    def indexed(self, device=None):
        """Return a device with its index; the current one for None."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device("cuda" if device is None else device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", self._index())
        if device.type == "cuda" and device.index >= self.devices:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return device

    def _index(self):
        return int(getattr(self._local, "index", 0))

    def _set_device(self, device):
        self._local.index = self.indexed(device).index
        self.calls.append(("set_device", (self._local.index, threading.current_thread().name)))

    @contextlib.contextmanager
    def _device_context(self, device):
        before, self._local.index = self._index(), self.indexed(device).index
        try:
            yield
        finally:
            self._local.index = before

    def _currents(self):
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        streams: dict[torch.device, FakeStream] = self._local.streams
        return streams

    def default_stream(self, device=None):
        device = self.indexed(device)
        with self.lock:
            return self._defaults.get(device) or self._defaults.setdefault(device, FakeStream(device))

    def current_stream(self, device=None):
        return self._currents().get(self.indexed(device)) or self.default_stream(device)

    @contextlib.contextmanager
    def stream(self, stream):
        """Replace torch.cuda.stream."""
        if stream is None:
            yield
            return
        before = self.current_stream(stream.device)
        index = self._index()
        self._currents()[stream.device], self._local.index = stream, stream.device.index
        try:
            yield
        finally:
            self._currents()[stream.device], self._local.index = before, index

    def _synchronize(self, device=None):
        device, clock = self.indexed(device), Clock()
        for stream in self.streams:
            if stream.device == device:
                _join(clock, stream.clock)
        self.host_waits("torch.cuda.synchronize", clock)

    # Happens-before.

    def record(self, kind, name, stream=None):
        """Append to the log; return the call site."""
        self._free_unused()
        site, line = _call_site()
        self.log.append(Happening(kind, name, stream, site, threading.current_thread().name))
        return f"{site} (line {line})"

    def host_waits(self, what, clock):
        """Let the host, and everything that it queues later, come after `clock`."""
        if self._sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        with self.lock:
            self.record("wait", what)
            self.waits[self.log[-1].site] += 1
            _join(self._host, clock)

    def asked(self, clock):
        """Answer `query`; a True shows the host what `synchronize` would."""
        with self.lock:
            if not self.busy:
                _join(self._host, clock)
        return not self.busy

    def host_reads(self, tensor):
        """State that the host reads a tensor in memory of the host, such as through its numpy array."""
        self._touch_on_host(self.memory_of(tensor), writes=False, name="read", site="host read")

    def host_writes(self, tensor):
        """State that the host writes to a tensor in memory of the host, such as through its numpy array."""
        self._touch_on_host(self.memory_of(tensor), writes=True, name="write", site="host write")

    def check(self):
        """Raise AssertionError with all problems."""
        with self.lock:
            self._free_unused()
        assert not self.problems, "\n".join(["the order of streams has problems:", *self.problems])

    def sites(self, kind):
        """Return the names of the log's entries of a kind, in program order."""
        return [happening.name for happening in self.log if happening.kind == kind]

    def device_of(self, tensor):
        """Return a tensor's recorded device."""
        return self.memory_of(tensor).device

    def memory_of(self, tensor, device=HOST, owner=None, site=""):
        """Return what is recorded of a tensor's storage, by default that it is on the host."""
        storage = tensor.untyped_storage()
        with self.lock:
            if (memory := self._memories.get(storage._cdata)) is None:
                memory = _Memory(StorageWeakRef(storage), device, storage.nbytes(), storage.data_ptr(), owner, site)
                self._memories[storage._cdata] = memory
                if device.type == "cuda":
                    self.live_bytes += memory.size
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            return memory

    def is_pinned(self, memory):
        return (
            memory.pinned
            or not memory.size
            or any(begin <= memory.begin < begin + size for begin, size in list(self._registered.items()))
        )

    def _capturing(self):
        graph: FakeGraph | None = getattr(self._local, "graph", None)
        return graph

    @contextlib.contextmanager
    def _graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        """Replace torch.cuda.graph."""
        self._synchronize()
        graph.begin()
        self._local.graph = graph
        try:
            yield
        finally:
            self._local.graph = None
            with _disable_current_modes():
                graph.end()

    def _record_stream(self, tensor, stream):
        with self.lock:
            self.record("record_stream", "record_stream", stream)
            self.memory_of(tensor).recorded.add(stream)

    def _free_unused(self):
        """Check storages that were freed since the last call: their memory goes to the stream that allocated it."""
        expired = torch.UntypedStorage._expired  # as `StorageWeakRef.expired`, which takes longer, for each storage
        for key in [key for key, memory in self._memories.items() if expired(memory.reference.cdata)]:
            memory = self._memories.pop(key)
            if memory.owner is None:
                continue
            self.live_bytes -= memory.size
            _join(memory.owner.clock, self._host)
            for stream, (count, site) in memory.used.items():
                if (
                    stream is not memory.owner
                    and stream not in memory.recorded
                    and memory.owner.clock.get(stream, 0) < count
                ):
                    self.problems.append(
                        f"memory of {memory.owner}, allocated at {memory.site}, is freed while {stream} may use it, "
                        f"since {site}: call record_stream, or let {memory.owner} wait"
                    )

    def _launch(self, stream):
        _join(stream.clock, self._host)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        return stream.clock[stream]

    def _touch(self, memory, stream, count, *, writes, name, site):
        """Record an access by an operation of a stream, and check that it comes after those that it must."""
        if memory.write is not None and stream.clock.get(memory.write[0], 0) < memory.write[1]:
            verb = "writes" if writes else "reads"
            self.problems.append(
                f"{name} at {site} {verb} on {stream} what {memory.write[0]} writes at {memory.write[2]}, "
                "without an edge"
            )
        if writes:
            for other, (at, where) in memory.reads.items():
                if stream.clock.get(other, 0) < at:
                    self.problems.append(
                        f"{name} at {site} writes on {stream} what {other} reads at {where}, without an edge"
                    )
            memory.write, memory.reads = (stream, count, site), {}
        else:
            memory.reads[stream] = (count, site)
        memory.used[stream] = (count, site)

    def _touch_on_host(self, memory, *, writes, name, site):
        if memory.device.type == "cuda":
            return
        with self.lock:
            before = [] if memory.write is None else [memory.write]
            if writes:
                before += [(stream, count, where) for stream, (count, where) in memory.reads.items()]
            for stream, count, where in before:
                if self._host.get(stream, 0) < count:
                    self.problems.append(
                        f"the host {'writes' if writes else 'reads'} ({name}, {site}) what {stream} still copies, "
                        f"since {where}: wait for an event first"
                    )
            if writes:
                memory.write, memory.reads = None, {}

    # What the modes report.

    def operate(self, func, args, kwargs):
        """Run an operation of aten and record what it reads and writes, on the current stream of its device."""
        name = func.overloadpacket.__name__
        reads, writes, views = _accesses(func, args, kwargs)
        inputs = _tensors((args, kwargs))
        pinned = bool(kwargs.pop("pin_memory", False))
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        with self.lock:
            device = self._device_of_operation(name, inputs)
        graph = self._capturing() if device.type == "cuda" else None
        result = func(*args, **kwargs) if graph is None else graph.record(func, args, kwargs)
        fresh = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in known]
        reads += views if fresh else []
        if graph is not None:
            with self.lock:
                if any(source != target for source, _, target in self._moves(name, args, result)):
                    raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
                for tensor in fresh:
                    self.memory_of(tensor, device, self.current_stream(device), "capture")
            return result
        with self.lock:
            moves = self._moves(name, args, result)
            if moves:
                non_blocking = bool(_argument(func, args, kwargs, "non_blocking"))
                for source, destination, target in moves:
                    self._copy(source, destination, target, non_blocking=non_blocking)
            elif (reads or writes or fresh) and device.type == "cpu":
                self._run_on_host(name, reads, writes, fresh, pinned=pinned)
            elif reads or writes or fresh:
                self._run_on_device(name, device, reads, writes, fresh, args)
        return result

    def _moves(self, name, args, result):
        """Return source, destination and target device of each copy between devices that an operation is."""
        target = getattr(self._local, "target", None)
        if name in {"_to_copy", "to"} and target is not None and target != self.device_of(args[0]):
            return [(args[0], result, target)]
        pairs: Any = ()
        if name == "copy_":
            pairs = [args[:2]]
        elif name == "_foreach_copy_":
            pairs = zip(args[0], args[1], strict=True)
        return [
            (source, destination, self.device_of(destination))
            for destination, source in pairs
            if self.device_of(destination) != self.device_of(source)
        ]

    def _device_of_operation(self, name, inputs):
        """Return where an operation runs. A tensor of one number on the host goes with any device."""
        target, inherited = getattr(self._local, "target", None), getattr(self._local, "inherited", HOST)
        if not inputs or (target is not None and (name.endswith("_like") or name.startswith("new_"))):
            return target or inherited
        sized = {self.device_of(tensor) for tensor in inputs if tensor.ndim}
        on_device = sorted(
            {one for one in sized or map(self.device_of, inputs) if one.type == "cuda"}, key=lambda one: one.index
        )
        if on_device and len(sized) > 1 and name not in _INDEXING | _MOVING:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(map(str, sized))}")
        return on_device[0] if on_device else HOST

    def _run_on_host(self, name, reads, writes, fresh, *, pinned):
        site = _call_site()[0] if reads or writes else ""
        for tensor in reads:
            self._touch_on_host(self.memory_of(tensor), writes=False, name=name, site=site)
        for tensor in writes:
            self._touch_on_host(self.memory_of(tensor), writes=True, name=name, site=site)
        for tensor in fresh:
            self.memory_of(tensor).pinned |= pinned

    def _run_on_device(self, name, device, reads, writes, fresh, args):
        stream = self.current_stream(device)
        site = self.record("op", name, stream)
        count = self._launch(stream)
        for tensor in reads:
            memory = self.memory_of(tensor)
            if memory.device.type == "cuda" and not name.endswith("_like") and not name.startswith("new_"):
                self._touch(memory, stream, count, writes=False, name=name, site=site)
        for tensor in writes:
            # After `set_` it has another storage.
            self._touch(self.memory_of(tensor, device, stream, site), stream, count, writes=True, name=name, site=site)
        for tensor in fresh:
            self._touch(self.memory_of(tensor, device, stream, site), stream, count, writes=True, name=name, site=site)
        # A mask is counted, and an index of the host is uploaded, before the kernel runs.
        uploads = name in _INDEXING and any(
            one.dtype is torch.bool or self.device_of(one).type == "cpu" for one in _tensors(args[1])
        )
        if name in _WAITING or uploads:
            self.host_waits(name, stream.clock)

    def _copy(self, source, destination, target, *, non_blocking):
        """Record a copy between the host and a device, or between devices, on the current stream of the device."""
        origin = self.memory_of(source)
        device = target if target.type == "cuda" else origin.device
        stream = self.current_stream(device)
        name = f"{origin.device.type} to {target.type}" + (", non_blocking" if non_blocking else "")
        site = self.record("copy", name, stream)
        arrival = self.memory_of(destination, target, stream if target.type == "cuda" else None, site)
        if non_blocking and target.type == "cpu" and arrival.site == site:
            arrival.pinned = True  # as torch allocates the result of a non_blocking `to`
        if not source.numel():
            return
        on_host = [memory for memory in (origin, arrival) if memory.device.type == "cpu"]
        if non_blocking and not all(self.is_pinned(memory) for memory in on_host):
            self.problems.append(f"non_blocking copy at {site} {name}: the host's memory is not pinned")
        count = self._launch(stream)
        self._touch(origin, stream, count, writes=False, name=name, site=site)
        self._touch(arrival, stream, count, writes=True, name=name, site=site)
        if on_host and not non_blocking:
            self.host_waits(f"copy {name}", stream.clock)

    @contextlib.contextmanager
    def targeting(self, target, inherited):
        """Let fresh tensors of operations in the block be on `target`, or without inputs on `inherited`."""
        local = self._local
        before = getattr(local, "target", None), getattr(local, "inherited", HOST)
        local.target, local.inherited = target, inherited
        try:
            yield
        finally:
            local.target, local.inherited = before


class _Dispatch(TorchDispatchMode):
    """Reports operations of aten, those of the backward pass too."""

    def __init__(self, recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._recorder.operate(func, args, dict(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Answers what a CPU build cannot: devices in arguments, moves, pinning, and `Tensor.device`."""

    def __init__(self, recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, recorder = dict(kwargs or {}), self._recorder
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        method = getattr(self, f"_{name.strip('_')}", None)
        if method is not None and args and isinstance(args[0], Tensor) and _plain(args[0]):
            answer = method(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        on_device = [device for device in map(recorder.device_of, _tensors((args, kwargs))) if device.type == "cuda"]
        target = None
        if kwargs.get("device") is not None:
            target = recorder.indexed(kwargs["device"])
            kwargs["device"] = "cpu" if target.type == "cuda" else kwargs["device"]
        pinned = bool(kwargs.pop("pin_memory", False))
        if target is not None and name in {"tensor", "as_tensor", "asarray"}:
            there = self._moved(func(*args, **kwargs), target, None, None, non_blocking=False, copies=False)
            return there.detach().requires_grad_(there.requires_grad)
        with recorder.targeting(target, on_device[0] if on_device else HOST):
            result = func(*args, **kwargs)
        if on_device and isinstance(result, Tensor) and _plain(result):
            # A storage that no operation has made, as by copy.deepcopy, is on the device of its origin.
            recorder.memory_of(result, on_device[0], recorder.current_stream(on_device[0]), name)
        if pinned:
            recorder.memory_of(result).pinned = True
        return result

    def _device(self, _func, args, _kwargs):
        return self._recorder.device_of(args[0])

    def _is_cuda(self, _func, args, _kwargs):
        return self._recorder.device_of(args[0]).type == "cuda"

    def _is_cpu(self, _func, args, _kwargs):
        return self._recorder.device_of(args[0]).type == "cpu"

    def _get_device(self, _func, args, _kwargs):
        device = self._recorder.device_of(args[0])
        return device.index if device.type == "cuda" else -1

    def _is_pinned(self, _func, args, _kwargs):
        memory = self._recorder.memory_of(args[0])
        return bool(memory.size) and self._recorder.is_pinned(memory)  # memory of no bytes is never pinned

    def _pin_memory(self, _func, args, _kwargs):
        memory = self._recorder.memory_of(args[0])
        if memory.device.type != "cpu":
            raise RuntimeError(f"cannot pin {args[0].type()}: only dense CPU tensors can be pinned")
        if self._recorder.is_pinned(memory):
            return args[0]
        pinned = args[0].clone()
        self._recorder.memory_of(pinned).pinned = True
        return pinned

    def _to(self, func, args, kwargs):
        tensor, rest = args[0], args[1:]
        copies = kwargs.pop("copy", False)
        if rest and isinstance(rest[0], Tensor):
            device: Any = self._recorder.device_of(rest[0])
            dtype, non_blocking, layout = rest[0].dtype, kwargs.get("non_blocking", False), None
        else:
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*rest, **kwargs)
        return self._moved(tensor, device, dtype, layout, non_blocking=non_blocking, copies=copies)

    def _cuda(self, _func, args, kwargs):
        device = args[1] if len(args) > 1 else kwargs.get("device")
        non_blocking = kwargs.get("non_blocking", False)
        return self._moved(args[0], self._recorder.indexed(device), None, None, non_blocking=non_blocking, copies=False)

    def _cpu(self, _func, args, _kwargs):
        return self._moved(args[0], HOST, None, None, non_blocking=False, copies=False)

    def _tolist(self, _func, args, _kwargs):
        tensor = self._cpu(None, args, {})
        self._recorder.host_reads(tensor)
        return tensor.tolist()

    def _numpy(self, _func, args, kwargs):
        memory = self._recorder.memory_of(args[0])
        if memory.device.type == "cuda":
            if not kwargs.get("force"):
                raise TypeError(f"can't convert {memory.device} device type tensor to numpy. Use Tensor.cpu() first")
            return self._cpu(None, (args[0].detach(),), {}).numpy(force=True)
        self._recorder.host_reads(args[0])
        return NotImplemented

    def _array(self, _func, args, _kwargs):
        return self._numpy(_func, args, {})

    def _moved(self, tensor, device, dtype, layout, *, non_blocking, copies):
        here = self._recorder.device_of(tensor)
        target = here if device is None else self._recorder.indexed(device)
        options = {"memory_format": layout} if layout is not None else {}
        with self._recorder.targeting(target, here):
            # Between devices a copy is forced: on the CPU, on which both are, torch would return the tensor itself.
            return tensor.to(
                "cpu", dtype or tensor.dtype, non_blocking=non_blocking, copy=copies or target != here, **options
            )


def _accesses(func, args, kwargs):
    """Return the tensors that an operation reads, those that it writes, and those that it may return views of."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    views: list[Tensor] = []
    kinds = {"read": reads, "write": writes, "view": views}
    for number, (name, kind) in enumerate(_parameters(func)):
        kinds[kind] += _tensors(args[number] if number < len(args) else kwargs.get(name))
    return reads, writes, views


@functools.cache
def _parameters(func):
    """Return the name of each argument of an operation, and what the operation does with it."""
    return [
        (each.name, "read" if each.alias_info is None else "write" if each.alias_info.is_write else "view")
        for each in func._schema.arguments
    ]


def _tensors(value):
    """Return the tensors with one storage in arguments or a result, in order.

    They are in lists, tuples and mappings, which torch's own walk takes four times as long for.
    """
    found: list[Tensor] = []
    if isinstance(value, Tensor):
        if _plain(value):
            found.append(value)
    elif isinstance(value, list | tuple):
        for each in value:
            found += _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            found += _tensors(each)
    return found


def _argument(func, args, kwargs, name):
    """Return an operation's argument, which may be given by position; None without one."""
    position = [each for each, _ in _parameters(func)].index(name)
    return args[position] if position < len(args) else kwargs.get(name)


def _plain(tensor):
    """Return whether a tensor has one storage in memory."""
    return tensor.layout is torch.strided and not tensor.is_meta


def _join(clock, other):
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def _call_site():
    """Return the file and function of the innermost frame of the code under test, and its line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    name = _shown(frame.f_code.co_filename, os.getcwd())  # noqa: PTH109 a path would be parsed for each operation
    return f"{name} {frame.f_code.co_qualname}", frame.f_lineno


@functools.cache
def _shown(file, folder):
    path = Path(file).resolve()  # by way of a link in `anabranch/`
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name
