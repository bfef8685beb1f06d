"""The store that a learner goes on with, and what it fits: the outputs of a strategy, and the events of a step."""

from collections.abc import Mapping
from typing import Any

from anabranch.core.errors import SettingsError
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.shared_ring import MOST_ROWS as MOST_IN_A_BLOCK
from anabranch.learner.checkpoints.format import RANK, Checkpoint
from anabranch.learner.checkpoints.part_formats import STORE
from anabranch.learner.model.examples import OUTPUT, TEACHER, output_fields
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.stream.batches import most_stored
from anabranch.learner.stream.round_robin import MOST_ROWS as MOST_WAITING
from anabranch.learner.train.setup import TrainingSetup
from anabranch.replay.build import build_store
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.store import Store
from anabranch.replay.tiers.disk_files import make_way


def open_store(
    pipeline: PipelineSettings,
    setup: TrainingSetup,
    ranks: int,
    secret: StreamSecret,
    contents: StoreSnapshot | None,
    *,
    first: bool,
    in_memory: bool = False,
) -> Store:
    """Build the store for `ranks` ranks, with the events of a checkpoint.

    `first`: whether no checkpoint names an event of the store, so that its files are not needed. `in_memory`: whether
    it has no tiers but memory.

    Raises:
        SettingsError: the store cannot be built.
        DependencyError: a tier of the store cannot be reached.
    """
    folder = STORE.folder(pipeline.state_dir)
    if first:
        make_way(folder)
    return build_pipeline_store(
        pipeline,
        setup,
        ranks,
        secret,
        folder=folder,
        contents=contents,
        keys=f"{pipeline.name}:{RANK}",
        first=first,
        complete=pipeline.complete,
        in_memory=in_memory,
    )


def build_pipeline_store(
    pipeline: PipelineSettings, setup: TrainingSetup, ranks: int, secret: StreamSecret, **others: Any
) -> Store:
    """Return the store for steps of `ranks` ranks; `others` as `build_store` takes them, and raises errors."""
    return build_store(
        pipeline.replay,
        setup.schema,
        setup.device,
        secret.number("replay"),
        extra=output_fields(setup.kept_outputs),
        dim=setup.embedding.captured().shape[1] if setup.embedding is not None else None,
        step=most_added(pipeline.learner, pipeline.stream, ranks),
        **others,
    )


def check_columns(number: int, checkpoint: Checkpoint, required: Mapping[str, list[int] | None], strategy: str) -> None:
    """Raise SettingsError unless the stored events of a checkpoint have the outputs that the strategy and the teacher
    require, and no others."""
    teacher = f"{'without' if required[TEACHER] is None else 'with'} [model.teacher]"
    for name, owner, cause in ((OUTPUT, "model", ""), (TEACHER, "teacher", f" {teacher}")):
        stored = checkpoint.state.get(name)
        if stored != required[name]:
            needed, there = (
                f"no output of the {owner}"
                if shape is None
                else f"an output{f' of the {owner}' * (name == TEACHER)} of shape {shape}"
                for shape in (required[name], stored)
            )
            raise SettingsError(
                f'learner.strategy = "{strategy}"{cause} requires {needed} with each stored event, and checkpoint '
                f"{number} has {there}; put back the strategy, model and teacher of the checkpoint, or move the "
                "checkpoints away to start again"
            )


def most_added(learner: LearnerSettings, stream: StreamSettings, ranks: int) -> int:
    """Return the largest number of events that a step of `ranks` ranks adds to the store."""
    trained = learner.batch_size * ranks
    if stream.unlabelled != "store" and stream.lag_policy.action != "store-only":
        return trained
    if learner.deterministic:
        return MOST_WAITING + trained
    return trained + most_stored(trained) + MOST_IN_A_BLOCK
