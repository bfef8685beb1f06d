"""Slices: which events they have, what they are called, and what a version has on them."""

import numpy as np
import pytest

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.slices import Slices, reports_of
from anabranch.learner.settings.learner import GateSettings

FEATURES = {
    "amount": {"dtype": "float32", "missing": "mean"},
    "country": {"dtype": "string", "encode": {"vocab": ["DE", "FR"]}},
    "shop": {"dtype": "string", "encode": {"hash": 100}},
    "user": {"dtype": "string", "encode": {"learn": 100}},
    "abroad": {"dtype": "bool"},
    "level": {"dtype": "int32"},
    "x": {"dtype": "float32", "shape": [3]},
    "at": {"dtype": "int64", "cycles": ["day"]},
}
SCHEMA = Schema(SchemaSettings.model_validate({"features": FEATURES, "label": {"name": "y", "classes": 2}}))


def slices_of(name, values):
    column = np.asarray(values, dict(SCHEMA.payload())[f"feature.{name}"][0])
    return Slices([name], SCHEMA).of({f"feature.{name}": column, "label": np.zeros(len(column), np.int64)})


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("country", [1, 2, 2, 0], {"country = DE": 1, "country = FR": 2, "country: other strings": 1}),
        ("shop", [7, 7, 99], {"shop = bucket 7": 2, "shop = bucket 99": 1}),
        ("user", [-1, 17], {"user = ffffffffffffffff": 1, "user = 0000000000000011": 1}),
        ("abroad", [True, False, True], {"abroad = false": 1, "abroad = true": 2}),
        ("level", [-3, 5, 5], {"level = -3": 1, "level = 5": 2}),
        ("level", [20240101, 20240102], {"level = 20240101": 1, "level = 20240102": 1}),
        ("amount", [2, 123456.7, 123456.8], {"amount = 2": 1, "amount = 123456.7": 1, "amount = 123456.8": 1}),
        ("amount", [0.5, np.nan, 0.5], {"amount: missing": 1, "amount = 0.5": 2}),
        ("amount", [np.nan], {"amount: missing": 1}),
    ],
)
def test_a_value_is_named_as_it_is_in_events(name, values, expected):
    assert {slice_: int(each.marks.sum()) for slice_, each in slices_of(name, values).items()} == expected


def test_a_number_with_many_values_has_quarters():
    values = np.random.default_rng(0).lognormal(size=1000).astype(np.float32)
    values[::10] = np.nan
    found = slices_of("amount", values)
    known = values[~np.isnan(values)].astype(float)
    q1, q2, q3 = np.quantile(known, [0.25, 0.5, 0.75])
    assert list(found) == ["amount: missing", *(f"amount: quarter {quarter}" for quarter in (1, 2, 3, 4))]
    assert [int(each.marks.sum()) for each in found.values()] == [100, *4 * [225]]
    assert (found["amount: quarter 2"].marks == ((values > q1) & (values <= q2))).all()
    assert found["amount: quarter 1"].values == f"up to {q1:.4g}"
    assert found["amount: quarter 3"].values == f"above {q2:.4g}, up to {q3:.4g}"
    assert found["amount: quarter 4"].values == f"above {q3:.4g}"


def test_quarters_that_are_the_same_value_are_one():
    values = np.concatenate([np.zeros(900), np.arange(1, 101)])
    found = slices_of("amount", values)
    assert {name: int(each.marks.sum()) for name, each in found.items()} == {
        "amount: quarter 1": 900,
        "amount: quarter 2": 100,
    }


def test_the_number_of_slices_is_bounded_and_none_is_lost():
    values = np.random.default_rng(1).integers(100, size=2000)
    values[:500] = 3
    found = slices_of("shop", values)
    assert len(found) == 21
    assert list(found)[-1] == "shop: the rest"
    total = np.sum([each.marks for each in found.values()], axis=0)
    assert (total == 1).all(), "each event is in one slice"
    counts = np.bincount(values)
    assert counts[3] == found["shop = bucket 3"].marks.sum()
    least = min(int(each.marks.sum()) for name, each in found.items() if name != "shop: the rest")
    assert least >= np.sort(counts)[-20]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", '"nope" is no feature of .*; write one of amount, country, shop'),
        ("y", '"y" is no feature of '),
        ("x", '"x" is a time, a text or a vector'),
        ("at", '"at" is a time, a text or a vector'),
    ],
)
def test_what_is_no_slice_is_refused_in_one_sentence(name, words):
    with pytest.raises(SettingsError, match=f"^gate.slices: {words}") as caught:
        Slices([name], SCHEMA)
    assert "\n" not in str(caught.value)


def test_without_events_or_names_there_are_none():
    assert Slices(["amount"], SCHEMA).of({}) == {}
    assert Slices([], SCHEMA).of({"label": np.zeros(3)}) == {}
    assert GateSettings().slices == ()
    with pytest.raises(ValueError, match="slices"):
        GateSettings.model_validate({"slices": [str(number) for number in range(9)]})


@pytest.mark.parametrize("bounded", [True, False])
def test_the_score_of_a_slice_is_what_numpy_says(bounded):
    random = np.random.default_rng(2)
    country, label = random.integers(3, size=300), random.integers(2, size=300)
    scores = (random.random(300) < 0.7).astype(float) if bounded else -random.random(300)
    scores[5] = np.nan
    columns = {"feature.country": country, "label": label}
    labels = label if bounded else label.astype(np.float32)
    found = reports_of(Slices(["country"], SCHEMA).of(columns), scores, labels, bounded=bounded)
    marks = (country == 1) & np.isfinite(scores)
    report = found["country = DE"]
    assert report.rows == marks.sum()
    assert report.score == pytest.approx(abs(scores[marks].mean()))
    assert (report.accuracy is None, report.error is None) == (not bounded, bounded)
    if bounded:
        assert report.constant == max(label[marks].mean(), 1 - label[marks].mean())
    assert "not compared" in report.words()
