"""The objects that every rank trains with; `learner.train.build` builds them from the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.learner.model.device import Precision
from anabranch.learner.model.embedding import Embeddings
from anabranch.learner.model.task import Task
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.base import LossWrapper, Strategy


@dataclass(frozen=True)
class TrainingSetup:
    """The objects that every rank trains with.

    Attributes:
        model: on the device.
        task: the meaning of its output.
        strategy: not used by another trainer.
        schema: of the events.
        settings: of optimizer, schedule, micro-batches and others.
        device: of the model and all examples.
        precision: of the forward pass.
        embedding: where strategy or store need embeddings.
        loss_wrappers: of the strategy's loss, the outermost first.
        output_shape: of the model's output for one event.
        kept_outputs: the shapes of the outputs that a store keeps with each event, by column; None: it is not kept.
        stages: `model.stages`.
        parallel: `model.parallel`.
        graphs: whether steps run as CUDA graphs, where they can be recorded.
        no_graphs: one sentence where they do not, although a CUDA device could.
    """

    model: nn.Module
    task: Task
    strategy: Strategy
    schema: Schema
    settings: LearnerSettings
    device: torch.device
    precision: Precision
    embedding: Embeddings | None = None
    loss_wrappers: Sequence[LossWrapper] = ()
    output_shape: tuple[int, ...] = ()
    kept_outputs: Mapping[str, list[int] | None] = field(default_factory=dict)
    stages: Sequence[str] = ()
    parallel: Mapping[str, str] = field(default_factory=dict)
    graphs: bool = False
    no_graphs: str = ""
