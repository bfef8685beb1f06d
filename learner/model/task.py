"""Tasks: the loss, score and predictions of a model's output.

Legend: B events, C classes, L positions of a label. `output` is what the module returned for a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from anabranch.ingest.events.schema import IGNORED, Label
from anabranch.learner.errors import ModelError

METHODS = ("check", "loss", "score", "predict")
"""What every task has."""


class Task(Protocol):
    """The meaning of the model's output. Called on the learner's device and in serving; keeps no state.

    An optional method, `embed(model, features)`, returns the embeddings of events, floats `[B, D]`. Another one,
    `distil(output_B, teacher_B, temperature)`, is what a teacher needs (`Distils`). An optional attribute, `measures`,
    is a list of `TaskMeasure`.
    """

    def check(self, output_B: Tensor, label: Label, rows: int) -> None:
        """Raise ModelError when the output for `rows` events does not fit the schema's label."""
        ...

    def loss(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return the loss of each event, float32 `[B]`."""
        ...

    def score(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return how good each prediction is, float32 `[B]`: 1 for right and 0 for wrong, or minus the error."""
        ...

    def predict(self, output_B: Tensor) -> dict[str, Tensor]:
        """Return the named outputs that serving replies with, each `[B, ...]` on the CPU's dtypes."""
        ...


@dataclass(frozen=True)
class TaskMeasure:
    """A measure that a user adds, in `measures` of a task that is a built-in one or derived from it.

    Attributes:
        name: a-z, 0-9 and `_`; `[gate] measures` takes it.
        of: returns the measure of N events, 1 or more. It gets copies: predictions and labels. Two classes:
            the probability of class 1, float64 `[N]`, and int64 `[N]`. More classes: the most likely one, int64 `[N]`,
            and int64 `[N]`. Several labels: the probabilities, float64 `[N, C]`, and bool `[N, C]`. Regression: the
            number, float64 `[N]`, and the label's dtype `[N]`. It is called for resamples too, some 200 times for a
            version, on any thread; NaN is not defined.
        higher: whether higher is better.
        relative: whether the drop that the gate allows is a fraction of the value.
    """

    name: str
    of: Callable[[NDArray[Any], NDArray[Any]], float]
    higher: bool = True
    relative: bool = False


@runtime_checkable
class Embeds(Protocol):
    """A task that computes embeddings of events."""

    def embed(self, model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of events, floats `[B, D]`; the model is in evaluation mode, and no graph is kept."""
        ...


@runtime_checkable
class Distils(Protocol):
    """A task with which a model can learn from the outputs of a teacher."""

    def distil(self, output_B: Tensor, teacher_B: Tensor, temperature: float) -> Tensor:
        """Return how far each output is from the teacher's, float32 `[B]`, with a gradient for `output_B` alone."""
        ...


class Classification:
    """One of C classes: the output is logits `[B, C]`, labels are int64 `[B]` in `0..C-1`."""

    def check(self, output_B: Tensor, label: Label, rows: int) -> None:
        """Raise ModelError unless the output is floating point `[rows, classes]`."""
        if label.classes is None:
            raise ModelError(
                'model.task is "classification", but schema.label has no classes; set them, or write "regression"'
            )
        if label.multi:
            raise ModelError('model.task is "classification", but schema.label.multi is true; write "multilabel"')
        if label.length is not None:
            raise ModelError(
                'model.task is "classification", but schema.label has a length; write "token-classification"'
            )
        _check_output(output_B, (rows, label.classes), 'task "classification"')

    def loss(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return the cross entropy of each event, float32 `[B]`."""
        return functional.cross_entropy(output_B.float(), label_B, reduction="none")

    def score(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return 1 where the most likely class is the label, else 0; float32 `[B]`."""
        return (output_B.argmax(dim=1) == label_B).float()

    def distil(self, output_B: Tensor, teacher_B: Tensor, temperature: float) -> Tensor:
        """Return the KL divergence from the teacher's classes at a temperature, times its square, float32 `[B]`.

        The factor keeps the size of gradients independent of the temperature (Hinton et al. 2015).
        """
        student_BC = (output_B.float() / temperature).log_softmax(dim=1)
        target_BC = (teacher_B.float() / temperature).log_softmax(dim=1)
        loss_BC = functional.kl_div(student_BC, target_BC, reduction="none", log_target=True)
        return loss_BC.sum(dim=1) * temperature**2

    def predict(self, output_B: Tensor) -> dict[str, Tensor]:
        """Return `prediction` int64 `[B]`, the most likely class, and `probabilities` float32 `[B, C]`."""
        return {"prediction": output_B.argmax(dim=1), "probabilities": output_B.float().softmax(dim=1)}


class MultiLabel:
    """Any of C classes: the output is logits `[B, C]`, labels are bool `[B, C]`."""

    def check(self, output_B: Tensor, label: Label, rows: int) -> None:
        """Raise ModelError unless the output is floating point `[rows, classes]`."""
        if not label.multi or label.classes is None:
            raise ModelError(
                'model.task is "multilabel", but schema.label has no multi = true; set it, or write "classification"'
            )
        _check_output(output_B, (rows, label.classes), 'task "multilabel"')

    def loss(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return the binary cross entropy of each event, the mean over the classes, float32 `[B]`."""
        losses_BC = functional.binary_cross_entropy_with_logits(output_B.float(), label_B.float(), reduction="none")
        return losses_BC.mean(dim=1)

    def score(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return the Jaccard index of predicted and true classes, 1 where there are none; float32 `[B]`.

        That is multi-label accuracy (Godbole & Sarawagi 2004, "Discriminative methods for multi-labeled
        classification"). Plain accuracy per class would be close to 1 for a model that never predicts a rare class.
        """
        predicted_BC, true_BC = output_B > 0, label_B.bool()
        either_B = (predicted_BC | true_BC).sum(dim=1)
        return torch.where(either_B > 0, (predicted_BC & true_BC).sum(dim=1) / either_B.clamp_min(1), 1.0)

    def distil(self, output_B: Tensor, teacher_B: Tensor, temperature: float) -> Tensor:
        """Return the KL divergence from the teacher of each class at a temperature, times its square, the mean over the
        classes, float32 `[B]`."""
        student_BC, target_BC = output_B.float() / temperature, teacher_B.float() / temperature
        probability_BC = target_BC.sigmoid()
        loss_BC = functional.binary_cross_entropy_with_logits(student_BC, probability_BC, reduction="none")
        entropy_BC = functional.binary_cross_entropy_with_logits(target_BC, probability_BC, reduction="none")
        return (loss_BC - entropy_BC).mean(dim=1) * temperature**2

    def predict(self, output_B: Tensor) -> dict[str, Tensor]:
        """Return `prediction` bool `[B, C]`, where a class is likely, and `probabilities` float32 `[B, C]`."""
        return {"prediction": output_B > 0, "probabilities": output_B.float().sigmoid()}


class TokenClassification:
    """One of C classes at each position: the output is logits `[B, L, C]`, labels are int64 `[B, L]`, or IGNORED.

    Logits that are all zero say that there is nothing at a position, such as after the last word of a text.
    """

    def check(self, output_B: Tensor, label: Label, rows: int) -> None:
        """Raise ModelError unless the output is floating point `[rows, length, classes]`."""
        if label.length is None or label.classes is None:
            raise ModelError(
                'model.task is "token-classification", but schema.label has no length; set it, or write '
                '"classification"'
            )
        _check_output(output_B, (rows, label.length, label.classes), 'task "token-classification"')

    def loss(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return the cross entropy of each event, the mean over its labelled positions, float32 `[B]`."""
        logits_BCL = output_B.float().transpose(1, 2)
        losses_BL = functional.cross_entropy(logits_BCL, label_B, reduction="none", ignore_index=IGNORED)
        return losses_BL.sum(dim=1) / _labelled(label_B).sum(dim=1).clamp_min(1)

    def score(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return the part of the labelled positions with logits whose most likely class is the label, float32 `[B]`."""
        counted_BL = _labelled(label_B) & (output_B != 0).any(dim=2)
        right_BL = counted_BL & (output_B.argmax(dim=2) == label_B)
        return right_BL.sum(dim=1) / counted_BL.sum(dim=1).clamp_min(1)

    def distil(self, output_B: Tensor, teacher_B: Tensor, temperature: float) -> Tensor:
        """Return the KL divergence of `Classification.distil` at each position, the mean over all, float32 `[B]`."""
        losses = Classification().distil(output_B.flatten(0, 1), teacher_B.flatten(0, 1), temperature)
        return losses.view(output_B.shape[:2]).mean(dim=1)

    def predict(self, output_B: Tensor) -> dict[str, Tensor]:
        """Return `prediction` int64 `[B, L]`, the most likely classes or IGNORED, and `probabilities` float32
        `[B, L, C]`."""
        prediction_BL = torch.where((output_B != 0).any(dim=2), output_B.argmax(dim=2), IGNORED)
        return {"prediction": prediction_BL, "probabilities": output_B.float().softmax(dim=2)}


def _labelled(label_BL: Tensor) -> Tensor:
    return label_BL != IGNORED


class Regression:
    """One number: the output is `[B]` or `[B, 1]`, labels are floats `[B]`."""

    def check(self, output_B: Tensor, label: Label, rows: int) -> None:
        """Raise ModelError unless the output is floating point with one number an event."""
        if label.classes is not None:
            raise ModelError(
                'model.task is "regression", but schema.label has classes; take them out, or write "classification"'
            )
        shape = (rows, 1) if isinstance(output_B, Tensor) and output_B.ndim == 2 else (rows,)
        _check_output(output_B, shape, 'task "regression"')

    def loss(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return the squared error of each event, float32 `[B]`."""
        return (output_B.reshape(-1).float() - label_B.float()).square()

    def score(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        """Return minus the absolute error of each event, float32 `[B]`."""
        return -(output_B.reshape(-1).float() - label_B.float()).abs()

    def distil(self, output_B: Tensor, teacher_B: Tensor, temperature: float) -> Tensor:  # noqa: ARG002 it has none
        """Return the squared difference from the teacher's number, float32 `[B]`."""
        return (output_B.reshape(-1).float() - teacher_B.reshape(-1).float()).square()

    def predict(self, output_B: Tensor) -> dict[str, Tensor]:
        """Return `prediction` float32 `[B]`."""
        return {"prediction": output_B.reshape(-1).float()}


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": MultiLabel,
    "regression": Regression,
    "token-classification": TokenClassification,
}


def _check_output(output: object, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(output, Tensor):
        raise ModelError(f"model.factory: the model returned {type(output).__name__}, but {what} needs one tensor")
    if tuple(output.shape) != shape or not torch.is_floating_point(output):
        raise ModelError(
            f"model.factory: for {shape[0]} events the model returned {output.dtype} {list(output.shape)}, "
            f"but {what} needs floats of shape {list(shape)}"
        )
