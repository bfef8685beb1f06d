"""Where a model puts events: what one of its modules gives out.

Legend: B events, D numbers of an embedding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from learner.errors import ModelError
from learner.model.task import Embeds


class Embedding:
    """Listens to one module of a model: its output in a forward pass, flattened, is the embedding of the events."""

    def __init__(self, model: nn.Module, module: str) -> None:
        """Take the name of a submodule, such as `body.2`; raises ModelError when the model has none of that name."""
        self._name = module
        self._listens = False
        self._heard: Tensor | None = None
        try:
            found = model.get_submodule(module)
        except AttributeError as exc:
            names = ", ".join(name for name, _ in model.named_modules() if name)
            raise ModelError(f'model.embedding = "{module}": the model has no such module, but {names}') from exc
        found.register_forward_hook(self._hear)

    def listen(self) -> None:
        """Take what the next forward pass gives out."""
        self._listens, self._heard = True, None

    def heard(self) -> Tensor:
        """Return the embeddings of the first pass since `listen`, float32 `[B, D]` on the learner's device.

        Raises:
            ModelError: the module did not take part, or gives out no tensor with one row an event.
        """
        if self._heard is None:
            raise ModelError(
                f'model.embedding = "{self._name}": the module gives out no tensor when the model is run on events'
            )
        return self._heard

    def _hear(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._listens and isinstance(output, Tensor) and output.ndim:
            self._listens, self._heard = False, output.detach().reshape(len(output), -1).float()


class TaskEmbedding:
    """What a task of the user's says of the events of a forward pass, at the price of another one."""

    def __init__(self, model: nn.Module, task: Embeds, features: Sequence[str]) -> None:
        """Take the names of the features, in the order of the schema."""
        self._model, self._task, self._names = model, task, features
        self._listens = False
        self._seen: Mapping[str, Tensor] | None = None
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def listen(self) -> None:
        """Take the events of the next forward pass."""
        self._listens, self._seen = True, None

    def heard(self) -> Tensor:
        """Return the embeddings of the first pass since `listen`, float32 `[B, D]` on the learner's device.

        Raises:
            ModelError: the task returns no floats with one row an event.
        """
        assert self._seen is not None
        rows, was_training = len(next(iter(self._seen.values()))), self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                found: object = self._task.embed(self._model, self._seen)
        finally:
            self._model.train(was_training)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != rows or not found.is_floating_point():
            raise ModelError(
                f"model.task: embed returned {_kind(found)} for {rows} events, but it needs floats of shape [{rows}, D]"
            )
        return found.detach().float()

    def _see(self, _model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self._listens:
            self._listens = False
            self._seen = dict(zip(self._names, inputs, strict=True)) if inputs else dict(named)


Embeddings = Embedding | TaskEmbedding
"""Either of them."""


def _kind(found: object) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
