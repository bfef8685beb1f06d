"""Tensor parallelism: each rank of a tensor group has a part of the matrices of the modules in `model.parallel`.

Shoeybi et al. 2019, "Megatron-LM: training multi-billion parameter language models using model parallelism"; torch's
`parallelize_module`. A `column` module computes a part of its output numbers, which the modules up to the next `row`
module get as they are; a `row` module takes such parts, and sums over the group. Import this module only where
`learner.mesh.tensor` asks for it: that takes seconds.
"""

import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from anabranch.core.errors import SettingsError
from anabranch.core.users_code import in_one_line
from anabranch.learner.model.faulty_events import may_be_of_events

_STYLES: dict[str, type[ParallelStyle]] = {"column": ColwiseParallel, "row": RowwiseParallel}
_TOLERANCE = 1e-2
"""Largest difference of the output, relative to its largest number: tf32 rounds to 1e-3; wrong plans are far off."""
_ROUNDING = 1e-4
"""Differences of a gradient that are rounding, relative to the largest number of all gradients."""
_COMPARED = 1024
"""Numbers of each gradient that are compared at most."""
_WAY_OUT = (
    "each column module needs a row module after it, and between them only modules without trained parameters that "
    "work on each number alone, or on each head of attention"
)

# One warning for each weight that a checkpoint gathers: its parts come from two dimensions, by two exchanges.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def split_modules(
    model: nn.Module, parallel: Mapping[str, str], mesh: DeviceMesh, output: Callable[[], Tensor]
) -> None:
    """Replace the parameters of modules by this rank's parts; all ranks of the group have the same full ones.

    Args:
        model: changed in place; its names stay the same.
        parallel: `model.parallel`.
        mesh: of the tensor group.
        output: runs the model on a few events. Called before and after: outputs and gradients have to be equal.

    Raises:
        SettingsError: the plan does not fit the model, or changes its output or a gradient.
    """
    styles = plan(model, parallel, mesh.size())
    before = _replace_zeros(model)
    expected, expected_gradients = _passed(model, output)
    try:
        parallelize_module(model, mesh, {name: _STYLES[style]() for name, style in styles.items()})
        found, gradients = _passed(model, output)
    except Exception as exc:  # the user's own code may raise anything
        if not may_be_of_events(exc):
            raise
        raise SettingsError(
            f"model.parallel: the split model fails; the modules between a column and a row module have to work on a "
            f"part of its numbers, and other modules need full ones: {in_one_line(exc)}"
        ) from exc
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == "row" and isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(_check_ids, prepend=True)
    _check_output(found, expected)
    _check_gradients(gradients, expected_gradients, mesh.get_group())
    with torch.no_grad():
        for name, value in before.items():
            weight = model.get_parameter(name)
            if isinstance(weight, DTensor):
                weight.copy_(distribute_tensor(value, mesh, weight.placements, src_data_rank=None))
            else:
                weight.copy_(value)


