"""Builds and checks the module that `[model]` names; used by the learner and by serving."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from anabranch.core.errors import AnabranchError
from anabranch.core.failures import device_lost, out_of_memory
from anabranch.core.users_code import UsersCodeError, imported, in_one_line
from anabranch.ingest.events.schema import Label, Schema
from anabranch.learner.errors import ModelError
from anabranch.learner.model.adapter import Adapter
from anabranch.learner.model.converter import ModelContext, ModelConverter, convert
from anabranch.learner.model.device import Precision
from anabranch.learner.model.features.learned import FeatureLearning, features_of
from anabranch.learner.model.float8 import Float8
from anabranch.learner.model.rng import GeneratorStates
from anabranch.learner.model.task import METHODS, TASKS, Distils, Task
from anabranch.learner.model.trained_set import (
    base_parameters,
    check_views,
    copy_sharing_base,
    decide_trained_set,
    load_trained,
    trained_state,
)
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.strategies import StrategySettings

_COMPILED = "_orig_mod"
"""The submodule of a module that `torch.compile` returns."""
FOLDER = "config_folder"
"""The parameter of a factory that gets the config's folder."""
_GETS_COPIES = ("loss", "score", "distil")
_CHECK_ROWS = 3
"""Events of the check at start: more than one, so that an output without the batch dimension is noticed."""
_ROUNDING = 1e-3
"""Of the largest number of an output: what rounding may change where the same operations run."""
_ROUNDING_OF_ROWS, _COARSE_ROUNDING = 2e-2, 1e-1
"""The same where more rows run at once, on a CPU in float32, and elsewhere: 8 bits have a scale of their batch."""


def build_model(factory: str, args: Mapping[str, Any], folder: Path) -> nn.Module:
    """Import `module:name`, and call it with `args`; `folder`, the config's, is on the path, last.

    Raises:
        ModelError: the module or the name is not there, the call fails, or what it returns is no `nn.Module` whose
            weights have their shapes.
    """
    build = _imported("model.factory", factory, folder)
    with _users_code(f'model.factory = "{factory}" fails with model.args = {dict(args)}', memory_too=True):
        model = build(**_with_folder(build, args, folder))
    return _checked(factory, model)


def _checked(factory: str, model: object) -> nn.Module:
    """Return what a factory has returned; raises ModelError unless it is a module whose weights have their shapes."""
    if not isinstance(model, nn.Module):
        raise ModelError(f'model.factory = "{factory}" returned {type(model).__name__}, not a torch.nn.Module')
    check_uncompiled(factory, model)
    lazy = next((name for name, value in _weights(model) if is_lazy(value)), None)
    if lazy is not None:
        raise ModelError(
            f'model.factory = "{factory}": {lazy} has no shape yet, as the lazy modules of torch have it before their '
            "first call: call the model once in the factory, or name its sizes"
        )
    return model


def check_uncompiled(factory: str, model: nn.Module) -> None:
    """Raise ModelError where `torch.compile` has wrapped a model or one of its modules."""
    wrapped = next((name for name, module in model.named_modules() if _COMPILED in module._modules), None)
    if wrapped is not None:
        which = f"its module {wrapped}" if wrapped else "what it returns"
        raise ModelError(
            f'model.factory = "{factory}": {which} is wrapped by torch.compile, and its weights have other names than '
            "those of copies and exports: return it as it is, and set learner.compile = true"
        )


def keep_evaluation(model: nn.Module) -> None:
    """Let modules stay in evaluation mode that the factory has put there, such as the batch norm of a frozen backbone.

    A model that is in evaluation mode as a whole, as libraries return theirs, is trained as a whole.
    """
    if not model.training:
        model.train()
        return
    for module in model.modules():
        if not module.training:
            vars(module)["train"] = functools.partial(_stay, module)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001 as Module.train
    return type(module).train(module, False)


