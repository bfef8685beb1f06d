"""Counts the operations that torch dispatches: on a device each is at least one launch."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_LAUNCH_NOTHING = {
    *("detach", "t", "transpose", "permute", "view", "_unsafe_view", "slice", "select", "expand", "unsqueeze"),
    *("split_with_sizes", "empty", "empty_like", "_record_function_enter_new", "_record_function_exit"),
}
"""Views of a tensor, memory without values, and marks for the profiler."""


class Operations(TorchDispatchMode):
    """Counts operations by name while the block runs, except those that launch nothing on a device."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count one operation."""
        operation: Callable[..., Any] = func
        self.counts[func.overloadpacket.__name__] += func.overloadpacket.__name__ not in _LAUNCH_NOTHING
        return operation(*args, **(kwargs or {}))

    @property
    def total(self):
        """All operations so far."""
        return self.counts.total()

    def __repr__(self):
        return f"{self.total} operations: {dict((+self.counts).most_common())}"