def _check_ids(module: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Raise IndexError, as an embedding does: one by rows would take an id that no rank has for one of another."""
    assert isinstance(module, nn.Embedding)
    (ids,) = given
    inside = (ids >= 0) & (ids < module.num_embeddings)
    if ids.is_cuda:
        torch._assert_async(inside.all(), "index out of range in an embedding of model.parallel")
    elif not inside.all():
        raise IndexError("index out of range in self")


@torch.no_grad()
def _replace_zeros(model: nn.Module) -> dict[str, Tensor]:
    """Replace zeros by small noise, the same on all ranks; return the parameters that had any, as they were.

    A module that zeros follow, as a new head often has, would neither show in the output nor get a gradient.
    """
    generator = torch.Generator().manual_seed(0)
    before = {}
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and bool((weight == 0).any()):
            before[name] = weight.detach().clone()
            noise = torch.randn(weight.shape, generator=generator) / (weight.shape or (1,))[-1] ** 0.5
            weight.copy_(torch.where(weight == 0, noise.to(weight), weight))
    return before


def _passed(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a forward and a backward pass; return the output, and numbers of the full gradient of each parameter."""
    gradients: dict[str, Tensor] = {}

    def take(name: str, weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None  # at once, so that all gradients are never in memory together
        assert gradient is not None
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[name] = full.reshape(-1)[:: -(-full.numel() // _COMPARED)].clone()

    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    hooks = [
        weight.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]
        for name, weight in trained
    ]
    try:
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN differentiates recurrent layers in training mode alone
            output = run()
            if output.requires_grad:
                # Not all alike, for which the gradient of a softmax is zero.
                weight = torch.linspace(-1, 2, output.numel()).cos().view(output.shape).to(output)
                output.backward(weight)  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return output.detach(), gradients


def plan(model: nn.Module, parallel: Mapping[str, str], size: int) -> dict[str, str]:
    """Return the style of each module that the patterns of `model.parallel` match.

    Raises:
        SettingsError: a pattern matches nothing, or a module that cannot be split over `size` ranks.
    """
    parallel = {pattern: style for pattern, style in parallel.items() if style != "expert"}
    if not parallel:
        raise SettingsError(
            f'learner.mesh.tensor = {size}, but model.parallel names no module to split; write such as {{"body.0" = '
            '"column", "body.2" = "row"}, or set learner.mesh.tensor to 1'
        )
    styles: dict[str, str] = {}
    modules = dict(model.named_modules())
    for pattern, style in parallel.items():
        matched = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matched:
            able = ", ".join(name for name, module in modules.items() if _fault(module) is None) or "none"
            raise SettingsError(f'model.parallel: "{pattern}" matches no module; those that can be split are {able}')
        for name in matched:
            if name in styles:
                raise SettingsError(f'model.parallel: "{pattern}" matches {name}, as another key does; leave one out')
            styles[name] = style
            _check(pattern, name, modules[name], style, size)
    _check_not_shared(model, styles)
    return styles


def _check(pattern: str, name: str, module: nn.Module, style: str, size: int) -> None:
    """Raise SettingsError if a module cannot be split in this style."""
    key = name if pattern == name else f"{name} (by {pattern})"
    if (fault := _fault(module)) is not None:
        raise SettingsError(f'model.parallel."{key}": it is {fault}; name an nn.Linear or nn.Embedding')
    if isinstance(module, nn.Embedding):
        inputs, outputs = module.num_embeddings, module.embedding_dim
    else:
        assert isinstance(module, nn.Linear)
        inputs, outputs = module.in_features, module.out_features
    what, number = ("outputs", outputs) if style == "column" else ("inputs", inputs)
    if number % size:
        raise SettingsError(
            f'model.parallel."{key}" = "{style}": its {number} {what} are not divisible by learner.mesh.tensor = '
            f"{size}; change the model or the mesh, or leave the module out"
        )


def _fault(module: nn.Module) -> str | None:
    """Return what a module is instead of one that can be split; None for one that can."""
    if not isinstance(module, nn.Linear | nn.Embedding):
        return f"a {type(module).__name__}"
    if module.weight.ndim != 2 or not module.weight.is_floating_point():
        return f"a {type(module).__name__} with weights in {str(module.weight.dtype).removeprefix('torch.')}"
    return None


def _check_not_shared(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise SettingsError if a parameter of a split module has another name too: the split would untie the two."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = names.setdefault(id(parameter), name)
        split = [each for each in (other, name) if each.rpartition(".")[0] in styles]
        if other != name and split:
            raise SettingsError(
                f"model.parallel: {other} and {name} are one parameter, which cannot be split; leave "
                f"{split[0].rpartition('.')[0]} out"
            )


def _check_output(found: Tensor, expected: Tensor) -> None:
    """Raise SettingsError if the output of the split model differs by more than rounding."""
    if found.shape != expected.shape:
        differs = f"{list(found.shape)}, not {list(expected.shape)}"
    elif off := _off(found, expected, max(_TOLERANCE * _largest(expected), 1e-8)):
        differs = f"off by {off:.3g}"
    else:
        return
    raise SettingsError(f"model.parallel: the output of the split model is {differs}; {_WAY_OUT}")


def _check_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Raise SettingsError on all ranks of the group if a gradient differs by more than rounding on one of them."""
    # Of some parameters, such as the bias of keys in attention, the gradient is zero up to rounding.
    rounding = _ROUNDING * max(map(_largest, expected.values()), default=0.0)
    names = sorted({*found, *expected})
    off = torch.zeros(len(names), dtype=torch.float64)
    for index, name in enumerate(names):
        one = expected.get(name, torch.zeros(1))  # without a gradient: as zero
        other = found.get(name, torch.zeros(1))
        off[index] = _off(other, one, max(_TOLERANCE * _largest(one), rounding, 1e-8))
    off = off.nan_to_num(torch.inf).to(next(iter(expected.values()), off).device)
    dist.all_reduce(off, dist.ReduceOp.MAX, group)
    for name, value in zip(names, off.tolist(), strict=True):
        if value:
            raise SettingsError(
                f"model.parallel: the gradient of {name} in the split model is off by {value:.3g}; {_WAY_OUT}"
            )


def _off(found: Tensor, expected: Tensor, bound: float) -> float:
    """Return the largest difference if one is over the bound; 0: none is."""
    found, expected = found.double(), expected.double()
    same = torch.isclose(found, expected, rtol=0, atol=bound, equal_nan=True)
    return 0.0 if bool(same.all()) else float((found - expected)[~same].abs().max())


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0
