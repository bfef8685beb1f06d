"""Metrics of the store."""

from prometheus_client import CollectorRegistry, Gauge, Histogram


class ReplayMetrics:
    """Collectors with the prefix `anabranch_replay_`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rows = Gauge("anabranch_replay_rows", "Events held.", ["tier"], registry=registry)
        self.bytes = Gauge("anabranch_replay_bytes", "Bytes of their payload.", ["tier"], registry=registry)
        self.draw = Histogram(
            "anabranch_replay_draw_duration_seconds",
            "Time to choose and fetch the events of a step.",
            buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1),
            registry=registry,
        )
