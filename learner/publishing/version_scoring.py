"""Scores of each version on the holdout set, and of the version before it on events that came since."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.events.schema import Schema
from learner.evaluation.forgetting_metric import ForgettingState, retention_of
from learner.evaluation.holdout import HoldoutRows
from learner.evaluation.scoring import Evaluation, Scorer, Scores, evaluation_of, newcomers
from learner.evaluation.winsorizing import winsorized

_SHARE = 4
"""Scoring uses at most 1 / `_SHARE` of a core or CUDA device; versions due meanwhile are skipped."""


class VersionScoring:
    """Used by the publisher's thread; any thread may read the attributes."""

    def __init__(self, scorer: Scorer, schema: Schema) -> None:
        self._scorer = scorer
        self._schema = schema
        self._newest: tuple[HoldoutRows, Mapping[str, Tensor]] | None = None
        self.rested_at = 0.0
        """When the next version may be scored, by `time.monotonic`."""
        self.evaluation = Evaluation()
        """Evaluation of the newest version, whatever its verdict."""
        self.retention = ForgettingState()
        """Best scores of earlier versions, and scores of versions on events that came after them."""

    @property
    def raised(self) -> deque[tuple[NDArray[np.uint64], str]]:
        """Hashes of held-out events on which the model raised, and the error; the loop's thread removes them."""
        return self._scorer.raised

    def score(self, weights: Mapping[str, Tensor], holdout: HoldoutRows) -> tuple[Scores, HoldoutRows]:
        """Score a version on the holdout set, and the version before it on events that came since.

        Return the scores and their events, without those on which the model raises.
        """
        begin = self._scorer.seconds()
        self._score_near_future(holdout)
        scores_G, raised = self._scorer.score_and_find(weights, holdout.columns)
        if len(raised):
            scores_G = scores_G[~np.isin(holdout.columns["hash"].astype(np.uint64), raised)]
            holdout = holdout.without(raised)
        self._newest = holdout, weights
        self.evaluation = evaluation_of(scores_G, self._schema, holdout)
        if self.evaluation.windows:
            self.retention = self.retention.followed_by(self.evaluation)
        self.rested_at = time.monotonic() + (_SHARE - 1) * (self._scorer.seconds() - begin)
        return scores_G, holdout

    def _score_near_future(self, holdout: HoldoutRows) -> None:
        """Score the previous version on held-out events that came after it."""
        if self._newest is None:
            return
        rows, weights = self._newest
        fresh = newcomers(holdout, rows)
        if fresh and len(fresh["label"]):
            scores, raised = self._scorer.score_and_find(weights, fresh)
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
