"""Prometheus metrics that are read off an object at one point in time: name, help, value and labels, declared once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from anabranch.core.reported import Value, declared

StateT = TypeVar("StateT")


class StateGauge(Generic[StateT]):
    """A gauge and how to read it: `read` returns its value, 0 for None, or with labels the values by label values."""

    family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily

    def __init__(self, name: str, description: str, read: Callable[[StateT], Value], *labels: str) -> None:
        self.name = name
        self.description = description
        self.read = read
        self.labels = labels

    def export(self, value: Value) -> GaugeMetricFamily | CounterMetricFamily:
        """Return the metric with a value as `read` returns it."""
        family = self.family(self.name, self.description, labels=self.labels)
        if isinstance(value, Mapping):
            for labels, number in value.items():
                family.add_metric([labels] if isinstance(labels, str) else labels, number)
        elif not self.labels:
            family.add_metric([], value or 0)
        return family


class StateCounter(StateGauge[StateT]):
    """A counter and how to read its total, which never decreases while the process lives."""

    family = CounterMetricFamily


def metrics_of(report: type[Any], without: str = "") -> list[StateGauge[Any]]:
    """Return the metrics that the fields of a report declare, besides those of the field `without`."""
    return [
        (StateCounter if metric.metric.endswith("_total") else StateGauge)(
            metric.metric, metric.description, read, *labels
        )
        for metric, labels, read in declared(report, without)
    ]


class StateCollector(Collector, Generic[StateT]):
    """Exports the values as of the last `update`, and zeros before it. Any thread may collect."""

    def __init__(self, registry: CollectorRegistry, metrics: Sequence[StateGauge[StateT]]) -> None:
        self._metrics = metrics
        self._families = [metric.export(None) for metric in metrics]
        registry.register(self)

    def update(self, state: StateT) -> None:
        """Read all metrics off `state`."""
        self._families = [metric.export(metric.read(state)) for metric in self._metrics]

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Return the metrics as of the last `update`."""
        return self._families

    describe = collect
