"""Checks at start that a model can learn from a teacher, and what a teacher's output has to be."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.errors import ModelError
from learner.model.factory import in_one_line
from learner.model.task import Distils, Task

_ROWS = 3
_LARGEST = 1e15
"""The square of a larger number is infinite in float32: one answer would spoil a step."""


def check_distil(task: Task, name: str, output_shape: tuple[int, ...], device: torch.device) -> Distils:
    """Return a task by which a model can learn from a teacher, after a try on outputs of the model's shape.

    `name`: of the task, in the settings.

    Raises:
        ModelError: it has no method `distil`, which fails, or returns no number with a gradient for each event.
    """
    method = "distil(output_B, teacher_B, temperature)"
    if not isinstance(task, Distils):
        raise ModelError(
            f'model.task = "{name}": {type(task).__name__} has no method {method}, with which a model learns from '
            "[model.teacher]; write it, or remove [model.teacher]"
        )
    output_B, teacher_B = torch.zeros((2, _ROWS, *output_shape), device=device)
    try:
        result = task.distil(output_B.requires_grad_().clone(), teacher_B, 2.0)
    except Exception as exc:  # the user's own code may raise anything
        raise ModelError(
            f"model.task: {type(task).__name__}.distil fails on outputs of zeros: {in_one_line(exc)}"
        ) from exc
    if not isinstance(result, Tensor) or result.shape != (_ROWS,) or not result.requires_grad:
        returned = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ModelError(
            f"model.task: {type(task).__name__}.distil returned {returned} for {_ROWS} events; return one number "
            "an event, [B], computed from the output in torch"
        )
    return task


def without_unusable(output_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a teacher's outputs, `[N, ...]`, with NaN for each event whose output is not finite or is too large."""
    usable_N = (np.abs(output_N.reshape(len(output_N), -1)) < _LARGEST).all(axis=1)
    return np.where(usable_N.reshape(-1, *[1] * (output_N.ndim - 1)), output_N, np.float32(np.nan))
