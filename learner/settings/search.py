"""The section `[search]`: challengers of the trained model, with other settings. Imports no torch."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from anabranch.core.settings import Section

LR, WEIGHT_DECAY, MOMENTUM = (f"learner.optimizer.{name}" for name in ("lr", "weight_decay", "momentum"))
MAX_GRAD_NORM = "learner.max_grad_norm"
TUNABLE = LR, WEIGHT_DECAY, MOMENTUM, MAX_GRAD_NORM
"""The keys that a model may change between two steps."""
ARGS = "model.args."
"""What a key of an argument of the factory begins with, an integer such as a width: a challenger with another one has
its own network."""

Range = tuple[float, float]


def _ranges(space: Mapping[str, Range]) -> Mapping[str, Range]:
    for key, (low, high) in space.items():
        if key.startswith(ARGS):
            if not (low.is_integer() and high.is_integer() and 0 <= low < high):
                raise ValueError(
                    f"{key} = [{low:g}, {high:g}] is no range of integers: write [low, high], with 0 <= low < high"
                )
            continue
        if key not in TUNABLE:
            raise ValueError(
                f"{key} cannot be changed between two steps of one model; keys that can are {', '.join(TUNABLE)}. "
                f"{ARGS}NAME, an integer of [model].args, is tried by challengers with their own network"
            )
        least = 0.0 if key == WEIGHT_DECAY else math.ulp(0.0)
        if not least <= low < high < math.inf:
            raise ValueError(f"{key} = [{low:g}, {high:g}] is no range: write [low, high], with 0 < low < high")
        if key == MOMENTUM and high >= 1:
            raise ValueError(f"{key} = [{low:g}, {high:g}] reaches 1, where momentum grows without end")
    return space


class SearchSettings(Section):
    """Challengers look for better settings: they train with other values on the same events."""

    challengers: Annotated[int, Field(ge=1, le=64)] = 4
    """Most challengers at once; each has a copy of the weights and of the optimizer's state."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of the steps' time for challengers in the long run: with 0.2, about a seventh as many steps as the
    model."""
    space: Annotated[dict[str, Range], Field(min_length=1), AfterValidator(_ranges)] = {LR: (1e-6, 1.0)}
    """The range of each key that challengers change, such as `{"learner.optimizer.lr" = [1e-6, 1.0]}`. A key
    `model.args.NAME` is of an integer argument of the factory, such as a width or a depth; it needs
    `promote = "alert"`."""
    promote: Literal["alert", "auto"] = "alert"
    """What happens when a challenger is shown to be better: `alert` reports it, and `anabranch search promote` takes
    its settings; with `auto` its weights, optimizer and settings become the model's."""
    measure: Literal["loss", "score"] = "loss"
    """What is compared, on new events before training on them: the task's loss, or its score, such as accuracy."""


def arguments_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of arguments of the factory, by their names."""
    return {key.removeprefix(ARGS): value for key, value in values.items() if key.startswith(ARGS)}


def search_conflicts(
    search: SearchSettings,
    momentum: object,
    max_grad_norm: float,
    args: Mapping[str, Any] | None = None,
    *,
    deterministic: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield each key of `[search]` that does not fit a learner with these settings, and one sentence on it.

    `momentum`: of the optimizer; `args`: `model.args`.
    """
    yield from _network_conflicts(search, args or {}, deterministic=deterministic)
    if MOMENTUM in search.space and not momentum:
        yield "space", f"search.space has {MOMENTUM}, and the optimizer has none; set it, or take it out of the space"
    if MAX_GRAD_NORM in search.space and max_grad_norm == math.inf:
        yield (
            "space",
            f"search.space has {MAX_GRAD_NORM}, which is inf; set a number, or take it out of the space",
        )


def _network_conflicts(
    search: SearchSettings, args: Mapping[str, Any], *, deterministic: bool
) -> Iterator[tuple[str, str]]:
    names = arguments_of(search.space)
    for name in names:
        if type(args.get(name)) is not int:
            sentence = (
                f"search.space has {ARGS}{name}, and [model].args has no integer {name}: write there the one that the "
                "model has now, or take the key out of the space"
            )
            yield "space", sentence
    if not names:
        return
    key = f"{ARGS}{next(iter(names))}"
    if search.promote == "auto":
        sentence = (
            f'search.promote = "auto" does not go with {key} in search.space: a learner keeps the network that its '
            'checkpoints and versions have; write "alert", or take the key out of the space'
        )
        yield "promote", sentence
    if deterministic:
        sentence = (
            f"search.space has {key}, which does not go with learner.deterministic = true: whether a network is fast "
            "enough depends on a clock; set it to false, or take the key out of the space"
        )
        yield "space", sentence


def shown(values: Mapping[str, float]) -> str:
    """Return settings as a person writes them."""
    return ", ".join(f"{key} = {value:{'.0f' if key.startswith(ARGS) else '.4g'}}" for key, value in values.items())
