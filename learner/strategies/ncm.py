"""NCM and SLDA: models that are not trained, whose last layer is computed from statistics of the classes.

Legend: B events, C classes, D dimensions of an embedding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.learner.model.examples import Examples, Tensors
from anabranch.learner.model.factory import eval_mode
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.model.trained_set import base_parameters
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.base import (
    Forward,
    MicroBatchLoss,
    StepWeights,
    Strategy,
    StrategyContext,
    add_to_class_sums,
    check_float64,
    weighted,
)

_SCALED = 1000
"""Events by which numbers are scaled. They are no part of the sums, whose embeddings have to be of one space."""
_NEVER = -1e6
"""The logit of a class that has not been seen."""


class NearestClassMean(Strategy):
    """Predicts the class whose mean embedding is nearest, by setting the weights of the last layer.

    The squared distance to a mean is linear, except for a term that all classes share. The rest of the model is not
    trained and runs in evaluation mode, so it needs pretrained weights. Sums are kept in float64.
    (Mensink et al. 2013, "Distance-based image classification".)
    """

    kind = KINDS["ncm"]
    sees_classes = False
    tasks = frozenset({"classification"})

    def __init__(self, *, head: str = "") -> None:
        """Take the name of the linear layer that gives the logits; empty: the model's last."""
        self._name = head

    @override
    def setup(self, learner: StrategyContext) -> None:
        super().setup(learner)
        self._head = self._find_head()
        self._learned = features_of(learner.model)
        if self._learned is not None:
            self._learned.fix_numbers(after=_SCALED)
        embedding_BD, output_BC = self._run(learner.probe)
        classes, dim = self._head.weight.shape
        if embedding_BD.shape[1] != dim or not torch.allclose(self._logits(embedding_BD), output_BC, atol=1e-3):
            raise SettingsError(
                f"learner.strategy: the model's output is not that of the linear layer {self._name} on the embedding, "
                "which has to be its very input; set model.embedding to the module before it"
            )
        frozen = {id(value) for value in base_parameters(learner.model).values()}
        if frozen & {id(value) for value in self._head.parameters()}:
            raise SettingsError(
                f"learner.strategy sets the weights of the linear layer {self._name}, and the factory has frozen them; "
                "leave that layer out when you freeze weights"
            )
        device = self._head.weight.device
        check_float64(device)
        self._count_C = torch.zeros(classes, dtype=torch.float64, device=device)
        self._sum_CD = torch.zeros(classes, dim, dtype=torch.float64, device=device)
        self._usual = self._sum_CD.new_zeros(())
        """The usual length of an embedding."""

    @override
    def reset(self) -> None:
        self._embedding: list[Tensor] = []

    @override
    def loss(self, _forward: Forward, new: Examples, _old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        embedding_BD, output_BC = self._run(new.features)
        self._embedding.append(embedding_BD)
        losses = self.learner.task.loss(output_BC, new.label_B)
        return MicroBatchLoss(weighted(losses, new.weight_B, step.new), output_BC)

    @override
    def after_step(self, new: Examples, _output_B: Tensor) -> None:
        if self._learned is not None and not self._learned.numbers_are_fixed:
            return  # embeddings of these events will be others
        add_to_class_sums(self._totals(), self._embedding, new, self._usual, self.learner)
        weight_CD, bias_C = self._answer()
        seen_C = self._count_C > 0
        with torch.no_grad():
            self._head.weight.copy_(torch.where(seen_C[:, None], weight_CD, 0.0))
            self._head.bias.copy_(torch.where(seen_C, bias_C, _NEVER))

    @property
    def means(self) -> Tensor:
        """The mean embedding of each class, 0 of those that have not been seen, float64 `[C, D]`."""
        return self._sum_CD / self._count_C.clamp_min(1e-300)[:, None]

    def _answer(self) -> tuple[Tensor, Tensor]:
        """Return weights and biases of the negative squared distance to each class, without the shared term."""
        mean_CD = self.means
        return 2 * mean_CD, -mean_CD.square().sum(dim=1)

    def _totals(self) -> list[Tensor]:
        """Return the sums, in the order of `add_to_class_sums`."""
        return [self._count_C, self._sum_CD]

    def _run(self, features: Tensors) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits, in evaluation mode and float32."""
        assert self.learner.embed is not None
        device = self._head.weight.device.type
        with eval_mode(self.learner.model), torch.no_grad(), torch.autocast(device, enabled=False):
            embedding_BD, output_BC = self.learner.embed(features)
        return embedding_BD, output_BC.float()

    def _logits(self, embedding_BD: Tensor) -> Tensor:
        logits_BC: Tensor = self._head(embedding_BD.to(self._head.weight.dtype))
        return logits_BC.float()

    def _find_head(self) -> nn.Linear:
        """Return the layer of that name; raises SettingsError when it is no linear layer with a bias."""
        layers = {name: each for name, each in self.learner.model.named_modules() if isinstance(each, nn.Linear)}
        self._name = self._name or next(reversed(layers), "")
        head = layers.get(self._name)
        if head is None or head.bias is None:
            raise SettingsError(
                f"learner.strategy: head = {self._name!r} has to be a linear layer with a bias; the model's are "
                f"{', '.join(name for name, each in layers.items() if each.bias is not None) or 'none'}"
            )
        return head

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {str(index): each for index, each in enumerate(self._totals())} | {"usual": self._usual}

    @override
    def restore(self, tensors: Tensors, _state: object) -> None:
        for index, each in enumerate(self._totals()):
            each.copy_(tensors[str(index)])
        self._usual.copy_(tensors["usual"])


class StreamingDiscriminant(NearestClassMean):
    """Linear discriminant analysis of the embeddings; all classes are equally likely.

    Hayes & Kanan 2020, "Lifelong machine learning with deep streaming linear discriminant analysis". The covariance is
    that of all events within their classes, exactly, whatever order they came in.
    """

    kind = KINDS["slda"]

    def __init__(self, *, head: str = "", shrinkage: float = 1e-4) -> None:
        """Take the name of the last layer, and how much of the covariance is replaced by the identity."""
        super().__init__(head=head)
        if not 0 < shrinkage <= 1:
            raise ValueError("shrinkage has to be more than 0 and at most 1")
        self._shrinkage = shrinkage

    @override
    def setup(self, learner: StrategyContext) -> None:
        super().setup(learner)
        dim = self._sum_CD.shape[1]
        self._product_DD = self._sum_CD.new_zeros(dim, dim)

    @override
    def _totals(self) -> list[Tensor]:
        return [*super()._totals(), self._product_DD]

    @property
    def covariance(self) -> Tensor:
        """The covariance within classes, float64 `[D, D]`."""
        within_DD = self._product_DD - self._sum_CD.T @ self.means
        return within_DD / self._count_C.sum().clamp_min(1e-300)

    @override
    def _answer(self) -> tuple[Tensor, Tensor]:
        covariance_DD, mean_CD = self.covariance, self.means
        eye_DD = torch.eye(len(covariance_DD), dtype=covariance_DD.dtype, device=covariance_DD.device)
        shrunk_DD = (1 - self._shrinkage) * covariance_DD + self._shrinkage * eye_DD
        # Without the check for a singular matrix, which this one never is: it would wait for the device.
        weight_CD = torch.linalg.solve_ex(shrunk_DD, mean_CD.T).result.T
        return weight_CD, -(weight_CD * mean_CD).sum(dim=1) / 2
