"""Metrics of the store and of the embedding index."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram

from anabranch.core.state_metrics import StateCollector, StateCounter, StateGauge
from replay.embedding_index.client import IndexStats
from replay.store import Store

STORE_METRICS: Sequence[StateGauge[Store]] = (
    StateGauge("anabranch_replay_rows", "Events held.", lambda store: store.rows, "tier"),
    StateGauge("anabranch_replay_bytes", "Bytes of their payload.", lambda store: store.bytes, "tier"),
    StateGauge("anabranch_replay_bound_bytes", "Bytes that a tier may hold.", lambda store: store.bounds, "tier"),
    StateGauge("anabranch_replay_capacity_rows", "Events that may be held.", lambda store: store.capacity),
    StateCounter(
        "anabranch_replay_read_rows",
        "Events read for samples, by the tier they came from.",
        lambda store: store.tiers.stats.read,
        "tier",
    ),
    StateCounter(
        "anabranch_replay_stall_seconds",
        "Time that steps waited for a slower tier, or for what the store had to do before.",
        lambda store: store.tiers.stats.stall_seconds,
    ),
    StateCounter(
        "anabranch_replay_lost_rows", "Events that a tier could not keep, or not give back.", lambda store: store.lost
    ),
    StateCounter(
        "anabranch_replay_missed_rows",
        "Events that a cache was to have and had not: they came from a slower tier, and are put back.",
        lambda store: store.tiers.stats.missed,
        "tier",
    ),
    StateCounter(
        "anabranch_replay_moved_bytes",
        "Bytes of payload read from a tier for samples, or written to it.",
        lambda store: store.tiers.stats.moved,
        "tier",
        "direction",
    ),
    StateCounter(
        "anabranch_replay_demoted_rows",
        "Events in the memory tier that made way for others.",
        lambda store: store.tiers.demoted,
    ),
)

INDEX_METRICS: Sequence[StateGauge[IndexStats]] = (
    StateGauge("anabranch_replay_index_rows", "Embeddings in the index.", lambda stats: stats.process.rows),
    StateGauge(
        "anabranch_replay_index_tombstone_rows",
        "Embeddings that were removed or replaced and not taken out yet.",
        lambda stats: stats.process.tombstones,
    ),
    StateGauge(
        "anabranch_replay_index_trained_rows",
        "Embeddings that were there when clusters were trained last.",
        lambda stats: stats.process.trained_rows,
    ),
    StateGauge(
        "anabranch_replay_index_recall_ratio",
        "Nearest events that are found, of those that an exhaustive search finds.",
        lambda stats: stats.process.recall,
    ),
    StateGauge(
        "anabranch_replay_index_age_steps",
        "Steps since embeddings were made.",
        lambda stats: {"mean": stats.process.age_mean, "max": stats.process.age_max},
        "stat",
    ),
    StateGauge(
        "anabranch_replay_index_stale_rows",
        "Embeddings that are to be computed again.",
        lambda stats: stats.process.stale,
    ),
    StateGauge("anabranch_replay_index_bytes", "Memory of the index.", lambda stats: stats.process.bytes),
    StateGauge("anabranch_replay_index_waiting_requests", "Requests without a reply.", lambda stats: stats.waiting),
    StateGauge(
        "anabranch_replay_index_answer_seconds",
        "From the last question to its answer.",
        lambda stats: stats.answer_seconds,
    ),
    StateCounter(
        "anabranch_replay_index_declined",
        "Embeddings, questions and removals that the index had no time for.",
        lambda stats: stats.declined,
        "request",
    ),
    StateCounter(
        "anabranch_replay_index_left_out_rows",
        "Embeddings that were left out, being malformed or more than fit.",
        lambda stats: {"malformed": stats.malformed, "full": stats.full},
        "reason",
    ),
    StateCounter("anabranch_replay_index_restarts", "How often the index process died.", lambda stats: stats.restarts),
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
        self.index = StateCollector(registry, INDEX_METRICS)
        self._store = StateCollector(registry, STORE_METRICS)

    def update(self, store: Store) -> None:
        """Read all but the durations off the store; called by the thread that uses it."""
        self._store.update(store)
        if store.neighbours is not None:
            self.index.update(store.neighbours.stats())
