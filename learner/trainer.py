"""One step: test, then train.

Legend: B new events, R replayed ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ingest.block import Array
from ingest.schema import Schema
from learner.config import LearnerSettings
from learner.errors import CutError
from learner.model import forward
from learner.optimizer import build_optimizer
from learner.precision import Precision
from learner.strategy import Examples, Strategy
from learner.task import Task

_SCALE_RETRIES = 16
"""How often fp16 may halve its loss scale within a step before the events themselves are to blame."""


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        finite: False when loss, gradient or running statistics were not finite; weights and statistics are as before.
        loss: of the step, a number.
        score: sum over the B new events of the task's score, by the predictions made before training on them.
    """

    finite: bool
    loss: float
    score: float


class Trainer:
    """Owns the model, its optimizer and the loss scaler. Used by one thread."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        strategy: Strategy,
        schema: Schema,
        settings: LearnerSettings,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.model = model.train()
        self.task = task
        self.device = device
        self._strategy = strategy
        self._features = [feature.name for feature in schema.features]
        self._precision = precision
        self._max_grad_norm = settings.max_grad_norm
        self._optimizer = build_optimizer(settings.optimizer, model.parameters())
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision.scaled)
        self._buffers = list(model.buffers())

    def examples(self, columns: Mapping[str, Array]) -> Examples:
        """Move the columns of B labelled events to the device."""
        return Examples(
            {name: self._tensor(columns[f"feature.{name}"]) for name in self._features},
            self._tensor(columns["label"]),
            self._tensor(columns["weight"]),
        )

    def rehearsal(self, columns: Mapping[str, Tensor]) -> Examples:
        """Make examples of a draw.

        Their weight is 1 whatever `[schema.weight]` says, since the weighted reservoir has seen to it by drawing heavy
        events more often, and 0 where there is no label.
        """
        labelled = columns["labelled"]
        label = torch.where(labelled, columns["label"], torch.zeros_like(columns["label"]))
        return Examples({name: columns[f"feature.{name}"] for name in self._features}, label, labelled.float())

    def step(self, new: Examples, old: Examples | None) -> StepResult:
        """Score the new events, then train on new and old.

        The predictions that are scored are those of the forward pass that the gradient comes from: the model has not
        seen the events before it, and a second pass would cost a third of the step. So dropout, where the model has
        it, is on.
        """
        buffers = [buffer.clone() for buffer in self._buffers]
        finite, total, score = False, 0.0, 0.0
        for _ in range(_SCALE_RETRIES if self._precision.scaled else 1):
            total, norm, statistics, score = self._backward(new, old)
            finite = math.isfinite(total) and math.isfinite(norm) and math.isfinite(statistics)
            if finite:
                self._scaler.step(self._optimizer)
            if self._precision.scaled:
                self._scaler.update()
            if finite or not math.isfinite(total):
                break
        if not finite:
            # Undo what the forward pass left in running statistics.
            for buffer, before in zip(self._buffers, buffers, strict=True):
                buffer.copy_(before)
        return StepResult(finite, total, score)

    def _backward(self, new: Examples, old: Examples | None) -> list[float]:
        """Compute the gradient, clipped.

        Returns:
            The loss, the gradient's norm, the sum of the running statistics (which an overflow can spoil while loss and
            gradient look well), and the score of the new events.
        """
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision.autocast(self.device):
            loss = self._strategy.loss(lambda features: forward(self.model, features), self.task, new, old)
        self._scaler.scale(loss.total).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(self._optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        with torch.no_grad():
            score = self.task.score(loss.output_B, new.label_B).sum()
            statistics = sum((buffer.sum(dtype=torch.float32) for buffer in self._buffers), torch.zeros_like(score))
            # The one wait for the device in a step: whether its events were learned is settled before the next.
            numbers: list[float] = torch.stack([loss.total.float(), norm.float(), statistics, score.float()]).tolist()
        return numbers

    def snapshot(self) -> dict[str, Tensor]:
        """Copy the weights and buffers as they are now, on the device; later steps do not change the copy."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and the optimizer's tensors, copied on the device, for a cut."""
        state = self._optimizer.state_dict()["state"]
        moments = {
            f"{index}.{name}": value.detach().clone()
            for index, values in state.items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        return {"model": self.snapshot(), "optimizer": moments}

    def state(self) -> dict[str, Any]:
        """What optimizer and scaler have beside tensors, as JSON values, for a cut."""
        optimizer = self._optimizer.state_dict()
        others = {
            str(index): {name: value for name, value in values.items() if not isinstance(value, Tensor)}
            for index, values in optimizer["state"].items()
        }
        return {"groups": optimizer["param_groups"], "others": others, "scaler": self._scaler.state_dict()}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Take up the weights and the optimizer of a cut.

        The settings of the optimizer (learning rate and so on) stay those of the config: what the user changed between
        two starts is to hold.

        Raises:
            CutError: they are of another model or optimizer.
        """
        moments: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in state["others"].items()}
        for name, value in tensors["optimizer"].items():
            index, _, key = name.partition(".")
            moments.setdefault(int(index), {})[key] = value
        try:
            self.model.load_state_dict(dict(tensors["model"]))
            groups = self._optimizer.state_dict()["param_groups"]
            if [len(group["params"]) for group in groups] != [len(group["params"]) for group in state["groups"]]:
                raise ValueError("the optimizer has other parameters")
            self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
            self._scaler.load_state_dict(state["scaler"] if self._precision.scaled else {})
        except (RuntimeError, KeyError, ValueError) as exc:
            raise CutError(f"the newest cut does not fit the model or optimizer of the config: {exc}") from exc

    def _tensor(self, column: Array) -> Tensor:
        return torch.from_numpy(column).to(self.device, non_blocking=True)
