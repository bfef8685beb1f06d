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

_MOST_GROUPS = 2**15 - 1


@dataclass(frozen=True)
class Policies:
    """Who enters, who leaves, who is sampled.

    Attributes:
        admission: how events compete.
        quotas: how many may stay.
        sampler: who is sampled.
        whereabouts: where events lie in the model's embedding, for policies that ask; else None.
    """

    admission: Admission
    quotas: Quotas
    sampler: Sampler
    whereabouts: EmbeddingTracker | None = None


@dataclass(frozen=True)
class AdmissionContext:
    """What an admission policy may depend on.

    Attributes:
        classes: of which an event has just one; None where it has several, and for regression.
        half_life: `replay.half_life`.
        clusters: of the embeddings; None where there are none.
    """

    classes: int | None
    half_life: timedelta
    clusters: int | None


def _classes_kept(around: AdmissionContext) -> Admission:
    if around.classes is None or around.classes >= _MOST_GROUPS:
        raise SettingsError(
            'replay.admission = "class-balanced" needs schema.label.classes, fewer than 32767 and one an event; '
            'write "reservoir"'
        )
    return ClassBalancedAdmission(around.classes)


def _clusters_kept(around: AdmissionContext) -> Admission:
    if around.clusters is None:
        raise SettingsError('replay.admission = "diverse" needs model.embedding: the module whose output is compared')
    return DiverseAdmission(around.clusters)


ADMISSIONS: dict[str, Callable[[AdmissionContext], Admission]] = {
    "reservoir": lambda _: ReservoirAdmission(),
    "class-balanced": _classes_kept,
    "recent": lambda around: RecencyAdmission(around.half_life),
    "diverse": _clusters_kept,
}


@dataclass(frozen=True)
class SamplerContext:
    """What a sampler may depend on.

    Attributes:
        entries: the index of the store.
        slots: how many slots it has.
        classes: of which an event has just one; None where it has several, and for regression.
        half_life: `replay.half_life`.
        whereabouts: what knows where events lie in the model's embedding; None where there is none.
    """

    entries: EventTable
    slots: int
    classes: int | None
    half_life: timedelta
    whereabouts: EmbeddingTracker | None


def _classes_sampled(company: SamplerContext) -> Sampler:
    if company.classes is None:
        raise SettingsError(
            'replay.sampling = "class-balanced" needs schema.label.classes, one an event; write "uniform"'
        )
    # A label of -1, for none, is a group as any other.
    return BalancedSampler(company.entries, lambda slots: company.entries.of("label", slots).astype(np.int64) + 1)


def _whereabouts(company: SamplerContext, name: str) -> EmbeddingTracker:
    if company.whereabouts is None:
        raise SettingsError(
            f'replay.sampling = "{name}" needs model.embedding: the module whose output is compared, such as "body"'
        )
    return company.whereabouts


SAMPLERS: dict[str, Callable[[SamplerContext], Sampler]] = {
    "uniform": lambda company: UniformSampler(company.entries),
    "class-balanced": _classes_sampled,
    "recent": lambda company: RecencySampler(company.entries, company.slots, company.half_life),
    "loss": lambda company: PrioritizedSampler(company.entries, company.slots),
    "similar": lambda company: NeighbourSampler(company.entries, _whereabouts(company, "similar")),
    "diverse": lambda company: ClusterSampler(company.entries, _whereabouts(company, "diverse")),
}
