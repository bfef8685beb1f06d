"""Several samplers over one store, of which one is asked: `replay.sampling = "auto"`."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from replay.sampling.samplers import Choice, Sampler, Slots

_KIND = "kind"


class Several:
    """All of them follow what comes, leaves and is heard of, so that each may be asked at once.

    Which one is, decides whoever sets `kind`: the name of one of `kinds`, at first the first.
    """

    def __init__(self, samplers: Mapping[str, Sampler]) -> None:
        self._samplers = samplers
        self.kinds = tuple(samplers)
        self.kind = self.kinds[0]
        self.hears_losses = any(each.hears_losses for each in samplers.values())
        self.divisible = all(each.divisible for each in samplers.values())

    def choose(self, n: int, generator: np.random.Generator) -> Choice:
        """Ask the one."""
        return self._samplers[self.kind].choose(n, generator)

    def come(self, slots: Slots) -> None:
        """Tell all."""
        for each in self._samplers.values():
            each.come(slots)

    def leave(self, slots: Slots) -> None:
        """Tell all."""
        for each in self._samplers.values():
            each.leave(slots)

    def learned(self, slots: Slots, losses: NDArray[np.float32]) -> None:
        """Tell all."""
        for each in self._samplers.values():
            each.learned(slots, losses)

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Return the states of all, each name behind that of its sampler and a dot, and which one is asked."""
        found = {
            f"{kind}.{name}": values for kind, each in self._samplers.items() for name, values in each.state().items()
        }
        return {**found, _KIND: np.frombuffer(self.kind.encode(), np.uint8).copy()}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Take them up; a cut that was made with another sampler has none of them."""
        for kind, each in self._samplers.items():
            begin = f"{kind}."
            each.restore({name.removeprefix(begin): values for name, values in state.items() if name.startswith(begin)})
        if _KIND in state and (kind := state[_KIND].astype(np.uint8).tobytes().decode()) in self._samplers:
            self.kind = kind
