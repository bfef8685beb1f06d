"""Loads a version in pieces: between two of them, its thread lets requests run.

A thread that copies a module keeps the interpreter's lock, and one that computes shares the core. A request that
arrives waits for the piece that runs, and for no more.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

BeforePiece = Callable[[], object]
"""Called before each piece; returns once it may run."""


def deep_copy(module: nn.Module, memo: dict[int, Any], before_piece: BeforePiece) -> nn.Module:
    """Return what `copy.deepcopy(module, memo)` does, submodule by submodule."""
    for each in reversed(list(module.modules())):
        before_piece()
        copy.deepcopy(each, memo)
    return copy.deepcopy(module, memo)


@contextlib.contextmanager
def collecting_at_end(before_piece: BeforePiece) -> Iterator[None]:
    """Run no garbage collection in the block, and then, unless it raises, one piece, that of the block's own objects.

    A copy of a module has thousands of objects. Collections that they start in any thread take 4 ms for each version of
    MiniLM, some of them 12 ms at once, and find nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        before_piece()
        gc.collect(0)
    finally:
        gc.enable()


@contextlib.contextmanager
def layers_as_pieces(module: nn.Module, before_piece: BeforePiece) -> Iterator[None]:
    """Call `before_piece` before each layer of a module runs, which nobody else may run meanwhile."""

    def before_layer(_layer: nn.Module, _inputs: object) -> None:
        before_piece()

    handles = list[RemovableHandle]()
    try:
        for each in module.modules():
            before_piece()
            if not each._modules and not isinstance(each, torch.jit.ScriptModule):
                handles.append(each.register_forward_pre_hook(before_layer))
        yield
    finally:
        for handle in handles:
            handle.remove()
            before_piece()
