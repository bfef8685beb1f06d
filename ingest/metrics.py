"""Metrics of ingest, counted by the learner from the blocks, since the learner decides outcomes."""

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
        self.letters_dropped = Counter(
            "anabranch_ingest_letters_dropped",
            "Dead letters that were not written: refused even without contents, or of a loop of pipelines.",
            ["reason"],
            registry=registry,
        )
        self.lag = Gauge(
            "anabranch_ingest_lag_offsets", "Offsets not yet read.", ["topic", "partition"], registry=registry
        )
        self.lag_seconds = Gauge(
            "anabranch_ingest_lag_seconds",
            "How long the next event has been there, on the partition that lags most.",
            registry=registry,
        )
        self.lag_time = Gauge(
            "anabranch_ingest_lag_time_seconds",
            "When the broker was asked for the ends to which lag is counted, in seconds since 1970; 0 before that.",
            registry=registry,
        )
        self.behind = Gauge(
            "anabranch_ingest_behind", "1 while [stream.lag_policy] holds, since lag is too long.", registry=registry
        )
        self.passed = Gauge(
            "anabranch_ingest_passed_offsets",
            "Offsets sought over unread by skip-to-latest.",
            ["topic", "partition"],
            registry=registry,
        )
