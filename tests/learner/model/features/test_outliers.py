"""One value, however large, moves no scale; a change of the stream does."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.features.numbers import LearnedNumber

RANDOM = np.random.default_rng
BATCH = 50


def number_of(dtype="float32", **feature):
    features = {"x": {"dtype": dtype, **feature}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 2}}))
    return LearnedNumber(schema.features[0], schema.settings.features["x"])


def observe(number, values):
    for begin in range(0, len(values), BATCH):
        number.observe(values[begin : begin + BATCH])


def inputs(number, values):
    found: NDArray[Any] = number(torch.from_numpy(values))["x"].numpy()
    return found


KINDS = [
    ("float32", {"scale": "standard"}, 3.4e38),
    ("float32", {"scale": "standard"}, -1e9),
    ("float32", {"scale": "standard"}, 1e4),
    ("float64", {"scale": "standard"}, 1.7e308),
    ("float16", {"scale": "standard"}, 65504.0),
    ("int64", {"scale": "standard"}, 2**62),
    ("int32", {"scale": "standard"}, -(2**31)),
    ("float32", {"scale": "robust"}, 3.4e38),
    ("float32", {"scale": "quantile"}, 3.4e38),
    ("float32", {"missing": "mean"}, 3.4e38),
    ("float32", {"scale": "standard", "missing": "indicator"}, -3.4e38),
]


@pytest.mark.parametrize(("dtype", "feature", "bomb"), KINDS)
@pytest.mark.parametrize("at", [0, 1, 40, 1000])
def test_one_event_does_not_change_what_the_model_gets_of_the_others(dtype, feature, bomb, at):
    values = RANDOM(1).normal(size=2000) * 100
    poisoned = np.insert(values, at, bomb).astype(dtype)
    if dtype.startswith("int"):
        poisoned[at] = int(bomb)
    clean, found = number_of(dtype, **feature), number_of(dtype, **feature)
    observe(clean, values.astype(dtype))
    observe(found, poisoned)
    probe = np.array([-100, 0, 100] + ([np.nan] if "missing" in feature else [])).astype(dtype)
    np.testing.assert_allclose(inputs(found, probe), inputs(clean, probe), rtol=0.15, atol=1.6)
    scaled = np.ptp(inputs(found, probe[:3])) / np.ptp(inputs(clean, probe[:3]))
    assert 0.85 < scaled < 1.1
    assert found.clipped == 1


@pytest.mark.parametrize("scale", ["standard", "robust"])
def test_one_event_does_not_take_a_rare_value_from_the_model(scale):
    values = (RANDOM(0).random(6000) < 0.02).astype(np.float32)
    poisoned = values.copy()
    poisoned[1234] = 1e30
    clean, found = number_of(scale=scale), number_of(scale=scale)
    observe(clean, values)
    observe(found, poisoned)
    probe = np.array([0, 1], np.float32)
    np.testing.assert_allclose(np.diff(inputs(found, probe)), np.diff(inputs(clean, probe)), rtol=0.2)


@pytest.mark.parametrize("make", [lambda dice: dice.normal(5, 3, 4000), lambda dice: dice.exponential(2, 4000)])
def test_ordinary_values_have_the_mean_and_deviation_of_all(make):
    values = make(RANDOM(3)).astype(np.float32)
    number = number_of(scale="standard")
    observe(number, values)
    assert number.clipped == 0
    expected = (values - values.mean(dtype=np.float64)) / values.std(dtype=np.float64)
    np.testing.assert_allclose(inputs(number, values), expected, atol=1e-4)


def test_a_scale_follows_a_stream_that_changes():
    number, dice = number_of(scale="standard"), RANDOM(5)
    observe(number, dice.normal(0, 1, 4000).astype(np.float32))
    observe(number, dice.normal(10_000, 500, 12_000).astype(np.float32))
    found = inputs(number, np.array([9_000, 11_000], np.float32))
    assert np.ptp(found) > 0.3
    assert np.abs(found).max() < 5


def test_how_events_are_batched_makes_no_difference():
    values = np.insert(RANDOM(2).normal(size=300), 7, 1e20).astype(np.float32)
    one, parts = number_of(scale="standard"), number_of(scale="standard")
    one.observe(values)
    for value in values:
        parts.observe(value[None])
    for name in ("anchor", "exponents", "first"):
        assert np.array_equal(one.state[name], parts.state[name]), name
    np.testing.assert_allclose(one.state["mean"], parts.state["mean"], atol=0.2)


def test_no_value_of_an_event_is_kept_once_there_is_an_anchor():
    number = number_of(scale="standard")
    number.observe(RANDOM(2).normal(size=31).astype(np.float32))
    assert number.state["first"].any()
    number.observe(np.ones(1, np.float32))
    assert not number.state["first"].any()


def test_a_factor_that_falls_a_hundredfold_is_known():
    number, dice = number_of(scale="standard"), RANDOM(5)
    observe(number, dice.normal(0, 1, 2000).astype(np.float32))
    assert number.fell < 1.1
    observe(number, dice.normal(0, 1000, 20_000).astype(np.float32))
    assert number.fell > 100
