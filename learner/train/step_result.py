"""The result of a step.

Legend: B new events, R replayed ones, N both, D numbers of an embedding.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """The results of a step.

    Attributes:
        finite: False when loss, gradient or running statistics were not finite; weights and statistics are unchanged.
        loss: of the step on all ranks, a number.
        score: sum of the task's scores over the new events of all ranks, from predictions before training on them.
        loss_new: sum of their losses, by the same predictions.
        old_R: the loss of each event sampled, float32 `[R]` on the device, NaN where it was not trained on; None when
            nothing was sampled.
        embedding_N: embeddings of new events, then of replayed ones, float32 `[B + R, D]` on the device, NaN where it
            is not known; None unless a strategy or policy uses embeddings.
        output_B: the model's output for the new events, `[B, ...]` on the device.
        replayed: how many old events were trained on.
        rows: how many new events were trained on.
    """

    finite: bool
    loss: float
    score: float
    loss_new: float
    old_R: Tensor | None = None
    embedding_N: Tensor | None = None
    output_B: Tensor | None = None
    replayed: int = 0
    rows: int = 0
