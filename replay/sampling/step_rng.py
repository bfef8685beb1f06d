"""The random numbers of a step, which are the same each time that they are requested."""

import numpy as np

_WORD = 2**64 - 1


class StepRng:
    """A generator whose numbers are a pure function of (seed, step). Used by one thread.

    Philox is a counter under a key (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so each step
    has its own key. Other generators would have to be seeded again, which takes as long as choosing a sample.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed & _WORD, 0], np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._begin = self._bits.state

    def for_step(self, step: int) -> np.random.Generator:
        """Return the generator of a step; it is valid until the next call."""
        self._begin["state"]["key"][1] = step
        self._bits.state = self._begin
        return self._generator
