"""Scores old events before a step, without training on them: the input of `replay_ratio = "auto"`."""

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from learner.adaptation.replay_ratio import Ratio, ScoreSum
from learner.errors import MemoryShortageError
from learner.evaluation.holdout import HoldoutSet
from learner.model.faulty_events import RaisingEventsError
from learner.strategies.examples import examples_of
from learner.training.trainer import Trainer
from replay.sample_plan import Sample
from replay.sampling.step_rng import StepRng

ENOUGH = 100
"""Fewest older held-out events that are scored in place of stored ones."""
_SEED = 0x3C6EF372


class Probe:
    """Scores held-out events, except the youngest, if there are enough of them; else events of the store.

    A model memorises the events of a small store: their scores stay high while the model forgets similar events.
    """

    def __init__(self, ratio: Ratio, holdout: HoldoutSet, trainer: Trainer, rows: int) -> None:
        """Take the ratio, which chooses the steps that probe, and the number of events that each of them scores."""
        self._ratio = ratio
        self._holdout = holdout
        self._trainer = trainer
        self._rows = rows
        self._rng = StepRng(_SEED)
        self.raised: deque[tuple[NDArray[np.uint64], str]] = deque()
        """Hashes of held-out events on which the model raised, and the error; the loop removes them from the set."""

    def sampled(self, step: int) -> int:
        """Return how many events of the store a step has to sample for the probe."""
        return self._rows if self._ratio.probes(step) and self._holdout.older < ENOUGH else 0

    def score(self, step: int, sample: Sample | None) -> ScoreSum | None:
        """Score old events if the step probes.

        Returns None in other steps, without old events, where the model raises, where the device has no memory for it,
        and for scores that are not finite.
        """
        if not self._ratio.probes(step):
            return None
        held_out: Mapping[str, Array] = {}
        if (older := self._holdout.older) >= ENOUGH:
            held_out = self._holdout.take(self._rng.for_step(step).integers(older, size=self._rows))
            examples = self._trainer.examples(held_out)
        elif sample is not None and len(sample):
            examples = examples_of(sample.first(self._rows), (self._rows,))[0]
        else:
            return None
        try:
            rows, score = self._trainer.probe(examples)
        except RaisingEventsError as exc:
            if held_out:
                self.raised.append((held_out["hash"].astype(np.uint64)[exc.indices], exc.message))
            return None
        except MemoryShortageError:
            return None
        return ScoreSum(rows, score) if math.isfinite(score) else None
