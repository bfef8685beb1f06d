"""A pipeline, or a model with a strategy, on the events of data: predict first, then train.

Legend: N events.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from torch import nn

from anabranch.api.data import EventReader, arrays_of, frame_like
from anabranch.api.learner import own_generators, settings_of
from anabranch.api.replay_buffer import ReplayBuffer
from anabranch.commands.backtest.measure import run_backtest
from anabranch.commands.backtest.rows import EventsInMemory
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.event_fields import event_of
from anabranch.learner.model.device import choose_device
from anabranch.learner.settings.pipeline import PipelineSettings

_AT_ONCE = 1024
_given: dict[str, nn.Module] = {}
"""The models of the backtests that run, by the argument of `given_model`."""


def backtest(
    data: Any,
    model: nn.Module | str,
    schema: Schema,
    strategy: str | Mapping[str, Any] = "er",
    optimizer: str | Mapping[str, Any] = "adamw",
    replay: ReplayBuffer | None = None,
    task: str | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    *,
    every: int | None = None,
    label_time: str | None = None,
) -> Any:
    """Run a pipeline on events in their order, without Kafka: each is predicted before the model is trained on it.

    It is `anabranch backtest`, with the loop, store and gate of a learner.

    Args:
        data: N events with their label: a dict of arrays `[N, ...]`, or a data frame of pandas, polars or Arrow.
        model: as `Learner` takes it, of which a copy is trained; or a factory, `my_model:build`.
        schema: of the events.
        strategy: as `Learner` takes it.
        optimizer: as `Learner` takes it.
        replay: a buffer whose settings count; it stays empty.
        task: as `Learner` takes it.
        seed: of all choices: equal runs are equal.
        settings: further sections of `pipeline.toml`.
        every: events between two rows of the result; by default it has about 20.
        label_time: the field with the time at which the label is known, in seconds since 1970. By default each comes
            with its event.

    Returns:
        A row for each `every` events, as `data` comes: `events` so far, int64; `accuracy`, or of a regression
        `absolute_error`, and `loss`, of late, and with `overall_` before the name since the first event; with
        `constant_` the same of the rule that always gives one answer; NaN where there is none.

    Raises:
        AnabranchError: an argument is wrong, or no event can be used.
    """
    key = str(id(model))
    given: dict[str, Any] = {"factory": model}
    if isinstance(model, nn.Module):
        _given[key] = copy.deepcopy(model)
        given = {"factory": f"{__name__}:{given_model.__name__}", "args": {"key": key}}
    others = {**(settings or {}), "model": {**given, **(settings or {}).get("model", {})}}
    try:
        spec = settings_of(schema, strategy, optimizer, replay, task, seed, others)
        return backtest_of(spec, data, every, label_time)
    finally:
        _given.pop(key, None)


def given_model(key: str) -> nn.Module:
    """Return a copy of the model that a call of `backtest` was given: its factory."""
    return copy.deepcopy(_given[key])


def backtest_of(spec: PipelineSettings, data: Any, every: int | None, label_time: str | None) -> Any:
    """Run a pipeline by its settings; the other arguments and the result are those of `backtest`."""
    if every is not None and every < 1:
        raise SettingsError(f"backtest: every = {every} has to be 1 or more events")
    with own_generators(choose_device(spec.learner.device)):
        result = run_backtest(
            spec, EventsInMemory(_Events(Schema(spec.events), data), "the data"), every=every, label_time=label_time
        )
    score = result.score.replace(" ", "_")
    names = {
        score: "recent",
        f"overall_{score}": "overall",
        "loss": "loss",
        "overall_loss": "overall_loss",
        f"constant_{score}": "constant_recent",
        f"constant_overall_{score}": "constant_overall",
    }
    columns: dict[str, Any] = {"events": np.array([point.events for point in result.points])}
    for name, field in names.items():
        values = [getattr(point, field) for point in result.points]
        columns[name] = np.array([np.nan if value is None else value for value in values])
    return frame_like(data, columns, same_rows=False)


class _Events(Sequence[Mapping[str, Any]]):
    """The events of data, which are made as they are read."""

    def __init__(self, schema: Schema, data: Any) -> None:
        self._schema, self._reader, self._arrays = schema, EventReader(schema), arrays_of(data)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values()), ()))

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: Any) -> Any:
        part = index if isinstance(index, slice) else slice(index, index + 1)
        rows = self._reader.rows({name: array[part] for name, array in self._arrays.items()})
        events = [event_of(self._schema, row) for row in rows]
        return events if isinstance(index, slice) else events[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for begin in range(0, len(self), _AT_ONCE):
            yield from self[begin : begin + _AT_ONCE]
