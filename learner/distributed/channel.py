"""How the leader talks with the other ranks: headers of int64 on the CPU, and bytes on the device where one says so."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.core.errors import AnabranchError
from learner.config import LearnerSettings
from learner.distributed.process_group import SILENCE, RankAssignment, join_group
from learner.errors import RankLostError

_HEADER = 24
_PATIENCE = timedelta(seconds=2)
_QUIET_SECONDS = 1.0
"""After so long without a step the leader says that it is there, so that no rank gives up on a quiet stream."""


class Action(IntEnum):
    """What a header asks of the other ranks."""

    STOP = 0
    WAIT = 1
    BEGIN = 2
    FORMS = 3
    STEP = 4
    RESTORE = 5
    GATHER = 6
    DRIFT = 7
    SNAPSHOT = 8
    MOMENTS = 9
    GENERATORS = 10


class Channel:
    """The headers and bytes between the leader and the others. Called by every rank."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._due = 0.0

    @property
    def others(self) -> range:
        """The ranks that are led."""
        return range(1, self.size)

    @property
    def quiet(self) -> bool:
        """Whether nothing was said for a second."""
        return time.monotonic() >= self._due

    def tell(self, rank: int, action: Action, numbers: Sequence[int] = (), message: Tensor | None = None) -> None:
        """Send a header, and a message with it, without waiting until they have arrived."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        size = -1 if message is None else len(message)
        header[: 3 + len(numbers)] = torch.tensor([action, size, len(numbers), *numbers])
        self._sent.append((dist.isend(header, rank), header))
        if message is not None:
            self._sent.append((dist.isend(message, rank), message))
        self._due = time.monotonic() + _QUIET_SECONDS

    def tell_all(
        self, action: Action, numbers: Sequence[int] = (), message: Tensor | None = None, patience: timedelta = SILENCE
    ) -> None:
        """Tell every other rank the same, and wait until it has arrived."""
        for rank in self.others:
            self.tell(rank, action, numbers, message)
        self.arrived(patience)

    def arrived(self, patience: timedelta = SILENCE) -> None:
        """Wait until all that was told has arrived; raises RuntimeError when a rank does not listen."""
        for work, _ in self._sent:
            if work is not None:
                work.wait(patience)
        self._sent.clear()

    def hear(self) -> tuple[Action, list[int], Tensor | None]:
        """Wait for the leader's next header, and the message that goes with it."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        try:
            dist.recv(header, 0)
        except RuntimeError as exc:
            raise RankLostError(f"rank 0 is gone: {exc}") from exc
        action, size, count, *numbers = header.tolist()
        return Action(action), numbers[:count], None if size < 0 else self.receive(0, size)

    def reply(self, message: Tensor) -> None:
        """Send bytes to the leader."""
        dist.send(message, 0)

    def reply_with_size(self, message: Tensor) -> None:
        """Send the leader bytes of which it does not know how many they are."""
        dist.send(torch.tensor([len(message)]), 0)
        self.reply(message)

    def receive_with_size(self, rank: int) -> Tensor:
        """Wait for what a rank sends by `reply_with_size`."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank)
        return self.receive(rank, int(size))

    def receive(self, rank: int, size: int) -> Tensor:
        """Wait for so many bytes of a rank, uint8 on the learner's device."""
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        dist.recv(message, rank)
        return message

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Tell the others to begin now, and to stop when the block is left in order or by an error that is no bug.

        When a rank is lost there is nobody to tell, and the others see for themselves that the group is broken.
        """
        try:
            yield
        except AnabranchError:
            # Ranks in the midst of a step do not listen: they see for themselves that this one is gone.
            with suppress(RuntimeError):
                self.tell_all(Action.STOP, patience=_PATIENCE)
            raise
        self.tell_all(Action.STOP)


@contextmanager
def lead(place: RankAssignment, settings: LearnerSettings) -> Iterator[Channel]:
    """Join the group of all ranks as the one that leads it."""
    with join_group(place, settings) as device:
        channel = Channel(device)
        with channel.leading():
            yield channel
