"""A model's buffers, such as running statistics: copied before a step, so that it can be undone."""

from torch import Tensor, nn

Saved = list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]]
"""The dictionary and name of each buffer, the tensor itself, and a copy of its value."""


class Buffers:
    """All buffers of a model. The set of modules is fixed; their buffers may be added, removed and rebound."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [module._buffers for module in model.modules()]

    def saved(self) -> Saved:
        """Return copies of all buffers, on the device."""
        return [
            (owner, name, buffer, buffer.clone())
            for owner in self._owners
            for name, buffer in owner.items()
            if buffer is not None
        ]

    def put_back(self, saved: Saved) -> None:
        """Restore the saved values, including buffers that the model has rebound."""
        for owner, name, buffer, value in saved:
            owner[name] = buffer.detach().copy_(value) if buffer.shape == value.shape else value.clone()

    def spoiled(self, saved: Saved) -> list[Tensor]:
        """Return for each floating-point buffer whether a value that was finite in `saved` no longer is."""
        lost = []
        for owner, name, _, value in saved:
            now = owner.get(name)
            if now is not None and now.is_floating_point() and now.shape == value.shape:
                lost.append((value.isfinite() & ~now.isfinite()).any())
        return lost
