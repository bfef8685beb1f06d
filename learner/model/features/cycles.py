"""The place of a time in the cycles of the calendar, as sine and cosine."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ingest.feature_settings import Cycle

_SECONDS: dict[Cycle, int] = {"hour": 3600, "day": 86_400, "week": 604_800, "year": 31_556_952}
"""Length of each cycle; the year is the mean one of the Gregorian calendar."""


class Cycles(nn.Module):
    """Has no state: a time has the same phase in every version."""

    def __init__(self, name: str, cycles: Sequence[Cycle]) -> None:
        super().__init__()
        self.name = name
        self._seconds = [_SECONDS[cycle] for cycle in cycles]

    def forward(self, seconds_B: Tensor) -> dict[str, Tensor]:
        """Return sine and cosine of each cycle, float32 `[B, *shape, 2 * cycles]`, for seconds since 1970."""
        if not seconds_B.is_floating_point():
            seconds_B = seconds_B.long()  # torch has no remainder of uint32
        angles = [torch.remainder(seconds_B, seconds).float() * (2 * math.pi / seconds) for seconds in self._seconds]
        waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
        return {self.name: torch.stack(waves, dim=-1)}
