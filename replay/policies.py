"""The policies of `[replay]`: ours by name, others by import string."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from anabranch.core.errors import SettingsError
from anabranch.core.users_code import build
from anabranch.replay.embedding_index.embedding_tracker import ClusterSampler, EmbeddingTracker, NeighbourSampler
from anabranch.replay.reservoir.admission import (
    Admission,
    ClassBalancedAdmission,
    ClassFloor,
    DistinctAdmission,
    DiverseAdmission,
    RecencyAdmission,
)
from anabranch.replay.reservoir.embeddings import RecentEmbeddings
from anabranch.replay.reservoir.event_table import EventTable
from anabranch.replay.sampling.balanced import BalancedSampler
from anabranch.replay.sampling.base import Sampler, UniformSampler
from anabranch.replay.sampling.weighted import RECENT, AgreementSampler, PrioritizedSampler, RecencySampler
from anabranch.replay.settings import ADMISSION, SAMPLING, ReplaySettings

_MAX_GROUPS = 2**15 - 1


@dataclass(frozen=True)
class AdmissionContext:
    """The inputs of admission policies.

    Attributes:
        classes: the number of classes, if an event has exactly one; else None.
        half_life: `replay.half_life`.
        clusters: the number of clusters of embeddings; None if there are none.
        class_floor: `replay.class_floor`.
    """

    classes: int | None
    half_life: timedelta
    clusters: int | None
    class_floor: float = 0.0


def _classes_of(context: AdmissionContext, setting: str, instead: str) -> int:
    if context.classes is None or context.classes >= _MAX_GROUPS:
        raise SettingsError(
            f"replay.{setting} needs schema.label.classes, fewer than 32767 and one an event; {instead}"
        )
    return context.classes


def _classes_kept(context: AdmissionContext) -> Admission:
    return ClassBalancedAdmission(_classes_of(context, 'admission = "class-balanced"', 'write "reservoir"'))


def _floor_of(context: AdmissionContext) -> ClassFloor | None:
    share = context.class_floor
    return ClassFloor(_classes_of(context, f"class_floor = {share:g}", "write 0"), share) if share else None


def _clusters_of(context: AdmissionContext, name: str) -> int:
    if context.clusters is None:
        raise SettingsError(f'replay.admission = "{name}" needs model.embedding: the module whose output is compared')
    return context.clusters


def _distinct_kept(context: AdmissionContext) -> Admission:
    _clusters_of(context, "distinct")
    if context.classes is None:
        raise SettingsError('replay.admission = "distinct" needs schema.label.classes, one an event; write "reservoir"')
    return DistinctAdmission(_floor_of(context))


ADMISSIONS: dict[str, Callable[[AdmissionContext], Admission]] = {
    "reservoir": lambda context: Admission(_floor_of(context)),
    "class-balanced": _classes_kept,
    "recent": lambda context: RecencyAdmission(context.half_life, _floor_of(context)),
    "distinct": _distinct_kept,
    "diverse": lambda context: DiverseAdmission(_clusters_of(context, "diverse")),
}


@dataclass(frozen=True)
class SamplerContext:
    """The inputs of samplers.

    Attributes:
        event_table: of the store.
        slots: how many slots it has.
        classes: the number of classes, if an event has exactly one; else None.
        half_life: `replay.half_life`.
        tracker: the embeddings of events; None if there are none, or no policy needs the index process.
        dim: numbers of an embedding; None if there are none.
    """

    event_table: EventTable
    slots: int
    classes: int | None
    half_life: timedelta
    tracker: EmbeddingTracker | None
    dim: int | None = None


def _classes_sampled(context: SamplerContext) -> Sampler:
    if context.classes is None:
        raise SettingsError(
            'replay.sampling = "class-balanced" needs schema.label.classes, one an event; write "uniform"'
        )
    # Events without a label, -1, are a group as well.
    return BalancedSampler(
        context.event_table, lambda slots: context.event_table.column("label", slots).astype(np.int64) + 1
    )


def _tracker_of(context: SamplerContext, name: str) -> EmbeddingTracker:
    if context.tracker is None:
        raise _no_embedding(name)
    return context.tracker


def _agreement(context: SamplerContext) -> Sampler:
    if context.dim is None:
        raise _no_embedding("agreement")
    if context.classes is None:
        raise SettingsError('replay.sampling = "agreement" needs schema.label.classes, one an event; write "uniform"')
    return AgreementSampler(context.event_table, context.slots, RecentEmbeddings(context.dim, RECENT))


def _no_embedding(name: str) -> SettingsError:
    return SettingsError(
        f'replay.sampling = "{name}" needs model.embedding: the module whose output is compared, such as "body"'
    )


def make_admission(settings: ReplaySettings, context: AdmissionContext) -> Admission:
    """Build the policy of `replay.admission`; raises SettingsError when the context or an argument does not fit."""
    if settings.admission in ADMISSIONS:
        return ADMISSIONS[settings.admission](context)
    kind = ADMISSION.find(settings.admission)
    admission: Admission = build("replay.admission", settings.admission, kind, settings.admission_args)
    if admission.by_cluster or not 0 < admission.groups <= _MAX_GROUPS:
        raise SettingsError(
            f'replay.admission = "{settings.admission}" has {admission.groups} groups, by_cluster = '
            f"{admission.by_cluster}; return 1 to {_MAX_GROUPS} groups, which are no clusters of embeddings"
        )
    return admission


def make_sampler(settings: ReplaySettings, context: SamplerContext) -> Sampler:
    """Build the sampler of `replay.sampling`; raises SettingsError when the context or an argument does not fit."""
    if settings.sampling in SAMPLERS:
        return SAMPLERS[settings.sampling](context)
    kind = SAMPLING.find(settings.sampling)
    if kind.uses_embeddings and context.dim is None:
        raise _no_embedding(settings.sampling)
    sampler: Sampler = build("replay.sampling", settings.sampling, kind, settings.sampling_args, context.event_table)
    return sampler


SAMPLERS: dict[str, Callable[[SamplerContext], Sampler]] = {
    "uniform": lambda context: UniformSampler(context.event_table),
    "class-balanced": _classes_sampled,
    "recent": lambda context: RecencySampler(context.event_table, context.slots, context.half_life),
    "loss": lambda context: PrioritizedSampler(context.event_table, context.slots),
    "agreement": _agreement,
    "similar": lambda context: NeighbourSampler(context.event_table, _tracker_of(context, "similar")),
    "diverse": lambda context: ClusterSampler(context.event_table, _tracker_of(context, "diverse")),
}
