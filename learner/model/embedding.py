"""Embeddings of events: the output of one module of the model, or of the task's `embed`.

Legend: B events, D numbers of an embedding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.learner.errors import ModelError
from anabranch.learner.model.task import Embeds, Task
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.strategies import StrategySettings
from anabranch.replay.settings import ReplaySettings, admission_compares, sampling_compares


class Embedding:
    """Captures the output of one module in a forward pass; flattened, it is the embedding of the events."""

    def __init__(self, model: nn.Module, module: str) -> None:
        """Take the name of a submodule, such as `body.2`; raises ModelError when the model has none of that name."""
        self._name = module
        self._capturing = False
        self._captured: Tensor | None = None
        # Ahead of hooks that end a pass here.
        module_of(model, module).register_forward_hook(self._capture, prepend=True)

    def capture_next(self) -> None:
        """Capture the module's output in the next forward pass."""
        self._capturing, self._captured = True, None

    def captured(self) -> Tensor:
        """Return the embeddings of the first pass since `capture_next`, float32 `[B, D]` on the learner's device.

        Raises:
            ModelError: the module did not run, or returns no tensor with one row per event.
        """
        if self._captured is None:
            raise ModelError(
                f'model.embedding = "{self._name}": the module gives out no tensor when the model is run on events'
            )
        return self._captured

    def _capture(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._capturing and isinstance(output, Tensor) and output.ndim:
            self._capturing, self._captured = False, embedding_of(output)


def module_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module that `model.embedding` names; raises ModelError when the model has none of that name."""
    try:
        return model.get_submodule(name)
    except AttributeError as exc:
        names = ", ".join(each for each, _ in model.named_modules() if each)
        raise ModelError(f'model.embedding = "{name}": the model has no such module, but {names}') from exc


class TaskEmbedding:
    """Embeddings from the task's `embed`, at the cost of another forward pass."""

    def __init__(self, model: nn.Module, task: Embeds, features: Sequence[str]) -> None:
        """Take the names of the features, in the order of the schema."""
        self._model, self._task, self._names = model, task, features
        self._capturing = False
        self._features: Mapping[str, Tensor] | None = None
        model.register_forward_pre_hook(self._capture, with_kwargs=True)

    def capture_next(self) -> None:
        """Capture the features of the next forward pass."""
        self._capturing, self._features = True, None

    def captured(self) -> Tensor:
        """Return the embeddings of the first pass since `capture_next`, float32 `[B, D]` on the learner's device.

        Raises:
            ModelError: the task returns no floats with one row per event.
        """
        assert self._features is not None
        rows, was_training = len(next(iter(self._features.values()))), self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                embedding: object = self._task.embed(self._model, self._features)
        finally:
            self._model.train(was_training)
        if (
            not isinstance(embedding, Tensor)
            or embedding.ndim != 2
            or len(embedding) != rows
            or not embedding.is_floating_point()
        ):
            raise ModelError(
                f"model.task: embed returned {_described(embedding)} for {rows} events, "
                f"but it needs floats of shape [{rows}, D]"
            )
        return embedding.detach().float()

    def _capture(self, _model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self._capturing:
            self._capturing = False
            features = dict(zip(self._names, inputs, strict=True)) if inputs else named
            self._features = {name: value.clone() for name, value in features.items()}


Embeddings = Embedding | TaskEmbedding
"""A source of embeddings."""


def embedding_of(output: Tensor) -> Tensor:
    """Return a module's output as embeddings, float32 `[B, D]`: a copy, for the modules after it may write into it."""
    return output.detach().reshape(len(output), -1).to(torch.float32, copy=True)


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def build_embedding_source(
    settings: ModelSettings,
    strategy: StrategySettings,
    replay: ReplaySettings,
    model: nn.Module,
    task: Task,
    features: Sequence[str],
) -> Embeddings | None:
    """Return the source of embeddings if a strategy or policy needs them: a module of the model, or else the task.

    Raises:
        ModelError: the model has no such module.
    """
    compared = admission_compares(replay.admission) or sampling_compares(replay.sampling)
    embedding: Embeddings | None = None
    if not (strategy.kind.embeds or (strategy.kind.replays and compared)):
        return None
    if settings.embedding:
        embedding = Embedding(model, settings.embedding)
    elif isinstance(task, Embeds):
        embedding = TaskEmbedding(model, task, features)
    if embedding is not None:
        embedding.capture_next()
    return embedding
