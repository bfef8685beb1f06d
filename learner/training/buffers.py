"""A model's buffers, such as running statistics: kept beside a step, so that it can be undone."""

from torch import Tensor, nn

Saved = list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]]
"""Where each buffer was, by what name, the tensor itself, and what it held."""


class Buffers:
    """All buffers of a model. Its modules are those that it has now; their buffers may come, go and be bound anew."""

    def __init__(self, model: nn.Module) -> None:
        self._homes = [module._buffers for module in model.modules()]

    def saved(self) -> Saved:
        """Copy what they hold, on the device."""
        return [
            (home, name, buffer, buffer.clone())
            for home in self._homes
            for name, buffer in home.items()
            if buffer is not None
        ]

    def put_back(self, saved: Saved) -> None:
        """Undo what forward passes left in buffers, also in those that the model binds anew."""
        for home, name, buffer, value in saved:
            home[name] = buffer.detach().copy_(value) if buffer.shape == value.shape else value.clone()

    def spoiled(self, saved: Saved) -> list[Tensor]:
        """Return for each floating buffer whether it lost numbers: some were finite when `saved`, and are no more."""
        found = []
        for home, name, _, value in saved:
            now = home.get(name)
            if now is not None and now.is_floating_point() and now.shape == value.shape:
                found.append((value.isfinite() & ~now.isfinite()).any())
        return found
