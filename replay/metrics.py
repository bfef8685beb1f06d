"""Metrics of the store and of the embedding index."""

from typing import Annotated

import msgspec
from prometheus_client import CollectorRegistry, Histogram

from anabranch.core.reported import Reported
from anabranch.core.state_metrics import StateCollector, metrics_of
from anabranch.replay.embedding_index.client import IndexStats
from anabranch.replay.embedding_index.embedding_tracker import EmbeddingTracker
from anabranch.replay.store import Store
from anabranch.replay.tiers.tier import TierStats


class StoreFigures(msgspec.Struct, frozen=True):
    """How much a store holds.

    Attributes:
        rows: of a slower cache, the events that were written to it.
        capacity: of a full store.
        lost: no slot could be written, or the payload could not be read.
        stats: what the tiers read and wrote.
    """

    rows: Annotated[dict[str, int], Reported("anabranch_replay_rows", "Events held.", "tier")]
    bytes: Annotated[dict[str, int], Reported("anabranch_replay_bytes", "Bytes of their payload.", "tier")]
    bounds: Annotated[dict[str, int], Reported("anabranch_replay_bound_bytes", "Bytes that a tier may hold.", "tier")]
    capacity: Annotated[int, Reported("anabranch_replay_capacity_rows", "Events that may be held.")]
    lost: Annotated[
        int, Reported("anabranch_replay_lost_rows_total", "Events that a tier could not keep, or not give back.")
    ]
    stats: TierStats

    @classmethod
    def of(cls, store: Store) -> "StoreFigures":
        """Read the figures off a store; called by the thread that uses it."""
        rows, tiers = store.tiers.rows(len(store)), store.tiers
        return cls(
            rows,
            {tier.name: rows[tier.name] * tier.slot_bytes for tier in tiers.all},
            {tier.name: tier.slots * tier.slot_bytes for tier in tiers.all},
            store.capacity,
            store.lost,
            tiers.stats,
        )


class ReplayMetrics:
    """Collectors with the prefix `anabranch_replay_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sample = Histogram(
            "anabranch_replay_sample_duration_seconds",
            "Time to choose and fetch the events of a step.",
            buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1),
            registry=registry,
        )
        self.index = StateCollector[IndexStats](registry, metrics_of(IndexStats))
        self._store = StateCollector[StoreFigures](registry, metrics_of(StoreFigures))

    def update(self, store: Store) -> None:
        """Read all but the durations off the store; called by the thread that uses it."""
        self._store.update(StoreFigures.of(store))
        if isinstance(store.embeddings, EmbeddingTracker):
            self.index.update(store.embeddings.neighbours.stats())
