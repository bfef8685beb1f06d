"""What is added to a model's output for each group: an intercept, learned in closed form from event to event.

It is the random intercept of a mixed model (Laird & Ware 1982, "Random-effects models for longitudinal data"): a number
for each output, whose prior is 0, so that a group of which nothing is known gets the output of the shared model. It is
its posterior mean, by one step of Newton's method for each event, so it has no learning rate. Only the strength of the
prior is learned, by the gradient of the loss of later events, as meta-learning does with learning rates (Gupta, Yadav
& Paull 2020, arXiv:2007.13904).

Legend: B events, N rows, K numbers of an output.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from anabranch.ingest.settings.features import LearnedVocabulary
from anabranch.learner.model.features.vocabulary import Ints, VocabularyTable
from anabranch.learner.model.task import Classification, MultiLabel, Regression, Task

_FIRST_STRENGTH = 2.0
_LEAST, _MOST = -4.0, 12.0
"""Natural logarithms of the strength of the prior."""
_LARGEST_CHANGE = 0.1
"""Of that logarithm, in one step."""
_KEPT = 0.999
"""What of the totals is kept in each step."""
_LARGEST_RESIDUAL = 1e15
"""Nothing is learned from a larger one, whose square may be infinite."""
_FAR = 16.0
"""A larger residual counts as so many usual ones: one wrong label of a regression must not rule a group."""
_SPREAD = 0.1
"""Of the logarithm of the usual residual, in one step."""
_TINY = 1e-12
_CURVATURE, _SQUARES, _INFORMATION = range(3)


class Residual(NamedTuple):
    """How far the output of events is from their label, and the curvature of their loss, float32 `[B, K]` each."""

    value_BK: Tensor
    information_BK: Tensor
    is_chance: bool = True
    """Whether values are differences of probabilities, which are bounded; else they are in the label's unit."""


def residual_of(task: Task, output_B: Tensor, label_B: Tensor) -> Residual:
    """Return the residual of the model's output for B events, by a task of which `[schema]` allows intercepts."""
    output = output_B.detach().float()
    if isinstance(task, Classification):
        chance_BK = output.softmax(dim=1)
        value_BK = functional.one_hot(label_B.long(), output.shape[1]) - chance_BK
    elif isinstance(task, MultiLabel):
        chance_BK = output.sigmoid()
        value_BK = label_B.float() - chance_BK
    else:
        assert isinstance(task, Regression)
        value_BK = label_B.float().reshape(-1, 1) - output.reshape(-1, 1)
        return Residual(value_BK, torch.ones_like(value_BK), is_chance=False)
    return Residual(value_BK, chance_BK * (1 - chance_BK))


