"""Counters of ingest, moved by the learner, since it decides outcomes; its others are in `learner.status.metrics`."""

from prometheus_client import CollectorRegistry, Counter


class IngestMetrics:
    """Collectors with the prefix `anabranch_ingest_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rows = Counter(
            "anabranch_ingest_rows", "Events by outcome.", ["topic", "partition", "outcome"], registry=registry
        )
