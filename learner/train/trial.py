"""A trial of what the learner will do: whole steps, on a copy of the model, before the first event.

What cannot be used is found here, in one sentence, and not in the first step, which each restart would repeat.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from anabranch.core.errors import AnabranchError
from anabranch.core.failures import device_lost, out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.ingest.events.block import Array, BlockLayout
from anabranch.ingest.events.schema import Schema
from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.learner.errors import ModelError
from anabranch.learner.model.embedding import Embeddings
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.factory import forward, sample
from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.model.rng import GeneratorStates
from anabranch.learner.model.trained_set import copy_sharing_base, load_trained
from anabranch.learner.strategies.base import Strategy
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

_ROWS = 4

log = logging.getLogger(__name__)


def try_steps(
    setup: TrainingSetup,
    make_strategy: Callable[[], Strategy],
    make_embedding: Callable[[nn.Module], Embeddings | None],
) -> None:
    """Take steps on a copy of the model, respond to a drift, restore a checkpoint, and copy the result.

    The steps are of several new events with replayed ones, and of one new event. Neither the compiler nor CUDA graphs
    take part. The model and the random generators are unchanged afterwards. Where memory does not suffice for two
    models at once, nothing is tried.

    Raises:
        ModelError: something fails.
        SettingsError: the strategy does not fit the model.
    """
    device, schema, settings = setup.device, setup.schema, setup.settings
    generators = GeneratorStates(device)
    plain = settings.model_copy(update={"compile": False})
    try:
        copied = copy_sharing_base(setup.model)
        own = replace(setup, model=copied, settings=plain, embedding=make_embedding(copied), loss_wrappers=())
        trainer = Trainer(replace(own, strategy=make_strategy()))
        label = first_label(trainer, schema)
        columns = _columns(schema, 1, label)
        trainer.step(trainer.examples(columns), (), columns)
        trainer.on_drift()
        trainer.restore(trainer.tensors(), trainer.state())
        columns = _columns(schema, _ROWS, label)
        trainer.step(trainer.examples(columns), (), columns)
        scored = copy_sharing_base(trainer.model).eval().requires_grad_(False)
        load_trained(scored, trainer.snapshot())
        with torch.inference_mode():
            forward(scored, sample(schema, 1, device))
    except AnabranchError as exc:
        if not out_of_memory(exc.__cause__ or exc):
            raise
    except (Exception, SystemExit) as exc:  # the user's own code may raise anything
        if device_lost(exc):
            raise
        if not out_of_memory(exc):
            why = exc.message if isinstance(exc, RaisingEventsError) else in_one_line(exc)
            raise ModelError(
                f'model.factory: a step fails with learner.strategy = "{settings.strategy.name}" and '
                f'learner.optimizer = "{settings.optimizer.name}": {why}'
            ) from exc
        log.info("%s has no memory for a trial of the first step", device)
    finally:
        generators.restore()
    free_cached_memory(device)


def first_label(trainer: Trainer, schema: Schema) -> int:
    """Take a step with replayed events; return the labels that it takes, 0 and 1 or only 1, as of prices."""
    try:
        _step(trainer, schema, 0)
    except Exception as exc:
        if out_of_memory(exc) or device_lost(exc) or isinstance(exc, AnabranchError):
            raise
        _step(trainer, schema, 1)
        return 1
    return 0


def _step(trainer: Trainer, schema: Schema, label: int) -> None:
    columns = _columns(schema, _ROWS, label)
    trainer.step(*made_up_step(trainer, columns, trainer.strategy.samples(_ROWS)), columns)


def made_up_step(
    trainer: Trainer, columns: Mapping[str, Array], samples: Sequence[int]
) -> tuple[Examples, list[Examples]]:
    """Return the examples of a step: the events of `columns`, as new ones, and of each sample the first of them."""
    new = trainer.examples(columns)
    old = [new[:rows] for rows in samples if rows]
    if not trainer.strategy.kind.keeps_output:
        return new, old
    with torch.no_grad():
        return new, [replace(each, output_B=forward(trainer.model, each.features).float()) for each in old]


def _columns(schema: Schema, rows: int, label: int) -> dict[str, Array]:
    """Return events as blocks have them, all-zero but for their labels: `label` and then 1 in turn."""
    columns = BlockLayout(schema).empty(rows)
    for feature in schema.features:
        columns[f"feature.{feature.name}"] = feature.example(rows)
    values = np.resize(np.array([label, 1]), (rows, *[1] * len(schema.label.shape)))
    columns["label"] = np.broadcast_to(values, (rows, *schema.label.shape)).astype(schema.label.dtype)
    columns["labelled"], columns["weight"] = np.ones(rows, np.bool_), np.ones(rows, np.float32)
    return columns


def made_up_columns(schema: Schema, rows: int, label: int, seed: int) -> dict[str, Array]:
    """Return the same with other values of features of floating point for each seed."""
    columns, generator = _columns(schema, rows, label), np.random.default_rng(seed)
    for feature in schema.features:
        column = columns[f"feature.{feature.name}"]
        if column.dtype.kind == "f":
            values = generator.standard_normal(column.shape)
            least = -math.inf if feature.min is None else feature.min
            most = math.inf if feature.max is None else feature.max
            columns[f"feature.{feature.name}"] = values.clip(least, most).astype(column.dtype)
    return columns
