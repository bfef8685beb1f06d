"""Metrics that are read off an object: what is exported before, at and after an update."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from anabranch.core.state_metrics import StateCollector, StateCounter, StateGauge

METRICS = (
    StateGauge("rows", "Rows held.", lambda state: state.rows),
    StateGauge("score", "By class.", lambda state: state.score, "class"),
    StateCounter("moved_bytes", "Bytes.", lambda state: state.moved, "tier", "direction"),
)


def test_before_the_first_update_a_metric_without_labels_is_0_and_others_have_no_series():
    registry = CollectorRegistry()
    StateCollector(registry, METRICS)
    assert registry.get_sample_value("rows") == 0
    assert b"score{" not in generate_latest(registry)
    assert b"# HELP score By class." in generate_latest(registry)


def test_an_update_replaces_all_values_and_drops_labels_that_the_object_has_no_more():
    registry = CollectorRegistry()
    collector = StateCollector(registry, METRICS)
    collector.update(SimpleNamespace(rows=3, score={"a": 0.5, "b": 0.25}, moved={("disk", "read"): 8}))
    collector.update(SimpleNamespace(rows=None, score={"b": 0.75}, moved={("disk", "read"): 9}))
    assert registry.get_sample_value("rows") == 0
    assert registry.get_sample_value("score", {"class": "a"}) is None
    assert registry.get_sample_value("score", {"class": "b"}) == 0.75
    assert registry.get_sample_value("moved_bytes_total", {"tier": "disk", "direction": "read"}) == 9
