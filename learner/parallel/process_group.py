"""How ranks find each other, and the process group that they form."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _world

from anabranch.learner.errors import RankLostError
from anabranch.learner.model.device import device_of_rank
from anabranch.learner.parallel.torchrun import RankHeartbeat
from anabranch.learner.settings.learner import RANK_TIMEOUT, LearnerSettings
from anabranch.learner.state_dir.folders import TRACES

_left: list[dist.ProcessGroup] = []
"""Groups that this process has left."""


@dataclass(frozen=True)
class RankAssignment:
    """The rank of this process: `rank` of `size`, which connect by a file, or by the store of torchrun."""

    rank: int
    size: int
    rendezvous: Path | Store
    first: int = 0
    """The first rank on this host."""
    rows: int | None = None
    """Largest micro-batch in events, after a device of this host ran out of memory; None when none did."""
    heartbeat: RankHeartbeat | None = None
    """Of ranks that torchrun started: ends them when one is lost."""

    def device(self, settings: LearnerSettings) -> torch.device:
        """Return the device of the rank; raises what `device_of_rank` raises."""
        return device_of_rank(self.rank - self.first, settings)


@contextlib.contextmanager
def join_group(assignment: RankAssignment, settings: LearnerSettings) -> Iterator[torch.device]:
    """Join the group of all ranks while the block runs, and yield this rank's device. Called by every rank.

    Ranks that connect by a file use loopback, unless the environment names another interface.

    Raises:
        SettingsError: there is no device for each rank.
        RankLostError: other ranks ended before all were connected.
    """
    device = assignment.device(settings)
    if isinstance(assignment.rendezvous, Path):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    heartbeat = assignment.heartbeat
    try:
        with contextlib.nullcontext() if heartbeat is None else heartbeat.joining():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=_store_of(assignment),
                rank=assignment.rank,
                world_size=assignment.size,
                timeout=RANK_TIMEOUT,
                # Connects all ranks now, with one NCCL communicator: no two ranks exchange messages over NCCL alone.
                device_id=device if device.type == "cuda" else None,
            )
    except (RuntimeError, OSError) as exc:
        raise RankLostError(f"the {assignment.size} ranks did not connect: {exc}") from exc
    with contextlib.nullcontext() if heartbeat is None else heartbeat.beating():
        yield device
    # Not after an error: destroying a group whose ranks are lost may hang.
    leave_group()


def leave_group() -> None:
    """Leave the group of all ranks, and all others. Called by every rank.

    The objects stay: their destructors would hold the GIL while they wait for threads of gloo, which take the GIL to
    release the tensors of the last collective. A model under `DistributedDataParallel` refers to them too.
    """
    _left.extend(_world.pg_map)
    dist.destroy_process_group()


@contextlib.contextmanager
def exiting_at_once() -> Iterator[None]:
    """End the process after the block, also when it raises: with 0, the code of SystemExit, or 1 and its error printed.

    The destructors of groups, which an ordinary exit runs, may hang when other ranks are gone, or end first.
    """
    code: object = 0
    try:
        yield
    except SystemExit as exc:
        code = exc.code
    except BaseException as exc:  # noqa: BLE001 the process ends with it
        sys.excepthook(type(exc), exc, exc.__traceback__)
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def record_collectives(state_dir: Path) -> None:
    """Make ranks that are started from now on keep their last NCCL collectives, and write them when one times out.

    Each rank writes `traces/nccl-<rank>` there, for `torchfrtrace`. What the user has set stays.
    """
    if not torch.cuda.is_available():
        return
    folder = state_dir / TRACES
    with contextlib.suppress(OSError):  # costs only the trace
        folder.mkdir(parents=True, exist_ok=True)
    defaults = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # end the process; to abort communicators first may hang
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl-"),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _store_of(assignment: RankAssignment) -> Store:
    if isinstance(assignment.rendezvous, Path):
        return FileStore(str(assignment.rendezvous), assignment.size)
    return assignment.rendezvous


def devices_of_host(device: torch.device, settings: LearnerSettings) -> list[torch.device]:
    """Return the devices of all ranks of this host, given that of one of them."""
    return [torch.device("cuda", index) for index in range(settings.replicas)] if device.type == "cuda" else [device]
