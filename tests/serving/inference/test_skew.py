"""Requests whose features are unlike events of training are named; without a learner's reference none is."""

import itertools
from http import HTTPStatus

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.input_drift import FILE, InputReference, columns_of
from anabranch.serving.inference.skew import RequestSkew
from anabranch.serving.metrics import ServingMetrics

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"amount": {"dtype": "float32"}, "fee": {"dtype": "int64"}}, "label": {"name": "y", "classes": 2}}
    )
)


def features(rows, seed=0, factor=1):
    random = np.random.default_rng(seed)
    return {"amount": (factor * random.lognormal(size=rows)).astype(np.float32), "fee": random.integers(0, 5, rows)}


def reference(windows=20):
    found = InputReference.of(columns_of(SCHEMA), 0.2)
    for seed in range(windows + 1):
        values = np.stack([column.astype(np.float64) for column in features(1000, seed).values()])
        if seed:
            counts = found.count(values)
            found.add(counts, found.compare(counts))
        else:
            found.fit(values)
    return found


@pytest.fixture
def metrics():
    return ServingMetrics(CollectorRegistry())


@pytest.fixture
def skew(tmp_path, metrics):
    """One that never rests, and reads the reference with each request."""
    clock = itertools.count(step=100.0)
    return RequestSkew(tmp_path, SCHEMA, metrics, clock=lambda: next(clock), part=1)


def request(skew, rows, each=50, **changes):
    for seed in range(rows // each):
        skew.add(features(each, 100 + seed, **changes))


def test_a_feature_of_requests_that_differs_is_named_until_it_no_longer_does(tmp_path, skew, metrics):
    (tmp_path / FILE).write_bytes(reference().encode())
    request(skew, 1000)
    assert skew.warnings == []
    assert list(skew.psi) == sorted(skew.psi, key=lambda name: -skew.psi[name])
    assert max(skew.psi.values()) < 0.1
    request(skew, 1000, factor=3)
    (warning,) = skew.warnings
    assert warning == f"request feature amount has drifted: PSI {skew.psi['amount']:.2f} against events of training"
    exposed = metrics.exposition().decode()
    assert 'anabranch_serving_drifted_input_psi{feature="amount"} 0.0' not in exposed
    assert 'anabranch_serving_drifted_input_psi{feature="fee"} 0.0' in exposed
    request(skew, 1000)
    assert skew.warnings == []
    assert 'anabranch_serving_drifted_input_psi{feature="amount"} 0.0' in metrics.exposition().decode()


def test_of_a_large_request_a_thousand_rows_count(tmp_path, skew):
    (tmp_path / FILE).write_bytes(reference().encode())
    request(skew, 100_000, each=100_000, factor=3)
    assert len(skew.warnings) == 1


def other_schema(found):
    return InputReference.of([found.columns[0]._replace(name="x", feature="x")], 0.2).encode()


@pytest.mark.parametrize(
    "content",
    [None, lambda found: b"damaged", other_schema, lambda found: reference(5).encode()],
    ids=["none", "damaged", "of another schema", "without a verdict yet"],
)
def test_without_a_reference_nothing_is_compared(tmp_path, skew, content):
    if content is not None:
        (tmp_path / FILE).write_bytes(content(reference()))
    request(skew, 2000, factor=3)
    assert not skew.warnings


def test_a_reference_that_is_deleted_is_used_no_longer(tmp_path, skew, metrics):
    (tmp_path / FILE).write_bytes(reference().encode())
    request(skew, 1000, factor=3)
    assert len(skew.warnings) == 1
    (tmp_path / FILE).unlink()
    request(skew, 50)
    assert (skew.warnings, skew.psi) == ((), {})
    assert 'drifted_input_psi{feature="amount"} 0.0' in metrics.exposition().decode()


def test_a_feature_that_is_ignored_from_now_on_has_no_alert(tmp_path, skew, metrics):
    (tmp_path / FILE).write_bytes(reference().encode())
    request(skew, 1000, factor=3)
    assert len(skew.warnings) == 1
    found = InputReference.of(columns_of(SCHEMA, ["amount"]), 0.2)
    found.fit(np.zeros((1, 1000)))
    (tmp_path / FILE).write_bytes(found.encode())
    request(skew, 50)
    assert (skew.warnings, skew.psi) == ((), {})
    assert 'drifted_input_psi{feature="amount"} 0.0' in metrics.exposition().decode()


@pytest.mark.slow
def test_what_was_asked_over_http_is_in_report_status_and_metrics(numbers, served, eventually):
    columns = columns_of(numbers.deployment.schema)
    found = InputReference.of(columns, 0.2)
    found.fit(np.zeros((len(columns), 1000)))
    for _ in range(10):
        zeros = found.count(np.zeros((len(columns), 1000)))
        found.add(zeros, found.compare(zeros))
    numbers.publish(1)
    (numbers.deployment.state_dir / FILE).write_bytes(found.encode())
    with served(numbers) as server:
        assert server.report().skew == {}
        rows = {"name": "x", "shape": [1000, 4], "datatype": "FP32", "data": [0.0, 1.0, 0.0, 0.0] * 1000}
        assert httpx.post(server.infer, json={"inputs": [rows]}, timeout=60).status_code == HTTPStatus.OK
        (warning,) = eventually(lambda: server.report().warnings)
        assert warning.startswith("request feature x[1] has drifted: PSI ")
        assert server.report().skew["x[0]"] == 0
        document = httpx.get(f"{server.url}/api/status").json()
        assert document["serving"]["warnings"] == [warning]
        assert 'anabranch_serving_input_psi{feature="x[1]"}' in httpx.get(f"{server.url}/metrics").text