class GroupIntercept(nn.Module):
    """Intercepts of the groups that are values of one feature, in a table of fixed size.

    Its buffers: `score` and `information`, float32 `[N, K]`, the sums over the events of each row, of which
    `score / (information + strength)` is the intercept; `log_strength` of the prior, in events of information 1; and
    `totals`; `usual`, the size of most residuals of a regression. The rows that groups without a row share remain 0.
    """

    def __init__(self, settings: LearnedVocabulary, width: int) -> None:
        """Start without groups; `width`: K."""
        super().__init__()
        self.table = VocabularyTable(settings)
        for name in ("score", "information"):
            self.register_buffer(name, torch.zeros(settings.learn, width))
        self.register_buffer("log_strength", torch.tensor(_FIRST_STRENGTH))
        self.register_buffer("totals", torch.zeros(3))
        self.register_buffer("usual", torch.zeros(()))

    def forward(self, keys_B: Tensor) -> Tensor:
        """Return the intercepts of groups, float32 `[B, K]`."""
        return self._mean(self.table(keys_B))[0]

    def erase(self, owners: Ints) -> None:
        """Take their intercepts from the groups that events of these owners alone were in."""
        rows = torch.from_numpy(self.table.erase(owners).rows)
        for name in ("score", "information"):
            buffer = self.get_buffer(name)
            buffer[rows.to(buffer.device)] = 0

    def observe(
        self, keys_B: Ints, time_ms: int, residual: Residual, weight_B: Tensor, owner_B: Ints | None = None
    ) -> None:
        """Learn from the events of one step, whose residuals are those of a pass with the intercepts as they are."""
        score, information = self.get_buffer("score"), self.get_buffer("information")
        keys = torch.from_numpy(keys_B).to(score.device)
        mean_BK, shrunk_BK = self._mean(self.table(keys))
        value_BK = torch.where(residual.value_BK.abs() < _LARGEST_RESIDUAL, residual.value_BK, 0)
        if not residual.is_chance:
            value_BK = self._bounded(value_BK)
        information_BK = residual.information_BK * weight_B[:, None]
        gradient_BK = value_BK * weight_B[:, None]
        self._learn_strength(mean_BK * shrunk_BK, value_BK, gradient_BK, information_BK)
        restarted = torch.from_numpy(self.table.observe(keys_B, time_ms, owner_B).rows).to(score.device)
        score[restarted] = information[restarted] = 0
        rows_B = self.table(keys)
        own_B1 = (rows_B >= self.table.shared)[:, None]
        # The label less the shared model's part alone, so that the sums hold at any strength of the prior.
        score.index_add_(0, rows_B, (gradient_BK + information_BK * mean_BK) * own_B1)
        information.index_add_(0, rows_B, information_BK * own_B1)

    def take_back(self, keys_B: Ints, label_B: Tensor, weight_B: Tensor) -> None:
        """Give events from which this has learned as class 0 another class: the sums are then those of that class."""
        score = self.get_buffer("score")
        rows_B = self.table(torch.from_numpy(keys_B).to(score.device))
        change_BK = functional.one_hot(label_B.long(), score.shape[1]).to(score)
        change_BK[:, 0] -= 1
        score.index_add_(0, rows_B, change_BK * weight_B[:, None] * (rows_B >= self.table.shared)[:, None])

    def _bounded(self, value_BK: Tensor) -> Tensor:
        """Return residuals, none of which is far larger than they usually are: what half of them are below.

        A median that follows the stream by a step for each batch (Robbins & Monro 1951), in any unit of the label.
        """
        usual, absolute_BK = self.get_buffer("usual"), value_BK.abs()
        first = absolute_BK.median()
        spread = 2 * (absolute_BK > usual).float().mean() - 1
        usual.copy_(torch.where(usual > 0, usual * (_SPREAD * spread).exp(), first))
        most = torch.where(usual > 0, _FAR * usual, torch.inf)
        return value_BK.clamp(-most, most)

    def _mean(self, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the intercepts of rows, and how much of each step towards the label the prior takes, in 0..1."""
        strength = self.get_buffer("log_strength").exp()
        precision_BK = self.get_buffer("information")[rows_B] + strength
        return self.get_buffer("score")[rows_B] / precision_BK, strength / precision_BK

    def _learn_strength(self, slope_BK: Tensor, value_BK: Tensor, gradient_BK: Tensor, information_BK: Tensor) -> None:
        """Take a step of Newton's method on the strength's logarithm, by which the intercepts change by `-slope_BK`."""
        totals = self.get_buffer("totals")
        totals[_SQUARES] = _KEPT * totals[_SQUARES] + (gradient_BK * value_BK).sum()
        totals[_INFORMATION] = _KEPT * totals[_INFORMATION] + information_BK.sum()
        dispersion = (totals[_SQUARES] / totals[_INFORMATION].clamp_min(_TINY)).clamp_min(_TINY)
        totals[_CURVATURE] = _KEPT * totals[_CURVATURE] + (information_BK * slope_BK.square()).sum() / dispersion
        change = (gradient_BK * slope_BK).sum() / dispersion / (1 + totals[_CURVATURE])
        change = change.nan_to_num().clamp(-_LARGEST_CHANGE, _LARGEST_CHANGE)
        self.get_buffer("log_strength").sub_(change).clamp_(_LEAST, _MOST)
