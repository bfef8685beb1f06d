"""The state of the demo at one moment, and whether it is complete."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anabranch.commands.demo.load_generator import LoadGenerator
from anabranch.commands.demo.producer import StreamProducer
from anabranch.learner.status.report import LearnerReport
from anabranch.learner.status.report import read_report as read_learner
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.reporting.report import read_report as read_serving

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class DemoSnapshot:
    """The state of the demo at one moment; figures that are not known yet are None."""

    seconds: float
    sent: int
    phase: int
    last_offsets: dict[str, int] | None
    """By `topic:partition`, once everything is sent."""
    learner: LearnerReport | None
    baseline: LearnerReport | None
    serving: ServingReport | None
    trained_through: dict[str, int]
    """Of the last reply."""
    requests: int
    failures: int
    last_failure: str | None
    restarts: dict[str, int]
    poisoned: bool = False
    """Whether the producer sends wrong labels on purpose now."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Events by outcome."""
        return self.learner.outcomes if self.learner else {}

    @property
    def problems(self) -> list[str]:
        """What does not work, in sentences."""
        parts = (("learner", self.learner), ("baseline", self.baseline), ("serving", self.serving))
        problems = [f"{name}: {sentence}" for name, report in parts if report for sentence in report.problems]
        problems += [f"{name} was started again {count} times" for name, count in self.restarts.items() if count]
        return [*problems, f"the last request failed: {self.last_failure}"] if self.last_failure else problems

    def accuracy(self, window: str, *, baseline: bool = False) -> float | None:
        """Return an accuracy of the learner or of its baseline."""
        report = self.baseline if baseline else self.learner
        return report.accuracy.get(window) if report else None

    def rules(self, window: str) -> dict[str, float]:
        """Return the accuracy of the baselines that need no model, by what they do, on the same events."""
        baselines = self.learner.baselines.values() if self.learner else ()
        return {each.rule: each.scores[window] for each in baselines if window in each.scores}


@dataclass(frozen=True)
class SnapshotSources:
    """Where figures come from."""

    begin: float
    """In seconds of the monotonic clock."""
    state_dir: Path
    baseline_state_dir: Path | None
    producer: StreamProducer
    load: LoadGenerator

    def read(self, restarts: dict[str, int]) -> DemoSnapshot:
        """Return the figures of this moment."""
        producer, load = self.producer, self.load
        return DemoSnapshot(
            seconds=time.monotonic() - self.begin,
            sent=producer.sent,
            phase=producer.phase,
            last_offsets=producer.last_offsets,
            learner=read_learner(self.state_dir),
            baseline=read_learner(self.baseline_state_dir) if self.baseline_state_dir else None,
            serving=read_serving(self.state_dir),
            trained_through=load.trained_through,
            requests=load.requests,
            failures=load.failures,
            last_failure=load.last_failure,
            restarts=restarts,
            poisoned=producer.poisoned,
        )


class Completion:
    """Whether everything that was sent has its outcome and has reached the served model."""

    def __init__(self, *, baseline: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._baseline = baseline
        self._clock = clock
        self._progress: object = None
        self._since = clock()

    def missing(self, figures: DemoSnapshot) -> str | None:
        """Return what is missing yet, as the rest of a sentence; None when nothing is."""
        if figures.last_offsets is None:
            return f"the producer has sent {figures.sent} events and is not done"
        done = sum(figures.outcomes.values())
        if done != figures.sent:
            return f"{figures.sent} events were sent, but {done} have an outcome"
        for partition, offset in figures.last_offsets.items():
            learned = figures.trained_through.get(partition, -1)
            if learned < offset:
                return f"the last reply's model has learned {partition} up to {learned}, not {offset}"
        baselines = sum(figures.baseline.outcomes.values()) if figures.baseline else 0
        if self._baseline and baselines != figures.sent:
            return f"{figures.sent} events were sent, but only {baselines} have an outcome in the baseline"
        return None

    def is_overdue(self, figures: DemoSnapshot) -> bool:
        """Whether nothing has moved for a minute."""
        baselines = sum(figures.baseline.outcomes.values()) if figures.baseline else 0
        progress = (figures.sent, sum(figures.outcomes.values()), baselines, figures.trained_through)
        if progress != self._progress:
            self._progress, self._since = progress, self._clock()
        return self._clock() - self._since > _PATIENCE_SECONDS
