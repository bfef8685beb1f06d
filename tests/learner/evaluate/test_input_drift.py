"""Indices of drift against plain references, and bins that fit whatever values a feature has."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.input_drift import (
    DriftedInput,
    InputColumn,
    InputReference,
    TimeShare,
    columns_of,
    sentence,
    values_of,
)

INF, NAN = float("inf"), float("nan")


def reference_of(*rows):
    """Return a reference with bins for these values of each column."""
    found = InputReference.of([InputColumn(f"x{index}", "x", index) for index in range(len(rows))], 0.2)
    found.fit(np.array(rows, np.float64))
    return found


def plain_psi(window, reference):
    """Population stability index by deciles of the reference."""
    edges = np.quantile(reference, np.linspace(0.1, 0.9, 9))
    p, q = (np.bincount(np.searchsorted(edges, each), minlength=10) / len(each) for each in (window, reference))
    return ((p - q) * np.log(p / q)).sum()


@pytest.mark.parametrize(
    ("shift", "scale", "heavy"), [(0, 1, False), (0.3, 1, False), (1, 1, False), (0, 2, False), (0.5, 1, True)]
)
def test_psi_and_ks_are_those_of_plain_references_within_a_hundredth(shift, scale, heavy):
    random = np.random.default_rng(3)
    before, after = random.standard_normal(20_000), random.standard_normal(10_000) * scale + shift
    if heavy:
        before, after = np.exp(3 * before), np.exp(3 * after)
    found = reference_of(before)
    compared = found.compare(found.count(after[None]))
    assert compared.psi[0] == pytest.approx(plain_psi(after, before), abs=0.01)
    assert compared.ks[0] == pytest.approx(ks_2samp(after, before).statistic, abs=0.01)


def test_psi_of_categories_is_that_of_their_shares():
    before, after = np.repeat([1, 2, 5], [600, 300, 100]), np.repeat([1, 2, 5], [300, 300, 400])
    found = reference_of(before)
    p, q = np.array([0.3, 0.3, 0.4]), np.array([0.6, 0.3, 0.1])
    compared = found.compare(found.count(after[None].astype(np.float64)))
    assert compared.psi[0] == pytest.approx(((p - q) * np.log(p / q)).sum())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([7.0], [7.0001], id="a constant that becomes another, a little larger"),
        pytest.param([7.0], [6.9999], id="a little smaller"),
        pytest.param([7.0], [NAN], id="a constant that is missing"),
        pytest.param([NAN], [7.0], id="a feature that was always missing"),
        pytest.param([1, 2, 3], [1, 2, 3, 4], id="a new category beyond the others"),
        pytest.param([1, 3, 9], [1, 3, 4, 9], id="a new category between them"),
        pytest.param([-INF, 0, INF], [0, 0, INF], id="infinite values that no longer come"),
        pytest.param([0.0, 1, 2, 3, 4, 5, 6], [INF], id="infinite values that are new"),
    ],
)
def test_what_is_the_same_has_no_psi_and_what_is_new_has_much(before, after):
    rows = [np.resize(np.array(each, np.float64), 1000)[None] for each in (before, after)]
    found = reference_of(*rows[0])
    assert found.compare(found.count(rows[0])).psi[0] == pytest.approx(0, abs=1e-9)
    compared = found.compare(found.count(rows[1]))
    assert compared.psi[0] > 0.5
    assert compared.missing[0] == np.isnan(rows[1]).mean()


def test_zeros_are_counted_alike_where_denormal_numbers_are_taken_for_0():
    found = reference_of(np.zeros(1000))
    numbers = np.array([[0.0] * 10 + [0.5] * 5 + [-0.5] * 2])
    before = found.count(numbers)
    assert sorted(before[0][before[0] > 0]) == [2, 5, 10]
    torch.set_flush_denormal(True)
    try:
        again = reference_of(np.zeros(1000))
        assert (again.count(numbers) == before).all()
        assert (again.edges == found.edges).all()
    finally:
        torch.set_flush_denormal(False)


@example([1.7976931348623157e308] * 3, [0.0])
@given(
    st.lists(
        st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1.0, -0.0])),
        min_size=1,
        max_size=60,
    ),
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=60),
)
def test_each_value_is_counted_once_whatever_it_is(before, after):
    found = reference_of(before)
    assert found.count(np.array([after])).sum() == len(after)
    compared = found.compare(found.count(np.array([after])))
    assert compared.psi[0] >= 0
    assert 0 <= compared.ks[0] <= 1
    again = InputReference.decode(found.encode())
    assert again is not None
    assert (again.count(np.array([after])) == found.count(np.array([after]))).all()
    assert again.encode() == found.encode()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 0}', b"\xff"])
def test_what_is_no_reference_is_none(content):
    assert InputReference.decode(content) is None


SCHEMA = {
    "features": {
        "amount": {"dtype": "float32"},
        "country": {"dtype": "string", "encode": {"vocab": ["de", "fr"]}},
        "counts": {"dtype": "int64", "shape": [2]},
        "image": {"dtype": "float32", "shape": [4, 4]},
        "embedding": {"dtype": "float32", "shape": [64]},
        "at": {"dtype": "float64", "cycles": ["day"]},
    },
    "label": {"name": "y", "classes": 2},
}


def test_numbers_categories_and_short_vectors_have_columns():
    schema = Schema(SchemaSettings.model_validate(SCHEMA))
    columns = columns_of(schema)
    assert [each.name for each in columns] == ["amount", "country", "counts[0]", "counts[1]"]
    assert [each.name for each in columns_of(schema, ["counts"])] == ["amount", "country"]
    with pytest.raises(
        SettingsError, match=r'learner.drift.ignored: "county" is no feature .* amount, country, counts'
    ):
        columns_of(schema, ["county"])
    features = {"amount": [0.5, NAN], "country": [1, 2], "counts": [[3, 4], [5, 6]]}
    values = values_of(columns, {name: np.array(each) for name, each in features.items()})
    assert np.array_equal(values, [[0.5, NAN], [1, 2], [3, 5], [4, 6]], equal_nan=True)


def test_work_rests_for_its_part_of_the_time():
    now, worked, runs = [0.0], [0.0], []

    def work():
        runs.append(now[0])
        worked[0] += 1.0

    turns = TimeShare(100, lambda: now[0], lambda: worked[0])
    for second in range(301):
        now[0] = float(second)
        turns.run(work)
    assert runs == [0, 99, 198, 297]


def test_a_sentence_names_the_worst_first():
    found = [DriftedInput(name, psi) for name, psi in (("a", 0.3), ("b", 0.5), ("c", 0.4), ("d", 0.2))]
    assert (
        sentence("feature", found, "against x")
        == "features b, c, a and 1 more have drifted: PSI 0.50, 0.40, 0.30 against x"
    )
    assert sentence("feature", found[:1], "against x") == "feature a has drifted: PSI 0.30 against x"
