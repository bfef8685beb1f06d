"""Ranks that `torchrun` starts, on one host or on several.

Torchrun numbers the ranks, and serves the store of keys by which they connect, at `MASTER_ADDR:MASTER_PORT`. With its
static rendezvous, the default, neither torchrun nor the ranks unpickle what comes from there: the values are JSON, and
addresses that gloo and NCCL parse.

Torchrun of a host ends when a rank of that host does, which torchrun of other hosts does not notice. `RankHeartbeat`
ends the ranks of all hosts.
"""

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from types import FrameType

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, is_nccl_available  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.errors import RankLostError
from anabranch.learner.model.device import choose_device, choose_precision
from anabranch.learner.parallel.mesh import mesh_settings
from anabranch.learner.settings.compatibility import Point, conflicts
from anabranch.learner.settings.learner import LearnerSettings

JOIN_TIMEOUT = timedelta(minutes=2)
"""How long a rank waits for the others, which start at the same time, to read their settings, and then to connect."""
SILENT = timedelta(seconds=15)
"""All ranks end when one takes no part in the heartbeat for so long."""
_BEAT_SECONDS = 1.0
_OWN = {"replicas", "device", "status", "stop_timeout", "profile"}
"""Settings of the learner that may differ between hosts."""
_SIOCGIFADDR = 0x8915
_READABLE = frozenset({"torch", "device type", "precision", "CUDA", "NCCL"})
"""Values that are compared as they are, and others by their digest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchrunRank:
    """What torchrun passes to a rank in the environment."""

    rank: int
    size: int
    local_rank: int
    ranks_of_host: int
    hosts: int
    master: tuple[str, int]
    attempt: str
    """Number of the restart by torchrun's `--max-restarts`; the store keeps the keys of earlier ones."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "TorchrunRank":
        """Return what the environment of a rank says."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT")
        rank, size, local_rank, ranks_of_host, hosts, port = (int(environment[name]) for name in names)
        master = environment["MASTER_ADDR"], port
        return cls(rank, size, local_rank, ranks_of_host, hosts, master, environment["TORCHELASTIC_RESTART_COUNT"])

    @property
    def first(self) -> int:
        """The first rank on this host."""
        return self.rank - self.local_rank

    @property
    def is_on_host_0(self) -> bool:
        """Whether rank 0 is on this host, and with it the state directory."""
        return self.first == 0

    def connect(self) -> Store:
        """Connect to torchrun's store; raises RankLostError when torchrun of host 0 is gone."""
        try:
            store, _, _ = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
        except (RuntimeError, OSError) as exc:
            raise RankLostError(f"torchrun's store at {self.master[0]} does not answer: {exc}") from exc
        return PrefixStore(f"anabranch-{self.attempt}", store)

    def settings(self, learner: LearnerSettings, chosen: Point) -> LearnerSettings:
        """Return the learner's settings with the number of ranks of this host as `replicas`.

        Args:
            learner: as the config has them.
            chosen: all values of the config that may exclude each other.

        Raises:
            SettingsError: a setting does not go with so many ranks or hosts.
        """
        started = {"learner.replicas": self.size, "torchrun --nnodes": self.hosts}
        for _, sentence in conflicts({**chosen, **started}):
            raise SettingsError(f"torchrun starts {self.size} ranks, which count as learner.replicas: {sentence}")
        settings = learner.model_copy(update={"replicas": self.ranks_of_host})
        mesh_settings(settings, self.size)
        return settings


def values_to_agree_on(settings: LearnerSettings, others: Mapping[str, object]) -> dict[str, str]:
    """Return what all ranks need alike: digests of settings, and device type, precision and releases.

    Between a CPU and a CUDA device, or between two precisions, ranks would wait for each other without end.

    Args:
        settings: of the learner.
        others: further values by name.

    Raises:
        SettingsError: there is no such device, or it cannot do the precision.
        DependencyError: the device is away.
    """
    learner = settings.model_dump(mode="json", exclude=_OWN)
    alike = {name: _digest(values) for name, values in {**others, "[learner]": learner}.items()}
    device = choose_device(settings.device)
    alike["torch"] = torch.__version__.partition("+")[0]
    alike["device type"] = device.type
    alike["precision"] = choose_precision(settings.precision, device).name
    if device.type == "cuda":
        alike["CUDA"] = str(torch.version.cuda)
        nccl = torch.cuda.nccl.version() if is_nccl_available() else ("none",)  # type: ignore[no-untyped-call]
        alike["NCCL"] = ".".join(map(str, nccl))
    return alike


def agree(store: Store, rank: int, size: int, alike: Mapping[str, str] | SettingsError | DependencyError) -> None:
    """Wait for all ranks, and compare their values with those of rank 0. Called by every rank; all raise or none.

    A rank that cannot start passes its error, which it raises once the others have it.

    Raises:
        SettingsError: a rank has other values, or refuses to start.
        DependencyError: a rank lacks a dependency.
        RankLostError: not all ranks came within `JOIN_TIMEOUT`; or this host has started again, and the store is still
            that of a group that is gone.
    """
    if isinstance(alike, Exception):
        kind = SettingsError if isinstance(alike, SettingsError) else DependencyError
        with contextlib.suppress(RankLostError):
            _exchanged(store, rank, size, {kind.__name__: str(alike)})
        raise alike
    of_ranks = _exchanged(store, rank, size, alike)
    for kind in (SettingsError, DependencyError):
        for other, theirs in enumerate(of_ranks):
            if kind.__name__ in theirs:
                raise kind(f"rank {other} does not start: {theirs[kind.__name__]}")
    for other, theirs in enumerate(of_ranks):
        if differing := _differing(theirs, of_ranks[0]):
            raise SettingsError(
                f"{differing} of rank {other} differ from those of rank 0; install the same pipeline.toml and release "
                "of torch on all hosts, with the same kind of device"
            )


