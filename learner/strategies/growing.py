"""Strategies whose model grows: the open part is trained, and a router chooses a part for each event.

Legend: B events, C classes, D dimensions of an embedding, P prototypes: one for each class of each part.
"""

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.examples import Examples, Tensors
from anabranch.learner.model.factory import eval_mode
from anabranch.learner.model.factory import forward as run
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.model.growing.column_pool import ColumnPool, leaves_of
from anabranch.learner.model.growing.pool import Pool, make_growing, module_named, pool_of, survey
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

MOST_DIMENSIONS = 4096
"""Of an embedding: the covariance has the square of that."""

log = logging.getLogger(__name__)


class RoutedParts(Strategy, abc.ABC):
    """Trains the open part of a growing model on all new events, and opens another when the stream changes.

    The open part is frozen when a new class comes, or when drift is detected, once it has trained on `least` events.
    The router compares embeddings of the frozen base with the mean of each class of each part, under one covariance
    within classes (as SLDA: Hayes & Kanan 2020). Means of a frozen part do not change. Sums are kept in float64.
    """

    tasks = frozenset({"classification"})

    def __init__(self, most: int, least: int, shrinkage: float) -> None:
        """Take the most parts, the events after which a part may be frozen, and how much of the covariance is replaced
        by the identity."""
        if not 0 < shrinkage <= 1:
            raise ValueError("shrinkage has to be more than 0 and at most 1")
        self._most, self._least, self._shrinkage = most, least, shrinkage
        self._classes: list[int] = []
        """Classes of the open part."""
        self._seen: set[int] = set()
        """Classes of all parts."""
        self._present: list[int] = []
        """Classes of this step."""
        self._embedding: list[Tensor] = []
        self._undo: Callable[[], None] | None = None
        """Undoes what this step has changed: it is taken only once all its numbers are known."""
        self._restore_optimizer: Callable[[], object] | None = None
        self._opened_for: str | None = None
        """Why this step has opened a part."""

    @override
    def setup(self, learner: StrategyContext) -> None:
        super().setup(learner)
        pool = pool_of(learner.model)
        assert pool is not None
        self._pool: Pool = pool
        classes, dim = pool.shift.shape[1], pool.router.weight.shape[1]
        device = pool.shift.device
        check_float64(device)
        if dim > MOST_DIMENSIONS:
            raise SettingsError(
                f"model.embedding: an embedding has {dim} numbers, and the router compares at most {MOST_DIMENSIONS}; "
                "name a module with fewer, such as one after pooling"
            )
        self._label = torch.zeros(0, dtype=torch.int64, device=device)
        """Classes of the open part, int64."""
        self._sums = [torch.zeros(size, dtype=torch.float64, device=device) for size in ((classes,), (classes, dim))]
        self._product_DD = self._sums[1].new_zeros(dim, dim)
        self._mean_PD = self._sums[1].new_zeros(0, dim)
        """Means of the classes of frozen parts."""
        self._within_DD, self._count = torch.zeros_like(self._product_DD), self._product_DD.new_zeros(())
        """Scatter within the classes of frozen parts, and their events."""
        self._usual = self._product_DD.new_zeros(())
        """The usual length of an embedding."""

    @override
    def loss(self, forward: Forward, new: Examples, _old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        assert step.present_C is not None
        self._open_for(_classes_in(step.present_C))
        logits_BC = forward(new.features)
        assert self._pool.embedding_BD is not None
        self._embedding.append(self._pool.embedding_BD)
        losses_B = self.learner.task.loss(logits_BC, new.label_B)
        output_BC = logits_BC.detach() if self._pool.size == 1 else self._predict(new)
        return MicroBatchLoss(weighted(losses_B, new.weight_B, step.new), output_BC, (), losses_B.detach())

    @override
    def after_step(self, new: Examples, _output_B: Tensor) -> None:
        add_to_class_sums((*self._sums, self._product_DD), self._embedding, new, self._usual, self.learner)
        self._seen.update(self._present)
        if not set(self._present) <= set(self._classes):
            self._set_classes(sorted({*self._classes, *self._present}))
        self._update_router()
        self._undo = None
        self._end_opening()

    @override
    def reset(self) -> None:
        self._embedding = []
        if self._undo is not None:
            self._undo()
            self._undo = None

    @override
    def on_drift(self) -> None:
        self._grow("the stream has changed")
        self._end_opening()

    def _open_for(self, classes: list[int]) -> None:
        """Freeze the open part where there are new classes, and let the open one predict all that are there; once for
        all micro-batches of a step."""
        self._present = classes
        if set(classes) <= set(self._classes) or self._undo is not None:
            return
        self._undo = self._restoring()
        new = [each for each in classes if each not in self._seen]
        if new and self._seen:
            self._grow(f"classes {', '.join(map(str, new))} are new")
        self._pool.open_to([*self._classes, *classes])

    def _restoring(self) -> Callable[[], None]:
        """Return what restores the parts, the sums and the optimizer as they are now."""
        weights = {weight: weight.detach().clone() for weight in self._pool.parameters()}
        sums, state = {name: value.clone() for name, value in self.tensors().items()}, self.state()
        warning, self._restore_optimizer = self.warning, None

        def restore() -> None:
            for weight, value in weights.items():
                weight.data = value
            self.restore(sums, state)
            self._opened_for, self.warning = None, warning
            if self._restore_optimizer is not None:
                self._restore_optimizer()

        return restore

    def _grow(self, reason: str) -> None:
        if self._sums[0].sum().item() < self._least:
            return
        if self._pool.size >= self._most:
            if self.warning is None:
                self.warning = (
                    f"learner.strategy: {reason}, and the model has most = {self._most} parts: the last one goes on "
                    "learning, at the cost of what it learned before; raise most, or least, to open parts less often"
                )
                log.warning("%s", self.warning)
            return
        count_C, sum_CD = self._sums
        mean_PD = self._open_means()
        self._mean_PD = torch.cat([self._mean_PD, mean_PD])
        self._within_DD += self._product_DD - sum_CD[self._label].T @ mean_PD
        self._count += count_C.sum()
        for total in (*self._sums, self._product_DD):
            total.zero_()
        self._pool.freeze_open()
        self._restore_optimizer = self.learner.reset_optimizer()
        self._set_classes([])
        self._opened_for = reason

    def _end_opening(self) -> None:
        reason, self._opened_for = self._opened_for, None
        if reason is not None:
            if (learned := features_of(self.learner.model)) is not None:
                learned.fix_numbers()  # else what is frozen would get other inputs for the same events
            log.info("%s: part %d of the model is opened, and the one before it is frozen", reason, self._pool.size)

    def _open_means(self) -> Tensor:
        count_C, sum_CD = self._sums
        return sum_CD[self._label] / count_C[self._label].clamp_min(1e-300)[:, None]

    def _set_classes(self, classes: list[int]) -> None:
        self._classes = classes
        self._label = torch.tensor(classes, dtype=torch.int64, device=self._label.device)

    def _update_router(self) -> None:
        """Set the prototypes: one for each class of each part."""
        router, (count_C, sum_CD) = self._pool.router, self._sums
        open_PD, frozen = self._open_means(), len(self._mean_PD)
        within_DD = self._within_DD + self._product_DD - sum_CD[self._label].T @ open_PD
        covariance_DD = within_DD / (self._count + count_C.sum()).clamp_min(1e-300)
        identity_DD = torch.eye(len(within_DD), dtype=within_DD.dtype, device=within_DD.device)
        variance = covariance_DD.diagonal().mean().clamp_min(1e-12)
        shrunk_DD = (1 - self._shrinkage) * covariance_DD + self._shrinkage * variance * identity_DD
        mean_PD = torch.cat([self._mean_PD, open_PD])
        # Less what all means have in common, which is the same for all prototypes, and would take float32's digits.
        centred_PD = mean_PD - mean_PD.mean(dim=0)
        # Without the check for a singular matrix, which this one never is: it would wait for the device.
        weight_PD = torch.linalg.solve_ex(shrunk_DD, centred_PD.T).result.T
        router.set(
            weight_PD.contiguous(),
            -(weight_PD * (mean_PD - centred_PD / 2)).sum(dim=1),
            torch.cat([router.owner[:frozen], torch.full_like(self._label, self._pool.size - 1)]),
            torch.cat([router.label[:frozen], self._label]),
        )

    @torch.no_grad()
    def _predict(self, new: Examples) -> Tensor:
        with eval_mode(self.learner.model):
            return torch.cat([run(self.learner.model, part.features) for part in self.learner.parts(new)])

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {
            "count": self._sums[0],
            "sum": self._sums[1],
            "product": self._product_DD,
            "mean": self._mean_PD,
            "within": self._within_DD,
            "frozen_count": self._count,
            "usual": self._usual,
        }

    @override
    def state(self) -> dict[str, Any]:
        return {"classes": self._classes, "seen": sorted(self._seen)}

    @override
    def restore(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        self._seen = set(state["seen"])
        self._set_classes(list(state["classes"]))
        restored = {name: value.to(self._label.device, copy=True) for name, value in tensors.items()}
        self._sums, self._product_DD = [restored["count"], restored["sum"]], restored["product"]
        self._mean_PD, self._within_DD, self._count = restored["mean"], restored["within"], restored["frozen_count"]
        self._usual = restored["usual"]


def _classes_in(present_C: Tensor) -> list[int]:
    """Return the classes of a step on the host: whether one is new decides which weights are trained."""
    return [index for index, present in enumerate(present_C.tolist()) if present]


class Progressive(RoutedParts):
    """Trains a column next to the frozen model, and freezes it when another one is opened.

    Rusu et al. 2016, "Progressive neural networks". In the paper the task of an event is given; here a router chooses.
    A column has as many parameters as the model, and as many again for each column before it in all layers but the
    first, so it is for small networks.
    """

    kind = KINDS["progressive"]

    def __init__(self, *, most: int = 5, least: int = 1000, shrinkage: float = 1e-4) -> None:
        """Take the most columns, without the frozen model, and the events after which a column may be frozen."""
        super().__init__(most, least, shrinkage)

    @override
    def convert(self, model: nn.Module, context: ModelContext) -> nn.Module:
        leaves_of(model)
        embedding = module_named(model, context.embedding, "progressive")
        found = survey(model, embedding, context)
        make_growing(model, ColumnPool(model, embedding, found.dim, found.classes, self._most).to(context.device))
        return model
