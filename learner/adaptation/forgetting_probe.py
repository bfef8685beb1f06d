"""How old events do before a step, without learning from them: what `replay_ratio = "auto"` goes by."""

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from learner.adaptation.replay_ratio import Ratio, ScoreSum
from learner.evaluation.holdout import HoldoutSet
from learner.model.faulty_events import RaisingEventsError
from learner.strategies.examples import examples_of
from learner.training.trainer import Trainer
from replay.plan import Sample
from replay.sampling.step_rng import StepRng

ENOUGH = 100
"""Held-out events below this are too few to go by."""
_SEED = 0x3C6EF372


class Probe:
    """Scores held-out events, older than the youngest, where there are enough of them; else events of the store.

    Those of a small store are soon known by heart: they go on doing well while what they stand for is forgotten.
    """

    def __init__(self, ratio: Ratio, holdout: HoldoutSet, trainer: Trainer, rows: int) -> None:
        """`ratio` says which steps measure; `rows` events are scored in each."""
        self._ratio = ratio
        self._holdout = holdout
        self._trainer = trainer
        self._rows = rows
        self._chance = StepRng(_SEED)
        self.raised: deque[tuple[NDArray[np.uint64], str]] = deque()
        """Hashes of held-out events on which the model raised, and what it raised: to take out of the held-out set."""

    def sampled(self, step: int) -> int:
        """Return how many events a step has to sample for it: none where held-out ones are scored, or nothing is."""
        return self._rows if self._ratio.probes(step) and self._holdout.older < ENOUGH else 0

    def score(self, step: int, sample: Sample | None) -> ScoreSum | None:
        """Score old events if the step measures; None: there are none, the model raises on one, or the scores
        are not finite."""
        if not self._ratio.probes(step):
            return None
        held: Mapping[str, Array] = {}
        if (older := self._holdout.older) >= ENOUGH:
            held = self._holdout.take(self._chance.for_step(step).integers(older, size=self._rows))
            examples = self._trainer.examples(held)
        elif sample is not None and len(sample):
            examples = examples_of(sample.first(self._rows), (self._rows,))[0]
        else:
            return None
        try:
            rows, score = self._trainer.probe(examples)
        except RaisingEventsError as exc:
            if held:
                self.raised.append((held["hash"].astype(np.uint64)[exc.indices], exc.message))
            return None
        return ScoreSum(rows, score) if math.isfinite(score) else None
