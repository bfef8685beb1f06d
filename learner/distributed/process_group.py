"""How ranks find each other, and the process group that they make."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from anabranch.core.errors import SettingsError
from learner.config import LearnerSettings
from learner.distributed.membership import connect
from learner.errors import RankLostError
from learner.model.device import choose_device

SILENCE = timedelta(minutes=10)
"""After so long without a word the others give up: many times what the leader ever takes between two headers."""


@dataclass(frozen=True)
class RendezvousAddress:
    """Where the ranks of several hosts meet: under a name of their own in the store that host 0 serves."""

    address: str
    name: str
    interface: str
    """The network interface of this host over which its ranks talk."""


@dataclass(frozen=True)
class RankAssignment:
    """Which rank this process is: `rank` of `size`, all of which meet at the file `meeting`, or with other hosts."""

    rank: int
    size: int
    meeting: Path | RendezvousAddress
    first: int = 0
    """The first rank on this host."""
    absent: tuple[int, ...] = ()
    """Hosts that did not come."""
    readers: tuple[str, ...] = ()
    """Addresses of the ingest processes of other hosts."""
    rows: int | None = None
    """Events of a micro-batch at most, since a device of this host has run out of memory; None: it has not."""


@contextlib.contextmanager
def join_group(place: RankAssignment, settings: LearnerSettings) -> Iterator[torch.device]:
    """Be one of the group of all ranks, for as long as the block runs; yields this rank's device. Called by every rank.

    On one host they meet at a file and talk over the loopback interface, so that nothing of them is seen from outside.

    Raises:
        SettingsError: there is no device for each rank.
        RankLostError: others are gone before all have met.
    """
    device = device_of(place, settings)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = place.meeting.interface if isinstance(place.meeting, RendezvousAddress) else loopback
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_store_of(place),
            rank=place.rank,
            world_size=place.size,
            timeout=SILENCE,
        )
    except (RuntimeError, OSError) as exc:
        raise RankLostError(f"the {place.size} ranks did not meet: {exc}") from exc
    yield device
    # Not after an error: what is left of a group whose ranks are lost may not let go.
    dist.destroy_process_group()


def _store_of(place: RankAssignment) -> Store:
    if isinstance(place.meeting, RendezvousAddress):
        return PrefixStore(place.meeting.name, connect(place.meeting.address, SILENCE))
    return FileStore(str(place.meeting), place.size)


def device_of(place: RankAssignment, settings: LearnerSettings) -> torch.device:
    """Return the device of a rank; raises SettingsError when there is none for each rank of the host."""
    device, what = choose_device(settings.device), f"learner.replicas = {settings.replicas}"
    if device.type == "cpu":
        if settings.comm_hook == "bf16":
            raise SettingsError('learner.comm_hook = "bf16" needs CUDA devices; write "fp16", or "none"')
        return device
    if device.type != "cuda":
        raise SettingsError(f'{what} needs CUDA devices or learner.device = "cpu", but the device is {device}')
    if ":" in settings.device:
        raise SettingsError(f'{what} needs a device for each, but learner.device = "{settings.device}"; write "cuda"')
    if torch.cuda.device_count() < settings.replicas:
        raise SettingsError(f"{what} needs so many CUDA devices, but there are {torch.cuda.device_count()}")
    return torch.device("cuda", place.rank - place.first)
