"""Where events lie in the model's embedding: what feeds the index process, and takes up what it has found.

Legend: n events of a call, D dimensions.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Whereabouts(Protocol):
    """The embeddings of the events held, by slot. Never waits for the index process."""

    training: int
    """Grows each time that other clusters are found."""

    def follow(self) -> int:
        """Take up what the index process has found, and return `training`."""
        ...

    def clusters(self, slots: NDArray[np.int32], /) -> NDArray[np.int16]:
        """Return the clusters of the events in n slots."""
        ...

    def cluster_of(self, embedding: NDArray[np.float32], /) -> NDArray[np.int16]:
        """Return the nearest cluster of n embeddings `[n, D]`; 0 while clusters are not known."""
        ...

    def seek(self, step: int, embedding: NDArray[np.float32], /) -> None:
        """Look for events that are near to n others, `[n, D]`."""
        ...

    def nearest(self) -> NDArray[np.int32]:
        """Return the slots of the nearest events that were found last, nearest first."""
        ...

    def come(self, slots: NDArray[np.int32], embedding: NDArray[np.float32], /) -> None:
        """Learn where n events lie, `[n, D]`."""
        ...

    def leave(self, slots: NDArray[np.int32], /) -> None:
        """Forget n events."""
        ...

    def close(self) -> None:
        """End the index process."""
        ...
