"""SLDA: models each class as a normal distribution of embeddings, with a shared covariance.

Legend: C classes, D dimensions of an embedding.
"""

import torch
from torch import Tensor

from learner.strategies.base import StrategyContext
from learner.strategies.ncm import NearestClassMean


class StreamingDiscriminant(NearestClassMean):
    """Linear discriminant analysis of the embeddings; all classes are equally likely.

    Hayes & Kanan 2020, "Lifelong machine learning with deep streaming linear discriminant analysis". The covariance is
    that of all events within their classes, exactly, whatever order they came in.
    """

    def __init__(self, *, head: str = "", shrinkage: float = 1e-4) -> None:
        """Take the name of the last layer, and how much of the covariance is replaced by the identity."""
        super().__init__(head=head)
        if not 0 < shrinkage <= 1:
            raise ValueError("shrinkage has to be more than 0 and at most 1")
        self._shrinkage = shrinkage

    def setup(self, learner: StrategyContext) -> None:
        """Find the last layer, and start with empty sums."""
        super().setup(learner)
        dim = self._sum_CD.shape[1]
        self._product_DD = self._sum_CD.new_zeros(dim, dim)

    def _totals(self) -> list[Tensor]:
        return [*super()._totals(), self._product_DD]

    def _parts(self, embedding_BD: Tensor, weight_B1: Tensor, label_B: Tensor) -> list[Tensor]:
        return [*super()._parts(embedding_BD, weight_B1, label_B), (weight_B1 * embedding_BD).T @ embedding_BD]

    @property
    def covariance(self) -> Tensor:
        """The covariance within classes, float64 `[D, D]`."""
        within_DD = self._product_DD - self._sum_CD.T @ self.means
        return within_DD / self._count_C.sum().clamp_min(1e-300)

    def _answer(self) -> tuple[Tensor, Tensor]:
        covariance_DD, mean_CD = self.covariance, self.means
        eye_DD = torch.eye(len(covariance_DD), dtype=covariance_DD.dtype, device=covariance_DD.device)
        shrunk_DD = (1 - self._shrinkage) * covariance_DD + self._shrinkage * eye_DD
        # Without the check for a singular matrix, which this one never is: it would wait for the device.
        weight_CD = torch.linalg.solve_ex(shrunk_DD, mean_CD.T).result.T
        return weight_CD, -(weight_CD * mean_CD).sum(dim=1) / 2
