"""What has changed in a store since its last cut."""

import numpy as np
from numpy.typing import NDArray


class Changes:
    """Keeps, of the events held at the last cut, which are still held; those that came since stand after them.

    Legend: B events held at that cut, H held now.
    """

    def __init__(self) -> None:
        self.base: int | None = None
        """The number of the cut; None: there is none to tell a difference from."""
        self.alive: NDArray[np.bool_] = np.ones(0, np.bool_)
        """Which of its events are still held, bool `[B]`."""
        self.old = 0
        """How many those are: the first so many of the events held now."""

    def begin(self, number: int, held: int) -> None:
        """From now on the difference is told from cut `number`, which has all that is held."""
        self.base, self.old, self.alive = number, held, np.ones(held, np.bool_)

    def forget(self) -> None:
        """Let the next cut tell all."""
        self.base, self.old, self.alive = None, 0, np.ones(0, np.bool_)

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Take note that those leave that do not stay, bool `[H]`."""
        self.alive[self.alive] = stays[: self.old]
        self.old = int(np.count_nonzero(stays[: self.old]))
