"""The trained set of a module: the tensors of its state dict that versions and checkpoints hold.

The trained set has the parameters that require a gradient, and the persistent buffers. Everything else of the state
dict is the base: frozen parameters, and other entries that quantized weights add. A module without a frozen parameter
has no base. The base is written before the first version or checkpoint that names it.

The base is decided once, after the factory and the adapter. Later changes of `requires_grad` do not move tensors into
it, and tensors of layers that a module gains later belong to the trained set.
"""

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.learner.errors import ModelError
from anabranch.learner.state_dir.bases import Bases
from anabranch.learner.state_dir.safetensors_file import digest_of, pieces_one_by_one

_BASE = "_base_names"
"""The attribute of a module with the names of its base; a deep copy has it too."""
_CONSTANTS = "_constants"
"""The attribute with the numbers of a module that no tensor has; a deep copy has it too."""
_EXTRA = "_extra_state"
"""The last part of the name of what a module adds to its state dict itself."""
_MOST_NAMES = 3


def decide_trained_set(module: nn.Module) -> None:
    """Decide which tensors are the base, from `requires_grad` as it is now; a decision made before stays."""
    vars(module).setdefault(_BASE, base_names(module))


def base_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the base in the state dict; of a module without a decision, as it would be made now."""
    decided: frozenset[str] | None = vars(module).get(_BASE)
    if decided is not None:
        return decided
    parameters = dict(module.named_parameters(remove_duplicate=False))
    frozen = {name for name, value in parameters.items() if not value.requires_grad}
    if not frozen:
        return frozenset()
    own = (parameters.keys() - frozen) | dict(module.named_buffers(remove_duplicate=False)).keys()
    return frozenset(name for name in module.state_dict() if name not in own and name.rpartition(".")[2] != _EXTRA)


def declare_constant(module: nn.Module, what: str, value: float) -> None:
    """Declare a number on which the weights of a module depend, and which none of its tensors has."""
    vars(module)[_CONSTANTS] = {**constants(module), what: value}


def constants(module: nn.Module) -> dict[str, float]:
    """Return the declared numbers of a module by what they are; a checkpoint has them, and goes on with no others."""
    return dict(vars(module).get(_CONSTANTS, {}))


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the trained set by name, detached, as `state_dict` does."""
    return without(module.state_dict(), base_names(module))


def base_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the base by name, detached; a tensor with several names is under the first only."""
    base, first = base_names(module), dict(module.named_parameters())
    others = dict(module.named_parameters(remove_duplicate=False)).keys() - first
    return {name: value for name, value in module.state_dict().items() if name in base and name not in others}


def load_trained(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into the trained set; the base is unchanged.

    Raises:
        RuntimeError: a tensor of the trained set is missing, there is another one, or a shape differs.
    """
    base = base_names(module)
    if not base:
        module.load_state_dict(tensors)
        return
    if frozen := base & tensors.keys():
        raise RuntimeError(f"there are tensors for frozen weights: {_listed(frozen)}")
    result = module.load_state_dict(tensors, strict=False)
    missing, unexpected = [name for name in result.missing_keys if name not in base], result.unexpected_keys
    if missing or unexpected:
        raise RuntimeError(
            f"the tensors are not those that the model trains: missing {_listed(missing)}, "
            f"unexpected {_listed(unexpected)}"
        )


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return what `copy.deepcopy(module, memo)` does, also of a module that a pass has left tensors with a graph on.

    `torch.nn.utils.weight_norm` does: it computes a weight in each pass, which the copy gets without its graph.
    """
    computed = {id(tensor): tensor for tensor in bound_tensors(module) if not tensor.is_leaf}
    memo |= {key: tensor.detach().clone() for key, tensor in computed.items() if key not in memo}
    return copy.deepcopy(module, memo)


def copy_sharing_base(module: nn.Module) -> nn.Module:
    """Return a deep copy that has the same frozen parameters as the module, not copies of them."""
    return deep_copy(module, {id(value): value for value in base_parameters(module).values()})


def base_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the base by name, each once."""
    base = base_names(module)
    return {name: value for name, value in module.named_parameters() if name in base}


