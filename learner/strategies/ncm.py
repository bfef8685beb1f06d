"""NCM: a model that is not trained, whose last layer is computed from statistics of the classes.

Legend: B events, C classes, D dimensions of an embedding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from learner.model.features.learned import features_of
from learner.model.trained_set import base_parameters
from learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, StrategyContext, eval_mode, weighted
from learner.strategies.bounded import shortened
from learner.strategies.examples import Examples, Tensors

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

    replays = False
    sees_classes = False
    learns_gradient = False
    tasks = frozenset({"classification"})
    embeds = True

    def __init__(self, *, head: str = "") -> None:
        """Take the name of the linear layer that gives the logits; empty: the model's last."""
        self._name = head

    def setup(self, learner: StrategyContext) -> None:
        """Find the last layer, and check that the model's output is that layer applied to the embedding."""
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
        if device.type == "mps":
            raise SettingsError("learner.strategy: its sums are float64, which mps has not; set learner.device = 'cpu'")
        self._count_C = torch.zeros(classes, dtype=torch.float64, device=device)
        self._sum_CD = torch.zeros(classes, dim, dtype=torch.float64, device=device)
        self._usual = self._sum_CD.new_zeros(())
        """The usual length of an embedding."""

    def on_step_start(self) -> None:
        """Discard the embeddings of a step that is retried."""
        self._embedding: list[Tensor] = []

    def loss(self, _forward: Forward, new: Examples, _old: Sequence[Examples], whole: StepWeights) -> MicroBatchLoss:
        """Return the mean loss of the new events, for reports only."""
        embedding_BD, output_BC = self._run(new.features)
        self._embedding.append(embedding_BD)
        losses = self.learner.task.loss(output_BC, new.label_B)
        return MicroBatchLoss(weighted(losses, new.weight_B, whole.new), output_BC)

    def after_step(self, new: Examples, _output_B: Tensor) -> None:
        """Add the events of all ranks to the sums, and set the last layer's weights."""
        if self._learned is not None and not self._learned.numbers_are_fixed:
            return  # embeddings of these events will be others
        embedding_BD = torch.cat(self._embedding).double()
        embedding_BD = shortened(embedding_BD, new.weight_B, self._usual, self.learner.reduce)
        weight_B1 = new.weight_B.double()[:, None]
        for total, part in zip(self._totals(), self._parts(embedding_BD, weight_B1, new.label_B), strict=True):
            self.learner.reduce([part])
            # The sum, not the mean: a checkpoint may be restored on another number of ranks.
            total += part * self.learner.ranks
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
        """Return the sums, in the order of `_parts`."""
        return [self._count_C, self._sum_CD]

    def _parts(self, embedding_BD: Tensor, weight_B1: Tensor, label_B: Tensor) -> list[Tensor]:
        """Return the contribution of events to each sum."""
        count_C, sum_CD = torch.zeros_like(self._count_C), torch.zeros_like(self._sum_CD)
        count_C.index_add_(0, label_B, weight_B1[:, 0])
        return [count_C, sum_CD.index_add_(0, label_B, weight_B1 * embedding_BD)]

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

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {str(index): each for index, each in enumerate(self._totals())} | {"usual": self._usual}

    def restore(self, tensors: Tensors, _state: object) -> None:
        """Restore the sums of a checkpoint."""
        for index, each in enumerate(self._totals()):
            each.copy_(tensors[str(index)])
        self._usual.copy_(tensors["usual"])
