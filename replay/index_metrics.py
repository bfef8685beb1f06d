"""Metrics of the index."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from replay.embedding_index.client import IndexStats


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