def _exchanged(store: Store, rank: int, size: int, own: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the values of each rank; raises RankLostError."""
    try:
        if store.add(f"starts/{rank}", 1) > 1:
            raise RankLostError(
                "torchrun of rank 0 has not ended since the last start of this host; start all hosts again"
            )
        store.set(_key(rank), json.dumps(own))
        received = store.multi_get([_key(each) for each in range(size)])
        return [msgspec.json.decode(value, type=dict[str, str]) for value in received]
    except (RuntimeError, msgspec.MsgspecError) as exc:
        raise RankLostError(f"not all of the {size} ranks came within {JOIN_TIMEOUT}: {exc}") from exc


def use_interface_to(master: tuple[str, int], environment: MutableMapping[str, str], hosts: int) -> None:
    """Let gloo and NCCL use the interface that leads to the master, unless the environment names one.

    Without it gloo takes the address of the host's name, which on many systems is one of loopback. On systems other
    than Linux, and with IPv6, that choice stays.

    Raises:
        SettingsError: with several `hosts`, it is loopback, as Debian has it for a host's own name.
    """
    if "GLOO_SOCKET_IFNAME" in environment or (found := _interface_to(master)) is None:
        return
    name, own = found
    if hosts > 1 and own.startswith("127."):
        raise SettingsError(
            f"torchrun --master-addr {master[0]} leads to loopback on this host, where no other host reaches it; write "
            "the address of the first host's network interface, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to "
            "its name"
        )
    environment["GLOO_SOCKET_IFNAME"] = name
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=" it is a prefix: eth1 includes eth10


def ignore_further_signals() -> None:
    """Ignore SIGTERM and SIGINT after the first one; call it while a handler of the first one is installed.

    Torchrun sends its signals on to the ranks, and a service manager may send them to all processes too. Torchrun kills
    a rank that does not end in time.
    """
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_first(number: int, frame: FrameType | None) -> None:
        handler = signals[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        for each in signals:
            signal.signal(each, signal.SIG_IGN)

    for number in signals:
        signal.signal(number, on_first)


class RankHeartbeat:
    """Exchanges a message among all ranks each second, in a thread, whatever the main thread waits for.

    It ends this process when another rank has ended or is silent, as when its network is gone: gloo's timeout notices
    that, where TCP would take a quarter of an hour. It also ends this process when torchrun is gone, and sets `stop`
    when a rank of another host was stopped.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._parent = os.getppid()
        self._over = threading.Event()
        self.stopped_by_another = False
        """Whether a signal stopped other hosts, and not this one."""

    @staticmethod
    @contextlib.contextmanager
    def joining() -> Iterator[None]:
        """End this process if the block, in which all ranks connect, lasts longer than `JOIN_TIMEOUT`."""
        timer = threading.Timer(JOIN_TIMEOUT.total_seconds(), _end, [f"others did not connect within {JOIN_TIMEOUT}"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Exchange messages while the block runs, and until it has ended on all ranks. Called by every rank."""
        with self.joining():
            group = dist.new_group(backend="gloo", timeout=SILENT)
        thread = threading.Thread(target=self._run, args=(group,), name="heartbeat", daemon=True)
        thread.start()
        yield
        self._over.set()
        thread.join()

    def _run(self, group: dist.ProcessGroup) -> None:
        ended = 0
        while ended < dist.get_world_size():
            self._over.wait(_BEAT_SECONDS)
            state = torch.tensor([self._stop.is_set(), self._over.is_set()], dtype=torch.int64)
            try:
                dist.all_reduce(state, group=group)
            except RuntimeError as exc:
                _end(f"another rank is gone: {str(exc).partition('. ')[0]}")
            if os.getppid() != self._parent:
                _end("torchrun is gone")
            stopped, ended = state.tolist()
            if stopped and not self._stop.is_set():
                self.stopped_by_another = True
                self._stop.set()


def _end(why: str) -> None:
    """End this process at once: its other threads may wait without end."""
    log.error("rank %s ends: %s", os.environ["RANK"], why)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


def _interface_to(master: tuple[str, int]) -> tuple[str, str] | None:
    """Return the interface that leads to the master, and its address."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(master)  # sends nothing
        own: str = probe.getsockname()[0]
        address = socket.inet_aton(own)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == address:
                    return name, own
    return None


def _differing(theirs: Mapping[str, str], of_rank_0: Mapping[str, str]) -> str:
    """Return the names of the values that differ, joined by commas, and readable ones with both values."""
    names = sorted((theirs.keys() | of_rank_0.keys()) - (_READABLE - (theirs.keys() & of_rank_0.keys())))
    return ", ".join(
        f"{name} ({theirs[name]}, not {of_rank_0[name]})" if name in _READABLE else name
        for name in names
        if theirs.get(name) != of_rank_0.get(name)
    )


def _key(rank: int) -> str:
    return f"alike/{rank}"


def _digest(values: object) -> str:
    """Return a digest of JSON values."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
