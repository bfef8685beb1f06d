"""A feature that drifts is named, an ordinary week names none, and a resumed learner continues as the original."""

import itertools
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.input_drift import FILE, InputReference
from anabranch.learner.extensions.input_drift.extension import InputDrift, remove_reference
from anabranch.learner.model.task import Classification, MultiLabel, Regression
from anabranch.learner.settings.learner import DriftSettings
from anabranch.learner.stream.batch import Batch

DAY_MS = 86_400_000
SCHEMA = {
    "features": {
        "amount": {"dtype": "float32"},
        "country": {"dtype": "int64"},
        "fee": {"dtype": "float64"},
    },
    "label": {"name": "y", "classes": 2},
}


def schema_of(features=50, **label):
    names = {f"x{index}": {"dtype": "float32"} for index in range(features)}
    return Schema(
        SchemaSettings.model_validate({"features": names, "label": {"name": "y", **(label or {"classes": 2})}})
    )


def extension(folder, schema=None, task=None, **changes):
    schema = schema or Schema(SchemaSettings.model_validate(SCHEMA))
    settings = DriftSettings.model_validate(changes)
    return InputDrift(settings, schema, task or Classification(), folder, rests=False)


def values(seed, rows=100):
    """Return the features of some events, as they usually are."""
    random = np.random.default_rng(seed)
    return {
        "amount": random.lognormal(size=rows).astype(np.float32),
        "country": random.integers(0, 5, rows),
        "fee": np.full(rows, 0.5),
    }


def train(drift, columns, time_ms=0, output=None):
    """Let it learn of a batch, and of the outputs for it."""
    rows = len(next(iter(columns.values())))
    new = {f"feature.{name}": column for name, column in columns.items()}
    batch = Batch({**new, "offset": np.arange(rows), "time_ms": np.full(rows, time_ms)}, {}, {}, [])
    if output is not None:
        drift.trained(batch, SimpleNamespace(output_B=torch.as_tensor(output)))
    drift.settle(batch)


def usual(drift, batches=150):
    for seed in range(batches):
        train(drift, values(seed))


def report(drift):
    return drift.report()["inputs"]


