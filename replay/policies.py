"""The policies of `[replay]` by name: a new one is a class in a file of its own, and one line here."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from anabranch.core.errors import SettingsError
from replay.embedding_index.embedding_tracker import EmbeddingTracker
from replay.reservoir.admission import (
    Admission,
    ClassBalancedAdmission,
    DiverseAdmission,
    RecencyAdmission,
    ReservoirAdmission,
)
from replay.reservoir.event_table import EventTable
from replay.reservoir.quotas import Quotas
from replay.sampling.balanced import BalancedSampler, ClusterSampler
from replay.sampling.base import Sampler, UniformSampler
from replay.sampling.neighbours import NeighbourSampler
from replay.sampling.proportional import PrioritizedSampler, RecencySampler

_MAX_GROUPS = 2**15 - 1


@dataclass(frozen=True)
class Policies:
    """Which events are held and which are sampled.

    Attributes:
        admission: the priority and the group of each event.
        quotas: how many events of each group are held.
        sampler: which held events are sampled.
        tracker: the embeddings of events; None if no policy needs them.
    """

    admission: Admission
    quotas: Quotas
    sampler: Sampler
    tracker: EmbeddingTracker | None = None


@dataclass(frozen=True)
class AdmissionContext:
    """The inputs of admission policies.

    Attributes:
        classes: the number of classes, if an event has exactly one; else None.
        half_life: `replay.half_life`.
        clusters: the number of clusters of embeddings; None if there are none.
    """

    classes: int | None
    half_life: timedelta
    clusters: int | None


def _classes_kept(context: AdmissionContext) -> Admission:
    if context.classes is None or context.classes >= _MAX_GROUPS:
        raise SettingsError(
            'replay.admission = "class-balanced" needs schema.label.classes, fewer than 32767 and one an event; '
            'write "reservoir"'
        )
    return ClassBalancedAdmission(context.classes)


def _clusters_kept(context: AdmissionContext) -> Admission:
    if context.clusters is None:
        raise SettingsError('replay.admission = "diverse" needs model.embedding: the module whose output is compared')
    return DiverseAdmission(context.clusters)


ADMISSIONS: dict[str, Callable[[AdmissionContext], Admission]] = {
    "reservoir": lambda _: ReservoirAdmission(),
    "class-balanced": _classes_kept,
    "recent": lambda context: RecencyAdmission(context.half_life),
    "diverse": _clusters_kept,
}


@dataclass(frozen=True)
class SamplerContext:
    """The inputs of samplers.

    Attributes:
        event_table: of the store.
        slots: how many slots it has.
        classes: the number of classes, if an event has exactly one; else None.
        half_life: `replay.half_life`.
        tracker: the embeddings of events; None if there are none.
    """

    event_table: EventTable
    slots: int
    classes: int | None
    half_life: timedelta
    tracker: EmbeddingTracker | None


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
        raise SettingsError(
            f'replay.sampling = "{name}" needs model.embedding: the module whose output is compared, such as "body"'
        )
    return context.tracker


SAMPLERS: dict[str, Callable[[SamplerContext], Sampler]] = {
    "uniform": lambda context: UniformSampler(context.event_table),
    "class-balanced": _classes_sampled,
    "recent": lambda context: RecencySampler(context.event_table, context.slots, context.half_life),
    "loss": lambda context: PrioritizedSampler(context.event_table, context.slots),
    "similar": lambda context: NeighbourSampler(context.event_table, _tracker_of(context, "similar")),
    "diverse": lambda context: ClusterSampler(context.event_table, _tracker_of(context, "diverse")),
}
