"""`learner.compile`: compiles the module with torch, or uses it as it is where that fails."""

import logging
from typing import cast

import torch
from torch import nn

from ingest.events.schema import Schema
from learner.model.device import Precision
from learner.model.factory import forward, sample
from learner.training.parallelism import Ranks
from learner.training.step_snapshot import Snapshots

BACKEND = "inductor"
_ROWS = (8, 12)
"""Two batch sizes: with the second the compiler makes the size dynamic, and does not compile again."""

log = logging.getLogger(__name__)


def compiled(module: nn.Module, schema: Schema, device: torch.device, precision: Precision, ranks: Ranks) -> nn.Module:
    """Compile a module for training, and try it on a few events of zeros, before the first step.

    Where that fails on any rank, a warning is logged and all ranks use the module as it is. Later compilations, for
    new shapes, fall back by themselves. Weights, buffers and generators are unchanged afterwards.
    """
    failed = torch.zeros((), dtype=torch.bool, device=device)
    fast = cast("nn.Module", torch.compile(module, backend=BACKEND))
    before = Snapshots(module, device).take()
    try:
        for rows in _ROWS:
            # Without averaging: if it failed on one rank, the others would wait for its gradient.
            with ranks.no_sync():
                with precision.autocast(device):
                    output = forward(fast, sample(schema, rows, device))
                output.float().sum().backward()  # type: ignore[no-untyped-call]
    except Exception as exc:  # noqa: BLE001 the compiler runs other programs, which may raise anything
        log.warning("learner.compile: compiling fails, and the model runs as it is: %s", " ".join(str(exc).split()))
        failed.fill_(True)
    for weight in module.parameters():
        weight.grad = None
    before.restore()
    if ranks.any(failed).item():
        return module
    torch._dynamo.config.suppress_errors = True
    return fast
