"""A challenger: settings that are compared with the model's, and how it fares."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from learner.search.evidence import Evidence, log_threshold
from learner.state_dir.search.control import ChallengerReport, Judged

FIRST_LEASE = 128
"""Steps of the first lease of a challenger. In 32 steps, a learning rate that is too high or too low often seems better
than a good one."""
TEACHING, MOST_TAUGHT = 256, 4096
"""Steps that the model teaches such a challenger before each lease, and as often as they do not suffice; and in all.
After so many, neither its first weights nor an optimizer that has just begun make it better or worse."""
MARGIN = 0.03
"""By how much it has to be better. An equal network that was taught while the model itself still learned fast was ahead
of it by up to 0.019, in a first try; and another network costs a person a new pipeline."""
CAUGHT_UP, CLOSE = 32, 0.05
"""In the last steps of these it learns from labels alone: who learns from the model stays a little behind it. It has
caught up when its mean difference in them is above `-CLOSE`."""


@dataclass(eq=False)
class Challenger:
    """Settings that are compared with the model's."""

    number: int
    values: dict[str, float]
    rank: int
    """Its number since the model's settings changed, from 1: how much of the error rate it gets."""
    lease: int = FIRST_LEASE
    slot: int | None = None
    """Which copy of the model it trains; None: it waits for a lease."""
    left: int = 0
    """Steps that are left of the lease."""
    steps: int = 0
    total: float = 0.0
    """Sum of the differences."""
    better: Evidence = field(default_factory=Evidence)
    worse: Evidence = field(default_factory=Evidence)
    network: bool = False
    """Whether it has its own network, which it keeps between leases."""
    teaching: int = 0
    """Steps that are left in which the model teaches it; 0: it is compared."""
    taught: int = 0
    """Steps in which it was taught so far."""
    recent: list[float] = field(default_factory=list)
    """Its newest differences while it is taught."""

    @property
    def has_teacher(self) -> bool:
        """Whether it learns from the model's outputs in this step."""
        return self.teaching > CAUGHT_UP

    @property
    def margin(self) -> float:
        """What its mean difference has to be above to be better."""
        return MARGIN if self.network else 0.0

    @property
    def cost(self) -> int:
        """The steps that have to be saved up for its next lease."""
        return self.lease + (TEACHING if self.network else 0)

    def report(self, outcome: Judged | None = None, step: int = 0) -> ChallengerReport:
        """Return it for the learner's report."""
        return ChallengerReport(
            number=self.number,
            values=self.values,
            steps=self.steps,
            difference=self.total / max(1, self.steps),
            log_wealth=self.better.log_wealth,
            log_threshold=log_threshold(self.rank),
            taught=self.taught,
            outcome=outcome,
            step=step,
        )

    def state(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), **{name: vars(getattr(self, name)) for name in ("better", "worse")}}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Challenger":
        """Return the challenger of a state."""
        return cls(**{**state, **{name: Evidence(**state[name]) for name in ("better", "worse")}})
