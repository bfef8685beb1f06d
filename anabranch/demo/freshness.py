"""How long an event takes from its sending to the first reply of a model that has learned it."""

import bisect
import threading
from collections import defaultdict, deque
from collections.abc import Mapping

_KEPT_SAMPLES = 20_000
_KEPT_STEPS = 10_000


class Freshness:
    """Matches events with replies. Any thread may call; moments are seconds of one clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[tuple[int, float]]] = defaultdict(list)
        # For each partition, how far replies had learned and since when: both rise.
        self._learned: dict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_KEPT_STEPS))
        self._samples: deque[float] = deque(maxlen=_KEPT_SAMPLES)

    def sent(self, partition: str, offset: int, moment: float) -> None:
        """Record an event sent at `moment`; the reply whose model was trained on it may have been recorded before."""
        with self._lock:
            steps = self._learned[partition]
            step = bisect.bisect_left(steps, offset, key=lambda known: known[0])
            if step < len(steps):
                self._samples.append(max(0.0, steps[step][1] - moment))
            else:
                bisect.insort(self._waiting[partition], (offset, moment))

    def replied(self, trained_through: Mapping[str, int], moment: float) -> None:
        """Record a reply, received at `moment`, of a model trained through an offset of each partition, inclusive."""
        with self._lock:
            for partition, offset in trained_through.items():
                steps = self._learned[partition]
                if steps and offset <= steps[-1][0]:
                    continue
                steps.append((offset, moment))
                waiting = self._waiting[partition]
                done = bisect.bisect_right(waiting, offset, key=lambda event: event[0])
                self._samples.extend(moment - sent for _, sent in waiting[:done])
                del waiting[:done]

    def seconds(self, quantile: float) -> float | None:
        """Return a quantile of the last 20,000 samples; None when there are none."""
        with self._lock:
            samples = sorted(self._samples)
        return samples[min(len(samples) - 1, int(quantile * len(samples)))] if samples else None
