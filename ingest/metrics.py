"""Metrics of ingest, counted by the learner from the blocks, since it is the learner that settles outcomes."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class IngestMetrics:
    """Collectors with the prefix `anabranch_ingest_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rows = Counter(
            "anabranch_ingest_rows", "Events by outcome.", ["topic", "partition", "outcome"], registry=registry
        )
        self.skipped = Gauge(
            "anabranch_ingest_skipped_rows", "Skipped events by reason.", ["reason"], registry=registry
        )
        self.lag = Gauge(
            "anabranch_ingest_lag_offsets", "Offsets not yet read.", ["topic", "partition"], registry=registry
        )
