"""Scores of versions on held-out events: of those that others are compared with, and of each new one."""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.ingest.events.block import Array
from anabranch.learner.evaluate.adwin import winsorized
from anabranch.learner.evaluate.forgetting import ForgettingState, retention_of
from anabranch.learner.evaluate.holdout import HoldoutRows
from anabranch.learner.evaluate.measures import Outcomes
from anabranch.learner.evaluate.scoring import Evaluation, EventScores, Scorer, Scores, evaluation_of, newcomers
from anabranch.learner.model.answer_rule import AnswerRule
from anabranch.learner.versions.verdict import Marks

_SHARE = 4
"""Scoring uses at most 1 / `_SHARE` of a core or CUDA device; versions due meanwhile are skipped."""

Hashes = NDArray[np.uint64]
"""Hashes of the identities of events."""


@dataclass
class Baseline:
    """The weights of a version, and its scores by event and label: each is scored once. Used by one thread.

    A held-out event may get another label later, and then has another score.
    """

    number: int
    weights: Mapping[str, Tensor]
    held_out: Hashes
    """The events that were held out when it was published."""
    rule: AnswerRule | None = None
    """From which it answers."""
    _scored: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    _labels: Array | None = None
    _scores: Scores = field(default_factory=lambda: np.empty(0))
    _predicted: NDArray[np.float32] | None = None

    def held_out_before(self, hashes: Hashes) -> Marks:
        """Return which events had been held out when this version was published."""
        return np.isin(hashes, self.held_out)

    def set_scores(self, columns: Mapping[str, Array], scores: Scores, predicted: NDArray[np.float32]) -> None:
        """Store its scores on G events, columns `[G, ...]`, and what measures need; drop earlier ones."""
        hashes = columns["hash"].astype(np.uint64)
        order = np.argsort(hashes)
        self._scored, self._labels = hashes[order], columns["label"][order]
        self._scores, self._predicted = scores[order], predicted[order]

    def scores(self, scorer: Scorer, columns: Mapping[str, Array]) -> Scores:
        """Return its scores on G events; see `scores_and_predicted`."""
        return self.scores_and_predicted(scorer, columns)[0]

    def scores_and_predicted(self, scorer: Scorer, columns: Mapping[str, Array]) -> tuple[Scores, NDArray[np.float32]]:
        """Return its scores on G events, columns `[G, ...]`, and what measures need, `[G, K]`; only those without a
        stored score of the same label are scored."""
        hashes, label = columns["hash"].astype(np.uint64), columns["label"]
        kept, scores = np.isin(hashes, self._scored), np.empty(len(hashes))
        predicted = np.full((len(hashes), scorer.measures.columns), np.nan, np.float32)
        if self._labels is not None and self._predicted is not None:
            at = np.searchsorted(self._scored, hashes[kept])
            same = (self._labels[at] == label[kept]).all(axis=tuple(range(1, label.ndim)))
            kept[kept] = same
            scores[kept], predicted[kept] = self._scores[at[same]], self._predicted[at[same]]
        if not kept.all():
            fresh = {name: column[~kept] for name, column in columns.items()}
            scores[~kept], predicted[~kept], *_ = scorer.score_and_find(self.weights, fresh, self.rule)
        self.set_scores(columns, scores, predicted)
        return scores, predicted


class VersionScoring:
    """Used by the publisher's thread; any thread may read the attributes."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._newest: tuple[HoldoutRows, Mapping[str, Tensor], AnswerRule | None] | None = None
        self.rested_at = 0.0
        """When the next version may be scored, by `time.monotonic`."""
        self.evaluation = Evaluation()
        """Evaluation of the newest version, whatever its verdict."""
        self.retention = ForgettingState()
        """Best scores of earlier versions, and scores of versions on events that came after them."""
        self.outcomes: Outcomes | None = None
        """Of the newest version on the holdout set, for the intervals of its measures; replaced, not changed."""

    @property
    def raised(self) -> deque[tuple[NDArray[np.uint64], str]]:
        """Hashes of held-out events on which the model raised, and the error; the loop's thread removes them."""
        return self._scorer.raised

    def score(
        self, weights: Mapping[str, Tensor], holdout: HoldoutRows, rule: AnswerRule | None = None
    ) -> tuple[EventScores, HoldoutRows]:
        """Score a version, which answers by `rule`, on the holdout set, and the one before it on events since then.

        Return the scores and their events, without those on which the model raises.
        """
        begin = self._scorer.seconds()
        self._score_near_future(holdout)
        found = self._scorer.score_and_find(weights, holdout.columns, rule)
        if len(found.raised):
            stays = ~np.isin(holdout.columns["hash"].astype(np.uint64), found.raised)
            found = found._replace(scores=found.scores[stays], predicted=found.predicted[stays])
            holdout = holdout.without(found.raised)
        self._newest = holdout, weights, rule
        self.evaluation = evaluation_of(found.scores, self._scorer.schema, holdout)
        self._measure(found.predicted, holdout)
        if self.evaluation.windows:
            self.retention = self.retention.followed_by(self.evaluation)
        self.rested_at = time.monotonic() + (_SHARE - 1) * (self._scorer.seconds() - begin)
        return found, holdout

    def _measure(self, predicted_GK: NDArray[np.float32], holdout: HoldoutRows) -> None:
        """Compute the measures of the newest version, unless there are too few events for any score."""
        measures = self._scorer.measures
        if not measures.each or not self.evaluation.windows:
            return
        outcomes = measures.outcomes(predicted_GK, holdout.columns)
        outcomes = outcomes.where(np.flatnonzero(np.isfinite(predicted_GK).all(axis=1)))
        known = measures.values(outcomes)
        constant = {name: measures.each[name].constant(outcomes) for name in known}
        constant = {**self.evaluation.constant, **constant}
        self.evaluation = replace(self.evaluation, measures=known, constant=constant)
        self.outcomes = outcomes

    def _score_near_future(self, holdout: HoldoutRows) -> None:
        """Score the previous version on held-out events that came after it."""
        if self._newest is None:
            return
        rows, weights, rule = self._newest
        fresh = newcomers(holdout, rows)
        if fresh and len(fresh["label"]):
            scores, _, raised, _ = self._scorer.score_and_find(weights, fresh, rule)
            stays = ~np.isin(fresh["hash"].astype(np.uint64), raised)
            scores = scores[stays] if self._scorer.bounded else winsorized(scores[stays])
            total = float(np.sum(scores))
            if math.isfinite(total) and stays.any():
                self.retention = self.retention.with_near(int(np.count_nonzero(stays)), total)

    def state(self) -> dict[str, Any]:
        """Return the state of `retention` as plain values, for a checkpoint."""
        return self.retention.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `retention` from a checkpoint."""
        self.retention = retention_of(state)