def separate_buffers(model: nn.Module) -> None:
    """Give each buffer memory for all its numbers, where `expand` has made it: numbers that share one cannot be set.

    Raises:
        ModelError: a parameter has such memory.
    """
    for path, module in model.named_modules():
        for name, value in module._parameters.items():
            if value is not None and _overlaps(value):
                raise ModelError(
                    f"model.factory: the parameter {f'{path}.{name}'.lstrip('.')} {list(value.shape)} has memory for "
                    "fewer numbers, as expand makes it; call contiguous() before nn.Parameter"
                )
        for name, value in module._buffers.items():
            if value is not None and _overlaps(value):
                module._buffers[name] = value.contiguous()


def _overlaps(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _with_folder(build: Callable[..., object], args: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of a factory, with the config's folder where it has a parameter for it."""
    with contextlib.suppress(TypeError, ValueError):  # of callables without a signature
        if FOLDER in inspect.signature(build).parameters:
            return {FOLDER: folder, **args}
    return dict(args)


def build_on_device(
    settings: ModelSettings,
    folder: Path,
    device: torch.device,
    schema: Schema | None = None,
    precision: str = "fp32",
    built: nn.Module | None = None,
) -> nn.Module:
    """Build the model of `[model]` on a device, with all of `converters`, and decide which tensors are trained.

    With a schema the model takes raw features, and has what is learned of them; without, it takes what its own
    `forward` does. `built`: a module in place of what the factory returns.

    Raises:
        ModelError: as `build_model` and the converters, or an attribute is a view of a frozen weight.
        SettingsError: as the converters.
    """
    if built is None:
        built = build_model(settings.factory, settings.args, folder)
    model = convert(
        _checked(settings.factory, built),
        converters(settings, precision),
        ModelContext(device, schema, settings.embedding),
    )
    decide_trained_set(model)
    check_views(model)
    return model


def converters(settings: ModelSettings, precision: str = "fp32") -> list[ModelConverter]:
    """Return what changes the model of `[model]`, in this order; `precision`: of training, without `auto`."""
    chosen: list[ModelConverter] = []
    if settings.adapter is not None:
        chosen.append(Adapter(settings.adapter))
    chosen += [OnDevice(), FeatureLearning()]
    if settings.channels_last:
        chosen.append(ChannelsLast())
    if precision == "fp8":
        chosen.append(Float8())
    return chosen


def check_converted(model: nn.Module, settings: ModelSettings, strategy: StrategySettings) -> None:
    """Check, once the strategy has converted the model too, that all which `converters` has made has its effect.

    Raises:
        ModelError: as `ModelConverter.check`.
    """
    for each in converters(settings):
        each.check(model, strategy)


class OnDevice(ModelConverter):
    """Moves a model to its device, as one that can be trained: with modes that stay, and separate buffers."""

    @override
    def convert(self, model: nn.Module, context: ModelContext) -> nn.Module:
        keep_evaluation(model)
        separate_buffers(model)
        return model.to(context.device)


class ChannelsLast(ModelConverter):
    """Stores 4-D weights and features with their channels last."""

    @override
    def convert(self, model: nn.Module, _context: ModelContext) -> nn.Module:
        for weight in model.parameters():
            weight.data = _channels_last(weight.data)
        model.register_forward_pre_hook(_features_channels_last, with_kwargs=True)
        return model


def _features_channels_last(
    _model: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return tuple(map(_channels_last, positional)), {name: _channels_last(value) for name, value in named.items()}


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _imported(key: str, reference: str, folder: Path) -> Callable[..., object]:
    """Return the callable that an import string names; raises ModelError when there is none."""
    try:
        return imported(reference, folder)
    except UsersCodeError as exc:
        raise ModelError(f'{key} = "{reference}": {exc}') from exc


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class ForOnePass(dict[str, Tensor]):
    """Features that are copied for one pass already: the model gets them as they are."""


def forward(model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    """Return the model's output for a batch, as `run_on` does.

    The model gets copies, and may write into them: the features are in the memory of the store, of the holdout set, or
    of a request, and are read again; unless they are `ForOnePass`.

    Raises:
        ModelError: the model has written into features for one pass, and is to run on them again.
    """
    if not isinstance(features, ForOnePass):
        return run_on(model, {name: value.clone() for name, value in features.items()})
    if changed := [name for name, value in features.items() if value._version]:
        raise ModelError(
            f"model.factory: the model writes into its input {changed[0]}, and learner.strategy runs it again on the "
            "joined events: let the strategy join them for each pass, or let the model write into a copy"
        )
    return run_on(model, features)


def run_on(model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    """Return the model's output; a single feature is passed by position, several by name, in the memory given."""
    if len(features) == 1:
        (only,) = features.values()
        output: Tensor = model(only)
    else:
        output = model(**features)
    return output


def check_model(model: nn.Module, task: Task, schema: Schema, device: torch.device) -> tuple[int, ...]:
    """Run the model on a few all-zero events, and return the shape of its output for one event.

    The model runs in evaluation and in training mode, and as serving runs it: on a single event too, whose output has
    to be the same as among others. Its mode and state are unchanged afterwards.

    Raises:
        ModelError: it fails, its output does not fit, or it writes to a frozen parameter.
    """
    frozen = {name: (value, value._version) for name, value in base_parameters(model).items()}
    features = sample(schema, _CHECK_ROWS, device)
    given = functools.partial(_inputs, model, features)
    with _unchanged(model), _users_code("model.factory: the model fails on {}", given, memory_too=True):
        with torch.no_grad():
            for training in (False, True):
                output = forward(model.train(training), features)
                task.check(output, schema.label, _CHECK_ROWS)
        changed = next((name for name, (value, version) in frozen.items() if value._version != version), None)
        if changed is not None:
            raise ModelError(
                f"model.factory: the forward pass changes the frozen parameter {changed}, and versions and checkpoints "
                "would not have its new values: make it a buffer, with register_buffer"
            )
        check_rows(model.eval(), task, schema, device)
        return tuple(output.shape[1:])


@contextlib.contextmanager
def _users_code(
    what: str, given: Callable[[], str] | None = None, *, way_out: str = "", memory_too: bool = False
) -> Iterator[None]:
    """Turn whatever the user's code raises in the block into ModelError, with a sentence of `what` and `way_out`.

    Errors of ours pass, and those of memory or the device, unless `memory_too`: `failure_of` finds these as the cause.
    `given` returns what `what` has a `{}` for.
    """
    try:
        yield
    except AnabranchError:
        raise
    except (Exception, SystemExit) as exc:  # the user's own code may raise anything
        if not memory_too and (out_of_memory(exc) or device_lost(exc)):
            raise
        sentence = what if given is None else what.format(given())
        raise ModelError(f"{sentence}: {in_one_line(exc)}{way_out}") from exc


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Yield the state of a model, and restore state and mode after the block.

    Raises:
        ModelError: passes give tensors another shape.
    """
    was_training = model.training
    before = {name: value.clone() for name, value in trained_state(model).items()}
    sentence = (
        "model.factory: the forward pass changes buffers in a way that cannot be undone, such as to another shape, and "
        "versions and checkpoints have one shape"
    )
    try:
        yield before
    finally:
        model.train(was_training)
        with _users_code(sentence):
            load_trained(model, before)


def _inputs(model: nn.Module, features: Mapping[str, Tensor]) -> str:
    """Describe what `forward` gets for features: their shapes once `[schema]` has transformed them."""
    learned = features_of(model)
    with torch.no_grad():
        inputs = features if learned is None else learned.transform(features)
    return ", ".join(f"{name} {list(value.shape)} {value.dtype}" for name, value in inputs.items())


def check_rows(model: nn.Module, task: Task, schema: Schema, device: torch.device) -> None:
    """Run the model, in evaluation mode, on a single event, and on different events alone and together.

    Raises:
        ModelError: it fails on one event, or an event's output depends on the others of its batch.
    """
    with torch.no_grad():
        one = sample(schema, 1, device)
        with _users_code(
            "model.factory: the model fails on a single event, {}", functools.partial(_inputs, model, one)
        ):
            output = forward(model, one)
        try:
            task.check(output, schema.label, 1)
        except ModelError as exc:
            raise ModelError(f"{exc}; squeeze() without a dimension removes that of a single event too") from exc
        features, together = varied(model, schema, device)
        alone = torch.cat([forward(model, _row(features, row)) for row in range(_CHECK_ROWS)])
    exact = alone.is_cpu and alone.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if _same(together, alone, _ROUNDING_OF_ROWS if exact else _COARSE_ROUNDING):
        return
    with torch.no_grad():
        uses_random_numbers = not _same(together, forward(model, features), _ROUNDING)
    if not uses_random_numbers:
        largest = (together.double() - alone.double()).abs().max().item()
        raise ModelError(
            "model.factory: an event's output depends on the other events of its batch: alone and among "
            f"{_CHECK_ROWS} different ones it differs by up to {largest:.3g}, and which requests are answered together "
            "is chance. Compute no statistics over the events in evaluation mode; attention and recurrent layers need "
            "batch_first = True"
        )


def _row(features: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: value[row : row + 1] for name, value in features.items()}


def _same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether outputs are the same, up to a part of the largest number."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    largest = one.detach().double().abs().nan_to_num(0.0, 0.0).max().item() if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=tolerance * largest + 1e-7, equal_nan=True)


def varied(model: nn.Module, schema: Schema, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Return features of a few events that differ, where the model takes them, and its output in evaluation mode."""
    features = made_up_features(schema, device)
    integers = {
        feature.name: torch.from_numpy(values).to(device)
        for feature in schema.features
        if (values := feature.different(_CHECK_ROWS)) is not None
    }
    for candidate in ({**features, **integers}, features):
        try:
            with torch.no_grad():
                return candidate, forward(model, candidate)
        except (Exception, SystemExit) as exc:
            if out_of_memory(exc) or device_lost(exc):
                raise
    features = sample(schema, _CHECK_ROWS, device)
    with torch.no_grad():
        return features, forward(model, features)


def made_up_features(schema: Schema, device: torch.device) -> dict[str, Tensor]:
    """Return features of a few made-up events, of which those of floating point differ."""
    generator = torch.Generator().manual_seed(0)
    features = {}
    for feature in schema.features:
        values = torch.from_numpy(feature.example(_CHECK_ROWS))
        if values.is_floating_point():
            values = torch.randn(values.shape, generator=generator).to(values.dtype)
            if feature.min is not None or feature.max is not None:
                values = values.clamp(feature.min, feature.max)
        features[feature.name] = values.to(device)
    return features


def check_copies(model: nn.Module, schema: Schema, device: torch.device) -> None:
    """Copy the model, as gate, checkpoints and serving do, and compare what both compute with other weights.

    Call it after a pass: it may have left something on the model that cannot be copied.

    Raises:
        ModelError: it cannot be copied, or the copy computes with weights of the original.
    """
    way_out = "; open such objects in forward, or give their class a __deepcopy__"
    with _users_code("model.factory: the model cannot be copied, which gate and serving do", way_out=way_out):
        copied = copy_sharing_base(model)
    generators = GeneratorStates(device)
    learned = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad}

    def output(module: nn.Module) -> Tensor:
        """Return the output with other weights, and the same random numbers."""
        load_trained(model, before)
        other = {name: value * 1.1 + 0.01 if name in learned else value for name, value in before.items()}
        load_trained(module.eval(), other)
        torch.clear_autocast_cache()  # it has the weights of before
        generators.restore()
        with torch.no_grad():
            return forward(module, features)

    try:
        with _unchanged(model) as before, _users_code("model.factory: a copy of the model, with other weights, fails"):
            features, _ = varied(model.eval(), schema, device)
            expected, found = output(model), output(copied)
            depends = not _same(expected, found, _ROUNDING) and _same(expected, output(model), _ROUNDING)
    finally:
        torch.clear_autocast_cache()
        generators.restore()
    if depends:
        raise ModelError(
            "model.factory: a copy of the model computes with weights of the original, so that versions would not be "
            "scored by their own: an attribute is a function that keeps a module or a tensor of the model, such as "
            "model.forward = lambda ...; define a method of a class instead"
        )


def check_training_pass(
    model: nn.Module, task: Task, schema: Schema, device: torch.device, precision: Precision
) -> None:
    """Run one pass as a step does: forward, loss and score in the precision of training, then backward.

    Call it after `check_model` and `check_task`, which describe other faults better. Weights, buffers, gradients, mode
    and random generators are unchanged afterwards.

    Raises:
        ModelError: something fails that did not fail in float32 and without gradients.
    """
    gradients = {weight: weight.grad for weight in model.parameters()}
    tail, kind = f"fails in training, {_arithmetic(precision)}", type(task).__name__
    try:
        with _unchanged(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
            with precision.autocast(device):
                with _users_code(f"model.factory: the forward pass {tail}"):
                    output_B = forward(model.train(), sample(schema, _CHECK_ROWS, device))
                with _users_code(f"model.task: {kind}.loss {tail}"):
                    loss = _first_that_works(partial(_sum_of_losses, task, output_B, schema.label))
                with _users_code(f"model.task: {kind}.score {tail}"), torch.no_grad():
                    _first_that_works(partial(_score, task, output_B.detach(), schema.label))
            with _users_code(f"model.factory: the backward pass {tail}"):
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for weight, gradient in gradients.items():
            weight.grad = gradient


def _arithmetic(precision: Precision) -> str:
    """Describe the arithmetic of training, and the way out if it may be the cause."""
    how = "with deterministic algorithms" if torch.are_deterministic_algorithms_enabled() else "with gradients"
    if precision.dtype is None:
        return f"in {precision.name} and {how}"
    return f'in {precision.name} by autocast and {how} (learner.precision = "fp32" trains without autocast)'


def _first_that_works(run: Callable[[int], Tensor]) -> Tensor:
    """Return what `run` gives for labels of 0, or of 1 where it refuses 0, as a task of prices may."""
    try:
        return run(0)
    except (Exception, SystemExit):  # noqa: BLE001 the user's own code may raise anything
        return run(1)


def _labels(label: Label, value: int, device: torch.device) -> Tensor:
    return torch.full((_CHECK_ROWS, *label.shape), value, device=device).to(tensor_dtype(label.dtype.name))


def _sum_of_losses(task: Task, output_B: Tensor, label: Label, value: int) -> Tensor:
    # As in training: not a leaf, so that the task may change it in place.
    return task.loss(output_B.clone(), _labels(label, value, output_B.device)).float().sum()


def _score(task: Task, output_B: Tensor, label: Label, value: int) -> Tensor:
    return task.score(output_B.clone(), _labels(label, value, output_B.device))


def check_task(task: Task, output_shape: tuple[int, ...], label: Label, device: torch.device) -> None:
    """Run the task's loss and score on an output of the model's shape, with labels of 0 and of 1.

    A loss `[B, 1]`, or a mean over all events, would train too, but with the wrong weights of events.

    Raises:
        ModelError: one returns no number for each event, or fails with both labels; or the loss has no gradient.
    """
    for method in ("loss", "score"):
        results = [_refusal(task, method, output_shape, label, value, device) for value in (0, 1)]
        refusals = [refusal for refusal in results if refusal is not None]
        # A correct task may refuse labels that never occur, such as prices of 0.
        if len(refusals) == len(results) or any(refusal.is_shape for refusal in refusals):
            raise ModelError(f"model.task: {type(task).__name__}.{method} {refusals[0].sentence}")


def check_distil(task: Task, name: str, output_shape: tuple[int, ...], device: torch.device) -> Distils:
    """Return a task by which a model can learn from a teacher, after a try on outputs of the model's shape.

    `name`: of the task, in the settings.

    Raises:
        ModelError: it has no method `distil`, which fails, or returns no number with a gradient for each event.
    """
    method = "distil(output_B, teacher_B, temperature)"
    if not isinstance(task, Distils):
        raise ModelError(
            f'model.task = "{name}": {type(task).__name__} has no method {method}, with which a model learns from '
            "[model.teacher]; write it, or remove [model.teacher]"
        )
    output_B, teacher_B = torch.zeros((2, _CHECK_ROWS, *output_shape), device=device)
    try:
        result = task.distil(output_B.requires_grad_().clone(), teacher_B, 2.0)
    except Exception as exc:  # the user's own code may raise anything
        raise ModelError(
            f"model.task: {type(task).__name__}.distil fails on outputs of zeros: {in_one_line(exc)}"
        ) from exc
    if not isinstance(result, Tensor) or result.shape != (_CHECK_ROWS,) or not result.requires_grad:
        returned = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ModelError(
            f"model.task: {type(task).__name__}.distil returned {returned} for {_CHECK_ROWS} events; return one number "
            "an event, [B], computed from the output in torch"
        )
    return task


@dataclass(frozen=True)
class _Refusal:
    sentence: str
    is_shape: bool = False
    """Whether the label cannot be the cause."""


def _refusal(
    task: Task, method: str, output_shape: tuple[int, ...], label: Label, value: int, device: torch.device
) -> _Refusal | None:
    """Return what is wrong with a task's result for a few events with a label; None when it is correct."""
    label_B = _labels(label, value, device)
    output_B = torch.zeros((_CHECK_ROWS, *output_shape), device=device)
    try:
        if method == "loss":
            # As in training: not a leaf, so that the task may change it in place.
            result = task.loss(output_B.requires_grad_().clone(), label_B)
        else:
            with torch.no_grad():
                result = task.score(output_B, label_B)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 the user's own code may raise anything
        shapes = f"an output {list(output_B.shape)} and labels {list(label_B.shape)} {label_B.dtype} of 0 and of 1"
        return _Refusal(f"fails on {shapes}: {in_one_line(exc)}")
    returned = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    if not isinstance(result, Tensor) or result.shape != (_CHECK_ROWS,):
        return _Refusal(f"returned {returned} for {_CHECK_ROWS} events; return one number an event, [B]", is_shape=True)
    if method == "loss" and not (result.is_floating_point() and result.requires_grad):
        return _Refusal(f"returned {returned} without a gradient; compute it from the output in torch")
    return None


def make_task(name: str, folder: Path = Path()) -> Task:
    """Return a built-in task by name, or the user's by import string.

    Args:
        name: one of TASKS, or `module:name` of a callable that returns a task without arguments.
        folder: the config's, which is on the path, last.

    Raises:
        ModelError: it is not there, fails, or lacks a method.
    """
    if name in TASKS:
        return TASKS[name]()
    build = _imported("model.task", name, folder)
    with _users_code(f'model.task = "{name}" fails', memory_too=True):
        task = build()
    lacking = [method for method in METHODS if not callable(getattr(task, method, None))]
    if lacking:
        raise ModelError(f'model.task = "{name}": {type(task).__name__} has no method {lacking[0]}')
    for method in _GETS_COPIES:
        if (own := getattr(task, method, None)) is not None:
            object.__setattr__(task, method, _on_copies(own))
    return cast("Task", task)


def _on_copies(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a method of the user's task that gets copies: it may write into outputs and labels, which are stored."""

    def run(output_B: Tensor, other_B: Tensor, *more: float) -> Tensor:
        return method(output_B.clone(), other_B.clone(), *more)

    return functools.update_wrapper(run, method, assigned=())


def sample(schema: Schema, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return the features of `rows` example events: all zero, or another allowed value."""
    return {feature.name: torch.from_numpy(feature.example(rows)).to(device) for feature in schema.features}


def tensor_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a name of numpy, such as `float32` or `bool`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