def without_base(module: nn.Module) -> nn.Module:
    """Return a deep copy without memory for its base, of which `with_base` returns copies that have one again.

    Whatever else refers to a parameter of the base, such as a list, refers to that of the copy. A module without a base
    is returned itself.
    """
    base = base_parameters(module)
    empty = {
        id(value): nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False) for value in base.values()
    }
    return deep_copy(module, dict[int, Any](empty)) if base else module


def check_views(module: nn.Module) -> None:
    """Check that no attribute has memory of a frozen weight without being a parameter: it would keep other weights.

    Raises:
        ModelError: one has.
    """
    base = base_parameters(module)
    names = {value.untyped_storage().data_ptr(): name for name, value in base.items() if value.numel()}
    registered = {id(value) for value in [*module.parameters(), *module.buffers()]}
    for tensor in bound_tensors(module) if base else ():
        name = names.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if name is not None and id(tensor) not in registered:
            raise ModelError(
                f"model.factory: an attribute of the model is a view of the frozen weight {name}, which serving would "
                "not replace by that of a version: compute it in forward, or register a copy with register_buffer"
            )


def bound_tensors(module: nn.Module) -> list[Tensor]:
    """Return all tensors that the modules have as attributes, also in lists and dicts, each as often as it is bound."""
    bound = list[Tensor]()
    for each in module.modules():
        for value in vars(each).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            bound += [tensor for tensor in values if isinstance(tensor, Tensor)]
    return bound


def with_base(module: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Return a deep copy of the module whose base has these tensors on the device, in the module's memory format.

    Raises:
        RuntimeError: the tensors are not those of the module's base, by names, shapes and types.
    """
    expected, parameters = base_state(module), base_parameters(module)
    if expected.keys() != tensors.keys():
        raise RuntimeError(
            f"the tensors are not those of the frozen weights: missing {_listed(expected.keys() - tensors.keys())}, "
            f"unexpected {_listed(tensors.keys() - expected.keys())}"
        )
    bound = dict[int, nn.Parameter]()
    for name, own in expected.items():
        value = tensors[name]
        if (value.shape, value.dtype) != (own.shape, own.dtype):
            raise RuntimeError(
                f"the frozen weight {name} has the shape {list(value.shape)} and {value.dtype}, "
                f"and the model's has {list(own.shape)} and {own.dtype}"
            )
        if (parameter := parameters.get(name)) is not None:
            moved = torch.empty_like(own, device=device).copy_(value)
            bound[id(parameter)] = nn.Parameter(moved, requires_grad=False)
        elif not torch.equal(value, own.cpu()):
            raise RuntimeError(f"{name} of the frozen weights is not the model's: it is no parameter, and not loaded")
    return deep_copy(module, dict[int, Any](bound))


def without(tensors: Mapping[str, Tensor], base: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors whose names are not in `base`."""
    names = frozenset(base)
    return {name: value for name, value in tensors.items() if name not in names}


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_MOST_NAMES]) + (", ..." if len(ordered) > _MOST_NAMES else "") or "none"


def freeze(module: nn.Module) -> None:
    """Freeze all parameters, which are the base from now on; tensors that the module gains later are not."""
    module.requires_grad_(False)
    vars(module).pop(_BASE, None)
    decide_trained_set(module)


log = logging.getLogger(__name__)


def base_digest(module: nn.Module) -> str | None:
    """Return the SHA-256 of the file of a module's base; None where it has none."""
    tensors = base_state(module)
    return digest_of(pieces_one_by_one(tensors)) if tensors else None


def write_base(bases: Bases, module: nn.Module) -> str | None:
    """Write the base of a module unless it is there and intact, and return its SHA-256; None where it has no base.

    Raises:
        OSError: it cannot be written, or the one that is there cannot be read.
    """
    sha256 = base_digest(module)
    if sha256 is not None and not bases.is_intact(sha256):
        tensors = base_state(module)
        bases.write(sha256, pieces_one_by_one(tensors))
        size = sum(tensor.nbytes for tensor in tensors.values())
        log.info("the frozen weights of the model, %.1f MB, are in %s", size / 1e6, bases.path / sha256)
    return sha256
