"""Random numbers of a step: the same whenever and however often it is asked for."""

import numpy as np

_WORD = 2**64 - 1


class StepRng:
    """A generator whose numbers are a function of (seed, step) and nothing else. Used by one thread.

    Philox counts under a key (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): another step is
    another key, where other generators have to be seeded anew, which costs as much as the choice of a whole sample.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed & _WORD, 0], np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._begin = self._bits.state

    def of(self, step: int) -> np.random.Generator:
        """Return the generator of a step, which is valid until the next call."""
        self._begin["state"]["key"][1] = step
        self._bits.state = self._begin
        return self._generator
