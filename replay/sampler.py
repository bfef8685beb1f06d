"""Who is drawn.

Legend: H events held, n drawn.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Sampler(Protocol):
    """Chooses events for rehearsal. A pure function of its arguments: the same step and contents, the same draw."""

    def choose(self, held: int, n: int, seed: int, step: int) -> NDArray[np.int64]:
        """Return `min(n, held)` different positions in `[0, held)`, in an order in which any prefix is a fair draw."""
        ...


class Uniform:
    """Every event held is drawn with the same probability, without repeats within a draw."""

    def choose(self, held: int, n: int, seed: int, step: int) -> NDArray[np.int64]:
        """Choose by a generator of its own for each step, so that a draw does not depend on those before it."""
        generator = np.random.default_rng((seed, step))
        return generator.choice(held, size=min(n, held), replace=False)


SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform}
