"""Metrics of the store."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from replay.embedding_index.client import IndexStats
from replay.store import Store


class ReplayMetrics:
    """Collectors with the prefix `anabranch_replay_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rows = Gauge("anabranch_replay_rows", "Events held.", ["tier"], registry=registry)
        self.bytes = Gauge("anabranch_replay_bytes", "Bytes of their payload.", ["tier"], registry=registry)
        self.bound = Gauge("anabranch_replay_bound_bytes", "Bytes that a tier may hold.", ["tier"], registry=registry)
        self.capacity = Gauge("anabranch_replay_capacity_rows", "Events that may be held.", registry=registry)
        self.sample = Histogram(
            "anabranch_replay_sample_duration_seconds",
            "Time to choose and fetch the events of a step.",
            buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1),
            registry=registry,
        )
        self.read = Counter(
            "anabranch_replay_read_rows",
            "Events read for samples, by the tier they came from.",
            ["tier"],
            registry=registry,
        )
        self.stall = Counter(
            "anabranch_replay_stall_seconds",
            "Time that steps waited for a slower tier, or for what the store had to do before.",
            registry=registry,
        )
        self.lost = Counter(
            "anabranch_replay_lost_rows", "Events that a tier could not keep, or not give back.", registry=registry
        )
        self.missed = Counter(
            "anabranch_replay_missed_rows",
            "Events that a cache was to have and had not: they came from a slower tier, and are put back.",
            ["tier"],
            registry=registry,
        )
        self.moved = Counter(
            "anabranch_replay_moved_bytes",
            "Bytes of payload read from a tier for samples, or written to it.",
            ["tier", "direction"],
            registry=registry,
        )
        self.demoted = Counter(
            "anabranch_replay_demoted_rows", "Events in the memory tier that made way for others.", registry=registry
        )
        self.index = IndexMetrics(registry)
        self._told: dict[str, float] = {}

    def tell(self, store: Store) -> None:
        """Set what can be read off a store at one moment."""
        for tier, rows in store.rows.items():
            self.rows.labels(tier).set(rows)
            self.bytes.labels(tier).set(store.bytes[tier])
            self.bound.labels(tier).set(store.bounds[tier])
        self.capacity.set(store.capacity)
        for tier, rows in store.tiers.stats.read.items():
            self._count(self.read.labels(tier), f"read {tier}", rows)
        for tier, rows in store.tiers.stats.missed.items():
            self._count(self.missed.labels(tier), f"missed {tier}", rows)
        for (tier, direction), size in store.tiers.stats.moved.items():
            self._count(self.moved.labels(tier, direction), f"{direction} {tier} bytes", size)
        self._count(self.demoted, "demoted", store.tiers.demoted)
        self._count(self.stall, "stall", store.tiers.stats.stall_seconds)
        self._count(self.lost, "lost", store.lost)
        if store.neighbours is not None:
            self.index.tell(store.neighbours.stats())

    def _count(self, counter: Counter, name: str, total: float) -> None:
        counter.inc(total - self._told.get(name, 0))
        self._told[name] = total


class IndexMetrics:
    """Collectors with the prefix `anabranch_replay_index_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rows = Gauge("anabranch_replay_index_rows", "Embeddings in the index.", registry=registry)
        self.tombstones = Gauge(
            "anabranch_replay_index_tombstone_rows",
            "Embeddings that were removed or replaced and not taken out yet.",
            registry=registry,
        )
        self.trained = Gauge(
            "anabranch_replay_index_trained_rows",
            "Embeddings that were there when clusters were trained last.",
            registry=registry,
        )
        self.recall = Gauge(
            "anabranch_replay_index_recall_ratio",
            "Nearest events that are found, of those that an exhaustive search finds.",
            registry=registry,
        )
        self.age = Gauge(
            "anabranch_replay_index_age_steps", "Steps since embeddings were made.", ["stat"], registry=registry
        )
        self.stale = Gauge(
            "anabranch_replay_index_stale_rows", "Embeddings that are to be made anew.", registry=registry
        )
        self.bytes = Gauge("anabranch_replay_index_bytes", "Memory of the index.", registry=registry)
        self.waiting = Gauge("anabranch_replay_index_waiting_requests", "Requests without a reply.", registry=registry)
        self.answer = Gauge(
            "anabranch_replay_index_answer_seconds", "From the last question to its answer.", registry=registry
        )
        self.declined = Counter(
            "anabranch_replay_index_declined",
            "Embeddings, questions and removals that the index had no time for.",
            ["request"],
            registry=registry,
        )
        self.left_out = Counter(
            "anabranch_replay_index_left_out_rows",
            "Embeddings that were left out, being malformed or more than fit.",
            ["reason"],
            registry=registry,
        )
        self.restarts = Counter(
            "anabranch_replay_index_restarts", "How often the index process died.", registry=registry
        )
        self._told: dict[str, int] = {}

    def tell(self, stats: IndexStats) -> None:
        """Set what can be read off the index at one moment."""
        process = stats.process
        self.rows.set(process.rows)
        self.tombstones.set(process.tombstones)
        self.trained.set(process.trained_rows)
        self.recall.set(process.recall)
        self.age.labels("mean").set(process.age_mean)
        self.age.labels("max").set(process.age_max)
        self.stale.set(process.stale)
        self.bytes.set(process.bytes)
        self.waiting.set(stats.waiting)
        self.answer.set(stats.answer_seconds)
        for request, count in stats.declined.items():
            self._count(self.declined.labels(request), request, count)
        self._count(self.left_out.labels("malformed"), "malformed", stats.malformed)
        self._count(self.left_out.labels("full"), "full", stats.full)
        self._count(self.restarts, "restarts", stats.restarts)

    def _count(self, counter: Counter, name: str, total: int) -> None:
        counter.inc(total - self._told.get(name, 0))
        self._told[name] = total
