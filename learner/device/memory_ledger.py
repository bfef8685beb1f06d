"""The ledger of device memory: bytes by purpose, computed from settings. Imports no torch.

It counts what is sure to be there at the same time at the worst moment of a learner, which is a checkpoint during the
scoring of a version. Activations, which depend on the micro-batch size, and a module that FSDP has gathered for its
forward pass are not in it.

    weights 1   gradients 1   AdamW's moments 2   scorer modules 2   = 6 float32 copies = 24 bytes a parameter
"""

from collections.abc import Mapping
from typing import Any

from anabranch.learner.settings.learner import LearnerSettings, MeshSettings
from anabranch.learner.settings.strategies import KINDS, StrategyKind

_FLOAT32 = 4
_HALF = {"bf16", "fp16", "fp8"}
SCORER_MODULES = 2
"""Modules on the device that score held-out events: one of the candidate, one of the served version."""
CONTEXT_BYTES = 600_000_000
"""A CUDA context with cuBLAS' workspaces, for one process; an estimate, which depends on driver and device."""

_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "adafactor": 0, "adagrad": 1, "rmsprop": 1}
"""Copies of the weights that an optimizer keeps; Adafactor keeps a row and a column of each matrix."""
_MOMENTS_OF_OTHERS = 2
"""Of an optimizer of the user: as many as AdamW."""
_MORE_MOMENTS = {"adamw": ("amsgrad",), "adam": ("amsgrad",), "sgd": ("momentum",), "rmsprop": ("momentum", "centered")}
"""Arguments that make it keep one more copy each."""
_UNFUSED = {"adafactor", "adagrad", "rmsprop"}
"""Optimizers without a fused form: their step allocates another copy."""
_FEEDBACK = {"powersgd", "int8", "topk"}
"""Hooks that keep what they have not sent of a gradient."""


def ledger(
    parameters: int,
    *,
    optimizer: str = "adamw",
    optimizer_arguments: Mapping[str, Any] | None = None,
    strategy: StrategyKind = KINDS["er"],
    precision: str = "fp32",
    sharding: str = "none",
    comm_hook: str = "none",
    ranks: int = 1,
    parts: int = 1,
    leads: bool = True,
    cloned: bool = False,
    replay_bytes: int = 0,
    processes: int = 1,
    base_bytes: int = 0,
    challengers: int = 0,
) -> dict[str, int]:
    """Return the bytes of one rank of a learner on its device, by purpose.

    Args:
        parameters: number of the parameters that are trained, and of the elements of all buffers.
        optimizer: `learner.optimizer.name`.
        optimizer_arguments: its other keys, such as `momentum`.
        strategy: what `learner.strategy` is.
        precision: as resolved: "fp32", "bf16", "fp16" ("auto" counts as the larger, "bf16").
        sharding: `learner.sharding`.
        comm_hook: `learner.comm_hook`.
        ranks: how many train together.
        parts: over how many ranks `learner.mesh` divides the weights evenly: tensor times pipeline.
        leads: whether it is rank 0, which scores versions.
        cloned: whether copies for versions and checkpoints are cloned on the device first, where it has room.
        replay_bytes: the memory tier of the store, if it is on the device.
        processes: processes with a CUDA context on the device.
        base_bytes: size of the frozen weights. Models that score versions share them, unless they are sharded.
        challengers: `search.challengers`, each with weights and moments; one at a time has gradients.
    """
    full, arguments = _FLOAT32 * parameters, optimizer_arguments or {}
    copy = -(-full // parts)
    mine, trains = (-(-copy // ranks) if sharding == "fsdp" else copy), strategy.learns_gradient
    of_optimizer = copy if sharding == "none" else -(-copy // ranks)
    moments = _MOMENTS.get(optimizer, _MOMENTS_OF_OTHERS) + sum(
        bool(arguments.get(name)) for name in _MORE_MOMENTS.get(optimizer, ())
    )
    copies = challengers * (copy + moments * of_optimizer)
    tensors = {
        "weights": mine,
        "base": base_bytes if sharding != "fsdp" else -(-base_bytes // ranks) + base_bytes * leads,
        "gradients": mine * trains,
        "buckets": mine * (trains and ranks > 1 and sharding != "fsdp"),
        "error_feedback": mine * (trains and ranks > 1 and comm_hook in _FEEDBACK),
        "optimizer": moments * of_optimizer * trains,
        "optimizer_step": of_optimizer * (trains and (optimizer in _UNFUSED or optimizer not in _MOMENTS)),
        "strategy": strategy.copies * mine,
        "autocast": copy // 2 * (precision in {*_HALF, "auto"} and sharding != "fsdp"),
        "challengers": copies + copy * (challengers > 0),
        "scorer": SCORER_MODULES * full * leads,
    }
    kept = tensors["weights"] + tensors["optimizer"] + tensors["strategy"] + copies
    staged = {"snapshot": tensors["weights"] * (cloned and leads), "checkpoint_staging": kept * cloned}
    return {**tensors, **staged, "replay": replay_bytes, "contexts": CONTEXT_BYTES * processes}


def learner_ledger(
    parameters: int, learner: LearnerSettings, replay_bytes: int, base_bytes: int = 0, challengers: int = 0
) -> dict[str, int]:
    """Return the bytes of rank 0 of a learner on its device, by purpose."""
    mesh = learner.mesh or MeshSettings(data=learner.replicas)
    return ledger(
        parameters,
        optimizer=learner.optimizer.name,
        optimizer_arguments=learner.optimizer.model_extra,
        strategy=learner.strategy.kind,
        precision=learner.precision,
        sharding=learner.sharding,
        comm_hook=learner.comm_hook,
        ranks=mesh.data,
        parts=mesh.tensor * mesh.pipeline,
        replay_bytes=replay_bytes,
        base_bytes=base_bytes,
        challengers=challengers,
    )


def serving_ledger(parameters: int, *, workers: int = 1, shadow: bool = False, base_bytes: int = 0) -> dict[str, int]:
    """Return the bytes of all serving processes on a device, by purpose: two versions are there while one is swapped
    in, a request may still hold the version before, and two more are there where a shadow is compared. All of a process
    share the frozen weights."""
    copy = _FLOAT32 * parameters * workers
    return {
        "versions": 2 * copy,
        "held_version": copy,
        "base": base_bytes * workers,
        "shadow": 2 * copy * shadow,
        "contexts": CONTEXT_BYTES * workers,
    }