CHANGES = {
    "larger": ("amount", lambda column: column * 3),
    "a new category": ("country", lambda column: np.where(np.arange(len(column)) % 2, 77, column)),
    "a constant": ("fee", lambda column: column + 0.01),
    "missing": ("fee", lambda column: np.full(len(column), np.nan)),
    "infinite": ("amount", lambda column: np.full(len(column), np.inf, np.float32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_feature_that_drifts_is_named_within_2000_events(tmp_path, change, caplog):
    drift, (name, changed) = extension(tmp_path), CHANGES[change]
    usual(drift, 155)
    assert drift.warnings == []
    assert report(drift).drifted == []
    with caplog.at_level(logging.WARNING):
        for seed in range(200, 220):
            columns = values(seed)
            train(drift, {**columns, name: changed(columns[name])})
    assert report(drift).drifted == [name]
    (warning,) = drift.warnings
    assert warning.startswith(f"feature {name} has drifted: PSI {report(drift).psi[name]:.2f} against")
    assert report(drift).missing[name] == (change == "missing")
    (record,) = caplog.records
    assert record.message.startswith(f"feature {name} has drifted: PSI ")
    for seed in range(300, 315):
        train(drift, values(seed))
    assert drift.warnings == []


@pytest.mark.slow
def test_a_week_with_daily_cycles_names_none_of_50_features_and_a_shift_is_named(tmp_path):
    """20 weeks of 3,000 events a day; each feature has a phase, a swing of up to 1 and noise of 1."""
    schema = schema_of()
    for seed in range(20):
        random, drift = np.random.default_rng(seed), extension(tmp_path, schema)
        phase, swing = random.random(50), random.random(50)
        for begin in range(0, 21_000, 500):
            day = (np.arange(begin, begin + 500) / 3000)[:, None]
            rows = random.standard_normal((500, 50)) + swing * np.sin(2 * np.pi * (day + phase))
            rows = rows.astype(np.float32)
            train(drift, {f"x{index}": rows[:, index] for index in range(50)})
            assert drift.warnings == [], (seed, begin)
        least = int(swing.argmin())
        rows[:, least] += 1.5
        for _ in range(4):
            train(drift, {f"x{index}": rows[:, index] for index in range(50)})
        assert f"x{least}" in report(drift).drifted, seed


PREDICTED = {
    "two classes": (Classification(), {"classes": 2}, lambda random: random.standard_normal((100, 2)), 3.0),
    "classes": (Classification(), {"classes": 4}, lambda random: random.standard_normal((100, 4)), [9, 0, 0, 0]),
    "a number": (Regression(), {"dtype": "float32"}, lambda random: random.standard_normal(100), 3.0),
}


@pytest.mark.parametrize("kind", PREDICTED)
def test_predictions_that_drift_are_named(tmp_path, kind):
    task, label, make, shift = PREDICTED[kind]
    drift, random = extension(tmp_path, schema_of(1, **label), task), np.random.default_rng(5)
    x = np.zeros(100, np.float32)
    for _ in range(150):
        train(drift, {"x0": x}, output=make(random))
    assert drift.warnings == []
    for _ in range(20):
        output = make(random)
        train(drift, {"x0": x}, output=output * [1, shift] + [0, shift] if kind == "two classes" else output + shift)
    assert report(drift).drifted == ["predictions"]
    assert drift.warnings[0].startswith("predictions have drifted: PSI ")


def test_predictions_of_several_labels_are_not_compared(tmp_path):
    drift = extension(tmp_path, schema_of(1, classes=3, multi=True), MultiLabel())
    for _ in range(40):
        train(drift, {"x0": np.zeros(100, np.float32)}, output=np.zeros((100, 3)))
    assert list(report(drift).psi) == ["x0"]


@pytest.mark.parametrize("batches", [3, 10, 37, 152, 163])
def test_a_resumed_learner_continues_as_the_original(tmp_path, batches):
    def run(drift, first, last):
        for seed in range(first, last):
            columns = values(seed)
            if seed >= 150:
                columns["amount"] *= 3
            train(drift, columns, output=np.random.default_rng(seed).standard_normal((100, 2)))

    whole, half, resumed = (extension(tmp_path) for _ in range(3))
    if batches == 3:  # no checkpoint has values of single events: the first window begins again
        run(whole, batches, 170)
    else:
        run(whole, 0, 170)
    run(half, 0, batches)
    resumed.restore(json.loads(json.dumps(half.state(), allow_nan=False)))
    if batches >= 10:
        assert report(resumed) == report(half)
        assert resumed.warnings == half.warnings
    run(resumed, batches, 170)
    assert resumed.state() == whole.state()
    assert report(resumed) == report(whole)
    assert report(resumed).drifted == ["amount"]


def test_a_state_of_other_features_begins_again(tmp_path):
    before, now = extension(tmp_path), extension(tmp_path, ignored=["fee"])
    usual(before)
    now.restore(before.state())
    assert "amount" not in report(now).psi


def test_an_erasure_leaves_counts_and_no_value(tmp_path):
    drift, other = extension(tmp_path), extension(tmp_path)
    for seed in range(25):
        train(drift, values(seed))
        train(other, values(seed))
    assert drift.erase(lambda columns: np.ones(len(columns["offset"]), np.bool_)) == 0
    assert drift._inputs.window.values.shape == (3, 0)
    for seed in range(25, 150):
        train(drift, values(seed))
        train(other, values(seed))
    assert drift.state() == other.state()


@pytest.mark.parametrize(("hours", "warned"), [(20, True), (26, False)])
def test_a_drift_becomes_the_reference_after_a_day(tmp_path, hours, warned):
    drift = extension(tmp_path)
    usual(drift)
    for seed in range(150, 150 + 10 * hours):
        columns = values(seed)
        columns["amount"] *= 3
        train(drift, columns, time_ms=(seed - 150) * DAY_MS // 240)
    assert bool(drift.warnings) is warned


def test_the_reference_is_in_the_state_directory(tmp_path):
    now = itertools.count(step=10.0)
    drift = InputDrift(
        DriftSettings(), Schema(SchemaSettings.model_validate(SCHEMA)), Classification(), tmp_path, rests=False,
        clock=lambda: next(now),
    )  # fmt: skip
    drift.run_if_due()
    assert not (tmp_path / FILE).exists()
    usual(drift, 20)
    drift.run_if_due()
    found = InputReference.decode((tmp_path / FILE).read_bytes())
    assert found is not None
    assert [each.name for each in found.columns] == ["amount", "country", "fee"]
    remove_reference(tmp_path)
    remove_reference(tmp_path)
    (tmp_path / FILE).mkdir()
    for _ in range(4):
        drift.run_if_due()
    (warning,) = drift.warnings
    assert warning.startswith(f"{tmp_path / FILE} cannot be written: ")
    (tmp_path / FILE).rmdir()
    for _ in range(4):
        drift.run_if_due()
    assert drift.warnings == []


def test_little_time_is_taken_from_steps(tmp_path):
    """While its share is used up a batch costs one comparison: none of its values is read."""
    drift = InputDrift(
        DriftSettings(), Schema(SchemaSettings.model_validate(SCHEMA)), Classification(), tmp_path, clock=lambda: 0.0
    )
    for seed in range(15):
        train(drift, values(seed))
    assert drift._inputs.window.rows == 100
