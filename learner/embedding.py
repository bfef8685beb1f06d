"""Where a model puts events: what one of its modules gives out.

Legend: B events, D numbers of an embedding.
"""

from typing import Any

from torch import Tensor, nn

from learner.errors import ModelError


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
