"""The comparison of a canary with the stable version on events that were held out since it began."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from learner.config import GateSettings
from learner.evaluation.holdout import HoldoutRows
from learner.evaluation.scoring import Scorer
from learner.publishing.baseline import Baseline
from learner.publishing.canary_servers import CanaryServers
from learner.publishing.gate import GateInput, judge
from learner.state_dir.version import Verdict


class Comparison:
    """A canary, the stable version, and the events that were held out before it began. Used by one thread."""

    def __init__(self, canary: Baseline, stable_number: int, stable: Baseline | None, least: int) -> None:
        """Begin now.

        Args:
            canary: the version on the canaries, read now.
            stable_number: number of the stable version.
            stable: the stable version; None where it is another model's, so that nothing can be compared.
            least: events of the first comparison.
        """
        self.number, self.stable_number = canary.number, stable_number
        self.canary, self.stable = canary, stable
        self.servers = CanaryServers(canary.number)
        self.rows = 0
        """Events that it was compared on last."""
        self._least = self._next_at = least
        """With how many events they are compared next: one comparison after each event would fail by chance."""
        self._decided: Verdict | None = None
        """Of the last comparison."""
        self.losses = 0
        """How often all canaries ended without a last report."""
        self._before = canary.held_out
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """For how long it goes on; time without a learner does not count."""
        return time.monotonic() - self._began

    @property
    def lacks_events(self) -> bool:
        """Whether too few events came for one comparison, as of the last call of `verdict`."""
        return self.stable is not None and self._decided is None

    def verdict(self, rows: HoldoutRows, scorer: Scorer, settings: GateSettings) -> Verdict:
        """Compare both on the events that came since it began; `pass` where nothing can be compared."""
        if self.stable is None:
            return Verdict("pass", [f"version {self.stable_number} is another model's and cannot be compared with it"])
        fresh = ~np.isin(rows.columns["hash"].astype(np.uint64), self._before) if len(rows) else np.empty(0, np.bool_)
        self.rows = count = int(np.count_nonzero(fresh))
        if count < self._next_at:
            return self._decided or Verdict(
                "inconclusive", [f"{count} of {self._next_at} events were held out since it began"]
            )
        columns = {name: column[fresh] for name, column in rows.columns.items()}
        canary_G, stable_G = (each.scores(scorer, columns) for each in (self.canary, self.stable))
        marks = np.ones(count, np.bool_)
        inputs = GateInput(canary_G, stable_G, None, marks, ~marks, {})
        self._next_at = count + max(1, count // 2)
        settings = settings.model_copy(update={"min_rows": self._least})
        self._decided = judge(inputs, settings, bounded=scorer.bounded)
        return self._decided

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on. Any thread may call this."""
        return {
            "canary": self.number,
            "stable": self.stable_number,
            "seconds": self.seconds,
            "before": self._before.tobytes().hex(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on as in a checkpoint if it has this comparison."""
        if (state.get("canary"), state.get("stable")) == (self.number, self.stable_number):
            self._began = time.monotonic() - float(state["seconds"])
            self._before = np.frombuffer(bytes.fromhex(state["before"]), np.uint64)
