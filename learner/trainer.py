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
from learner.embedding import Embedding
from learner.errors import CutError
from learner.model import forward
from learner.optimizer import build_optimizer
from learner.precision import Precision
from learner.strategy import Examples, Strategy
from learner.task import Task
from replay.draw import Draw

_SCALE_RETRIES = 16
"""How often fp16 may halve its loss scale within a step before the events themselves are to blame."""


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        finite: False when loss, gradient or running statistics were not finite; weights and statistics are as before.
        loss: of the step, a number.
        score: sum over the B new events of the task's score, by the predictions made before training on them.
        old_R: the loss of each replayed event, float32 `[R]` on the device; None when nothing was replayed.
        embedding_N: of the new events and the replayed ones after them, float32 `[B + R, D]` on the device; None unless
            it was asked for.
    """

    finite: bool
    loss: float
    score: float
    old_R: Tensor | None = None
    embedding_N: Tensor | None = None


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
        embedding: Embedding | None = None,
    ) -> None:
        self.model = model.train()
        self._embedding = embedding
        self.task = task
        self.device = device
        self._strategy = strategy
        self._features = [feature.name for feature in schema.features]
        self._precision = precision
        self._max_grad_norm = settings.max_grad_norm
        self._optimizer = build_optimizer(settings.optimizer, model.parameters())
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision.scaled)

    def examples(self, columns: Mapping[str, Array]) -> Examples:
        """Move the columns of B labelled events to the device."""
        return Examples(
            {name: self._tensor(columns[f"feature.{name}"]) for name in self._features},
            self._tensor(columns["label"]),
            self._tensor(columns["weight"]),
        )

    def rehearsal(self, draw: Draw) -> Examples:
        """Make examples of a draw: their weight is 0 where there is no label.

        The draw's importance makes up for how events were kept and drawn: where `[schema.weight]` is declared, heavy
        events are kept more often than light ones, and the rehearsed loss is that of the stream all the same.
        """
        columns = draw.columns
        labelled = columns["labelled"]
        label = torch.where(labelled, columns["label"], torch.zeros_like(columns["label"]))
        weight = torch.where(labelled, draw.importance, 0.0)
        return Examples({name: columns[f"feature.{name}"] for name in self._features}, label, weight)

    def step(self, new: Examples, old: Examples | None) -> StepResult:
        """Score the new events, then train on new and old.

        The predictions that are scored are those of the forward pass that the gradient comes from: the model has not
        seen the events before it, and a second pass would cost a third of the step. So dropout, where the model has
        it, is on.
        """
        rows = len(new.label_B)
        if rows == 1 and old is None:
            # Batch norm needs two: the event stands for another one of no weight.
            new = _twice(new)
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        scale = self._scaler.get_scale()
        finite, total, score, old_R = False, 0.0, 0.0, None
        for _ in range(_SCALE_RETRIES if self._precision.scaled else 1):
            total, norm, spoiled, score, old_R = self._backward(new, old, rows, before)
            finite = math.isfinite(total) and math.isfinite(norm) and not spoiled
            if finite:
                self._scaler.step(self._optimizer)
            else:
                self._put_back(before)
            if self._precision.scaled:
                self._scaler.update()
            if finite or not math.isfinite(total):
                break
        if not finite and self._precision.scaled:
            # The events are to blame, not the scale.
            self._scaler.update(scale)
        embedding = self._embedding.heard() if self._embedding is not None else None
        if embedding is not None and old is None:
            embedding = embedding[:rows]
        return StepResult(finite, total, score, old_R, embedding)

    def _backward(
        self, new: Examples, old: Examples | None, rows: int, before: Mapping[str, Tensor]
    ) -> tuple[float, float, bool, float, Tensor | None]:
        """Compute the gradient, clipped.

        Returns:
            The loss, the gradient's norm, whether running statistics that were finite `before` no longer are (an
            overflow can spoil them while loss and gradient look well), the score of the first `rows` events, and the
            loss of each old one.
        """
        self._optimizer.zero_grad(set_to_none=True)
        if self._embedding is not None:
            self._embedding.listen()
        with self._precision.autocast(self.device):
            loss = self._strategy.loss(lambda features: forward(self.model, features), self.task, new, old)
        self._scaler.scale(loss.total).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(self._optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        with torch.no_grad():
            score = self.task.score(loss.output_B[:rows], new.label_B[:rows]).sum()
            spoiled = torch.zeros((), dtype=torch.bool, device=self.device)
            for name, buffer in self.model.named_buffers():
                if buffer.is_floating_point() and name in before and before[name].shape == buffer.shape:
                    spoiled = spoiled | (before[name].isfinite() & ~buffer.isfinite()).any()
            # The one wait for the device in a step: whether its events were learned is settled before the next.
            numbers = torch.stack([loss.total.float(), norm.float(), spoiled.float(), score.float()]).tolist()
        return numbers[0], numbers[1], bool(numbers[2]), numbers[3], loss.old_R

    def _put_back(self, buffers: Mapping[str, Tensor]) -> None:
        """Undo what a forward pass left in buffers, also in those that the model binds anew."""
        for name, value in buffers.items():
            owner, _, attribute = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[attribute] = value.clone()

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
            raise CutError(
                "the newest cut does not fit the model or optimizer of the config; put those back, or begin anew by "
                f"moving the cuts away: {' '.join(str(exc).split())}"
            ) from exc

    def _tensor(self, column: Array) -> Tensor:
        return torch.from_numpy(column).to(self.device, non_blocking=True)


def _twice(one: Examples) -> Examples:
    """Return an event and its double, which has no weight."""
    return Examples(
        {name: torch.cat([value, value]) for name, value in one.features.items()},
        torch.cat([one.label_B, one.label_B]),
        torch.cat([one.weight_B, torch.zeros_like(one.weight_B)]),
    )
