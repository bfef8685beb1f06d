"""Messages between the leader and the other ranks.

Headers, and bytes with them, go from host to host over gloo. The events and the results of a step stay on the device:
they take one scatter and one gather of all ranks, since NCCL makes a communicator for each two ranks that exchange
messages.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import AnabranchError
from anabranch.learner.errors import RankLostError
from anabranch.learner.settings.learner import RANK_TIMEOUT
from anabranch.learner.state_dir.safetensors_file import pieces_of, tensors_of

_HEADER = 32
_STOP_TIMEOUT = timedelta(seconds=2)
_KEEPALIVE_SECONDS = 1.0
"""The leader sends a keepalive after so long without a message, so that no rank times out while the stream is idle."""
PARTS = ("model", "optimizer", "strategy")
"""The parts of a checkpoint that all ranks restore, and those of step wrappers besides."""
MATRIX_PRODUCT, ALL_REDUCE = 0, 1
"""What is timed of devices."""


class Action(IntEnum):
    """What the other ranks have to do."""

    STOP = 0
    WAIT = 1
    BEGIN = 2
    LAYOUTS = 3
    STEP = 4
    RESTORE = 5
    GATHER = 6
    DRIFT = 7
    SNAPSHOT = 8
    MOMENTS = 9
    GENERATORS = 10
    TIME_DEVICES = 11
    FEATURES = 12
    ERASE = 13


class Channel:
    """Exchanges headers, bytes and tensors between the leader and the other ranks. Used by every rank."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.others = range(1, self.size)
        """All ranks but the leader."""
        self.device = device
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._due = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing was sent for a second."""
        return time.monotonic() >= self._due

    def send(self, rank: int, action: Action, numbers: Sequence[int] = (), message: Tensor | None = None) -> None:
        """Send a header, and bytes of the host with it, without waiting until they are received."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        size = -1 if message is None else len(message)
        header[: 3 + len(numbers)] = torch.tensor([action, size, len(numbers), *numbers])
        self._sent.append((dist.isend(header, rank), header))
        if message is not None:
            self._sent.append((dist.isend(message, rank), message))
        self._due = time.monotonic() + _KEEPALIVE_SECONDS

    def send_all(
        self,
        action: Action,
        numbers: Sequence[int] = (),
        message: Tensor | None = None,
        timeout: timedelta = RANK_TIMEOUT,
    ) -> None:
        """Send the same to every other rank, and wait until all have received it."""
        for rank in self.others:
            self.send(rank, action, numbers, message)
        self.wait_sent(timeout)

    def wait_sent(self, timeout: timedelta = RANK_TIMEOUT) -> None:
        """Wait until everything sent was received; raises RuntimeError when a rank does not receive."""
        for work, sent in self._sent:
            if work is not None:
                work.wait(timeout) if sent.is_cpu else work.wait()  # of a device, with a timeout the host would wait
        self._sent.clear()

    def receive(self) -> tuple[Action, list[int], Tensor | None]:
        """Wait for the leader's next header and its bytes."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        try:
            dist.recv(header, 0)
        except RuntimeError as exc:
            raise RankLostError(f"rank 0 is gone: {exc}") from exc
        action, size, count, *numbers = header.tolist()
        return Action(action), numbers[:count], None if size < 0 else self._receive_bytes(0, size)

    def reply(self, message: Tensor) -> None:
        """Send bytes of the host to the leader, their number first."""
        dist.send(torch.tensor([len(message)]), 0)
        dist.send(message, 0)

    def receive_reply(self, rank: int) -> Tensor:
        """Wait for the bytes that a rank sends with `reply`; return them as uint8 on the host."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank)
        return self._receive_bytes(rank, int(size))

    def scatter(self, messages: Sequence[Tensor]) -> None:
        """Send each rank its message, uint8 `[b]` on the device, without waiting. Called by rank 0."""
        own = torch.empty_like(messages[0])
        self._sent += [(dist.scatter(own, list(messages), async_op=True), own), *((None, each) for each in messages)]

    def receive_scattered(self, size: int) -> Tensor:
        """Wait for this rank's row of `scatter`. Called by all other ranks."""
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        dist.scatter(message)
        return message

    def gather(self, values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """Return the `values` of all ranks of a group on rank 0, and nothing on the others. All give as many."""
        of_ranks = [torch.empty_like(values) for _ in range(group.size())] if self.rank == 0 else []
        dist.gather(values, of_ranks or None, group=group)
        return of_ranks

    def broadcast(self, tensor: Tensor) -> None:
        """Copy a contiguous tensor of rank 0, on the host, to the same of all ranks."""
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0)

    def _receive_bytes(self, rank: int, size: int) -> Tensor:
        message = torch.empty(size, dtype=torch.uint8)
        dist.recv(message, rank)
        return message

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Send STOP to the other ranks when the block ends in order or by an `AnabranchError`.

        Nothing is sent when a rank is lost: the other ranks notice that the group is broken.
        """
        try:
            yield
        except AnabranchError:
            # Ranks in the middle of a step do not receive: they notice that this one is gone.
            with suppress(RuntimeError):
                self.send_all(Action.STOP, timeout=_STOP_TIMEOUT)
            raise
        self.send_all(Action.STOP)


def tensors_to_bytes(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Tensor:
    """Return tensors and JSON values as bytes."""
    return to_bytes(b"".join(pieces_of({**tensors, "/": json_to_bytes(values)})))


def tensors_from_bytes(message: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and values of `tensors_to_bytes`."""
    tensors = tensors_of(message.numpy().tobytes(), "a message of a rank")
    return tensors, json_from_bytes(tensors.pop("/"))


def arrays_to_bytes(arrays: Mapping[str, NDArray[Any]]) -> Tensor:
    """Return arrays by name as bytes."""
    return tensors_to_bytes({name: torch.from_numpy(value.copy()) for name, value in arrays.items()}, {})


def arrays_from_bytes(message: Tensor) -> dict[str, NDArray[Any]]:
    """Return the arrays of `arrays_to_bytes`."""
    tensors, _ = tensors_from_bytes(message)
    return {name: value.numpy() for name, value in tensors.items()}


def json_to_bytes(values: object) -> Tensor:
    """Return JSON values as bytes."""
    return to_bytes(json.dumps(values).encode())


def json_from_bytes(message: Tensor) -> Any:
    """Return the values of `json_to_bytes`."""
    return json.loads(message.numpy().tobytes())


def to_bytes(text: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def float_to_bits(number: float) -> int:
    """Return the bits of a float as an integer, for a header."""
    return int(np.float64(number).view(np.int64))


def float_from_bits(bits: int) -> float:
    """Return the float of `float_to_bits`."""
    return float(np.int64(bits).view(np.float64))


def smaller(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two sizes of a micro-batch; None is without a limit."""
    return min(filter(None, (one, other)), default=None)
