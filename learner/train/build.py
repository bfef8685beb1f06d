"""Builds what each rank trains with from the settings."""

import functools
import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import Precision, choose_precision, compute_deterministically
from anabranch.learner.model.embedding import build_embedding_source
from anabranch.learner.model.factory import (
    build_on_device,
    check_converted,
    check_copies,
    check_distil,
    check_model,
    check_task,
    check_training_pass,
    make_task,
)
from anabranch.learner.model.rng import seed_rng
from anabranch.learner.model.task import Task
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.strategies.base import LossWrapper
from anabranch.learner.strategies.early_negatives import ImportanceWeights, check_early
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.strategies.teacher_loss import TeacherLoss, kept_outputs
from anabranch.learner.train.graph_trial import choose_graphs
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trial import try_steps

Stage = Literal["task", "factory", "embedding", "output", "strategy", "steps"]
"""What a rank builds or tries next, in this order; "embedding" and "output" more than once."""

log = logging.getLogger(__name__)


def build_training_setup(
    deployment: PipelineSettings, device: torch.device, group: int = 0, built: nn.Module | None = None
) -> TrainingSetup:
    """Build and check the training setup of a rank; each row group has other random numbers from then on.

    `built`: a module in place of what the factory of `[model]` returns.
    """
    schema = Schema(deployment.events, deployment.stream.labels)
    if deployment.learner.deterministic:
        compute_deterministically()
    precision = choose_precision(deployment.learner.precision, device)
    precision.configure()
    task, model = build_task_and_model(deployment, schema, device, precision.name, group, built=built)
    return complete_setup(deployment, schema, task, model, device, precision)


def build_task_and_model(
    deployment: PipelineSettings,
    schema: Schema,
    device: torch.device,
    precision: str = "fp32",
    group: int = 0,
    begin: Callable[[Stage], object] = bool,
    built: nn.Module | None = None,
) -> tuple[Task, nn.Module]:
    """Return the task, and the model as its factory and the settings make it; `begin` gets each stage before that.

    `built`: a module in place of what the factory returns.
    """
    seed_rng(deployment.seed + group, python=deployment.learner.mesh is not None)
    begin("task")
    task = make_task(deployment.model.task, deployment.folder)
    begin("factory")
    return task, build_on_device(deployment.model, deployment.folder, device, schema, precision, built)


def complete_setup(
    deployment: PipelineSettings,
    schema: Schema,
    task: Task,
    model: nn.Module,
    device: torch.device,
    precision: Precision,
    begin: Callable[[Stage], object] = bool,
) -> TrainingSetup:
    """Check a model, let the strategy convert it, and take steps on a copy; `begin` gets each stage before that.

    Raises:
        SettingsError: something does not fit, at the stage that began last.
    """
    begin("embedding")
    embedding_of = functools.partial(
        build_embedding_source,
        deployment.model,
        deployment.learner.strategy,
        deployment.replay,
        task=task,
        features=[feature.name for feature in schema.features],
    )
    embedding = embedding_of(model)
    begin("output")
    output_shape = check_model(model, task, schema, device)
    check_task(task, output_shape, schema.label, device)
    begin("embedding")
    if embedding is not None:
        embedding.captured()
    begin("strategy")
    strategy = build_strategy(deployment.learner.strategy, deployment.model, task)
    model = strategy.convert(model, ModelContext(device, schema, deployment.model.embedding))
    check_converted(model, deployment.model, deployment.learner.strategy)
    labels, loss_wrappers = deployment.stream.labels, list[LossWrapper]()
    if labels is not None and (labels.early != "none" or labels.take_back):
        check_early(task, schema.label, strategy, deployment.learner.strategy.name)
        loss_wrappers.append(ImportanceWeights())
    begin("output")
    if strategy.kind.learns_gradient:
        check_training_pass(model, task, schema, device, precision)
    check_copies(model, schema, device)
    if (teacher := deployment.model.teacher) is not None:
        distils = check_distil(task, deployment.model.task, output_shape, device)
        loss_wrappers.append(TeacherLoss(distils, teacher.weight, teacher.temperature))
    setup = TrainingSetup(
        schema=schema,
        task=task,
        model=model,
        embedding=embedding,
        precision=precision,
        device=device,
        strategy=strategy,
        settings=deployment.learner,
        output_shape=output_shape,
        kept_outputs=kept_outputs(strategy, output_shape, taught=teacher is not None),
        loss_wrappers=loss_wrappers,
        stages=deployment.model.stages,
        parallel=deployment.model.parallel,
    )
    begin("steps")
    if deployment.learner.mesh is None and deployment.learner.sharding != "fsdp":  # the whole model may not fit twice
        make_strategy = functools.partial(build_strategy, deployment.learner.strategy, deployment.model, task)
        try_steps(setup, make_strategy, embedding_of)
        setup = choose_graphs(deployment, setup, make_strategy, embedding_of)
    return setup
