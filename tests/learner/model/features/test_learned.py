"""What a model gets for raw features, through the hook on it."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import ModelError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import forward, sample
from anabranch.learner.model.features.learned import FeatureLearning, LearnedFeatures, features_of
from anabranch.learner.model.features.numbers import LIMIT
from anabranch.learner.model.features.row_tables import row_tables

CPU = torch.device("cpu")


def schema_of(features, cross=None):
    settings = {"features": features, "label": {"name": "y", "classes": 2}, "cross": cross or {}}
    return Schema(SchemaSettings.model_validate(settings))


def transform(learned, **columns):
    inputs = learned.transform({name: torch.as_tensor(value) for name, value in columns.items()})
    return {name: value.numpy() for name, value in inputs.items()}


def observe(learned, **columns):
    arrays = {f"feature.{name}": np.asarray(value) for name, value in columns.items()}
    rows = len(next(iter(arrays.values())))
    return learned.observe({**arrays, "time_ms": np.zeros(rows, np.int64), "label": np.zeros(rows)})


class Recorder(nn.Module):
    """Keeps the inputs that it gets."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.embedding = nn.Embedding(4, 2)
        self.inputs: dict[str, Tensor] = {}

    def forward(self, *positional, **named):
        self.inputs = dict(enumerate(positional)) if positional else named  # type: ignore[arg-type]
        first = next(iter(self.inputs.values()))
        return self.layer(self.embedding(first) if first.dtype == torch.int64 else first)


FLOAT = {"dtype": "float32", "shape": [2]}
STATE = ("count", "mean", "squares", "first", "anchor", "exponents")


@pytest.mark.parametrize("scale", ["standard", "robust", "quantile"])
def test_what_was_never_seen_is_zero_whatever_its_size(scale):
    learned = LearnedFeatures(schema_of({"x": {**FLOAT, "scale": scale}}))
    assert not transform(learned, x=np.array([[1e9, -3.0]], np.float32))["x"].any()
    observe(learned, x=np.full((5, 2), 7.0, np.float32))
    assert not transform(learned, x=np.full((1, 2), 7.0, np.float32))["x"].any()


def test_standard_scaling_is_that_of_all_values_and_outliers_are_cut_off():
    learned = LearnedFeatures(schema_of({"x": {**FLOAT, "scale": "standard"}}))
    values = np.random.default_rng(0).normal([5, -100], [2, 30], (500, 2)).astype(np.float32)
    for part in np.split(values, 20):
        observe(learned, x=part)
    expected = (values - values.mean(0, np.float64)) / values.std(0, dtype=np.float64)
    np.testing.assert_allclose(transform(learned, x=values)["x"], expected, atol=1e-5)
    assert transform(learned, x=np.array([[1e30, -1e30]], np.float32))["x"].tolist() == [[LIMIT, -LIMIT]]


def test_large_whole_numbers_keep_their_differences():
    learned = LearnedFeatures(schema_of({"x": {"dtype": "int64", "scale": "standard"}}))
    values = 10**15 + np.arange(-50, 50)
    observe(learned, x=values)
    np.testing.assert_allclose(transform(learned, x=values)["x"], (np.arange(-50, 50) + 0.5) / 28.866, atol=1e-3)


def test_robust_scaling_ignores_outliers_and_quantiles_are_even():
    random = np.random.default_rng(0)
    values = random.normal(3, 2, (2_000, 2)).astype(np.float32)
    values[::20] = 1e12
    robust, even = (LearnedFeatures(schema_of({"x": {**FLOAT, "scale": name}})) for name in ("robust", "quantile"))
    for part in np.split(values, 50):
        observe(robust, x=part)
        observe(even, x=part)
    found = transform(robust, x=values)["x"]
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
    np.testing.assert_allclose(found[1:20], ((values - middle) / (high - low))[1:20], atol=0.1)
    ranks = transform(even, x=np.sort(values, axis=0))["x"]
    np.testing.assert_allclose(ranks[:1900, 0], (np.linspace(-1, 1, 2_000))[:1900], atol=0.04)


@pytest.mark.parametrize(("scale", "filled"), [(None, 4.0), ("standard", 0.0), ("robust", 0.0), ("quantile", 0.0)])
def test_a_missing_value_becomes_the_mean_or_the_median_and_counts_for_neither(scale, filled):
    feature = {**FLOAT, "missing": "indicator"} | ({"scale": scale} if scale else {})
    learned = LearnedFeatures(schema_of({"x": feature}))
    column = np.array([[2, np.nan], [6, np.nan], [np.nan, np.nan], [4, np.nan]], np.float32)
    observe(learned, x=column)
    inputs = transform(learned, x=column)
    assert inputs["x"][2, 0] == pytest.approx(filled, abs=1e-6)
    assert inputs["x_missing"].tolist() == [[0, 1], [0, 1], [1, 1], [0, 1]]
    assert np.isfinite(inputs["x"]).all()


def test_a_missing_value_becomes_a_number_before_it_is_scaled():
    learned = LearnedFeatures(schema_of({"x": {**FLOAT, "missing": -1, "scale": "standard"}}))
    observe(learned, x=np.array([[1, 1], [3, 3]], np.float32))
    assert transform(learned, x=np.array([[np.nan, 2]], np.float32))["x"].tolist() == [[-3.0, 0.0]]
    plain = LearnedFeatures(schema_of({"x": {**FLOAT, "missing": -1}}))
    assert transform(plain, x=np.array([[np.nan, 2]], np.float32))["x"].tolist() == [[-1.0, 2.0]]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32", "float64"])
def test_times_have_their_phase_in_each_cycle(dtype):
    learned = LearnedFeatures(schema_of({"t": {"dtype": dtype, "cycles": ["day", "week"]}}))
    week = 604_800
    found = transform(learned, t=np.array([0, 21_600, week // 2, 3000 * week + 21_600], dtype))["t"]
    assert found.shape == (4, 4)
    np.testing.assert_allclose(found[0], [0, 1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(found[1, :2], [1, 0], atol=1e-6)
    np.testing.assert_allclose(found[2, 2:], [0, -1], atol=1e-6)
    np.testing.assert_allclose(found[3], found[1], atol=1e-6)


def test_a_cross_is_what_features_have_together_in_their_order():
    features = {name: {"dtype": "int64"} for name in ("a", "b")}
    learned = LearnedFeatures(
        schema_of(
            features,
            {
                "hashed": {"of": ["a", "b"], "encode": {"hash": 1000}},
                "learnt": {"of": ["a", "b"], "encode": {"learn": 50, "min_count": 1}},
            },
        )
    )
    a, b = (each.reshape(-1) for each in np.meshgrid(np.arange(5), np.arange(5)))
    assert sorted(observe(learned, a=a, b=b)["learnt"].rows) == list(range(12, 37))
    found = transform(learned, a=a, b=b)
    assert sorted(found["learnt"]) == list(range(12, 37))
    assert found["hashed"].min() >= 0
    assert len(np.unique(found["hashed"])) >= 23
    assert list(found) == ["a", "b", "hashed", "learnt"]


def test_the_hook_gives_a_model_its_inputs_and_keeps_the_names_of_its_tensors():
    model = Recorder()
    before = set(model.state_dict())
    schema = schema_of({"x": {**FLOAT, "scale": "standard", "missing": "indicator"}})
    FeatureLearning().convert(model, ModelContext(CPU, schema))
    forward(model, sample(schema, 3, CPU))
    assert list(model.inputs) == ["x", "x_missing"]
    assert set(model.state_dict()) - before == {
        "learned_features.state.left",
        *(f"learned_features.feature_x.{name}" for name in ("shift", "factor", *(f"state.{each}" for each in STATE))),
    }
    one = Recorder()
    FeatureLearning().convert(one, ModelContext(CPU, schema_of({"x": {**FLOAT, "scale": "standard"}})))
    forward(one, {"x": torch.zeros(3, 2)})
    assert list(one.inputs) == [0]


def test_a_model_of_a_schema_without_any_is_as_it_was():
    model = Recorder()
    FeatureLearning().convert(model, ModelContext(CPU, schema_of({"x": FLOAT})))
    assert features_of(model) is None
    assert not model._forward_pre_hooks


def test_what_is_learned_stays_on_the_host_in_float64_whatever_the_model_is_moved_to():
    model = Recorder()
    FeatureLearning().convert(model, ModelContext(CPU, schema_of({"x": {**FLOAT, "scale": "standard"}})))
    model.to("meta")
    learned = features_of(model)
    assert learned is not None
    assert learned.get_buffer("feature_x.state.mean").device == CPU
    assert learned.get_buffer("feature_x.factor").is_meta


class Ids(nn.Module):
    """An embedding of `learn = 4` rows, used as `use` says."""

    def __init__(self, use="", rows=4):
        super().__init__()
        self.use, self.embedding = use, nn.Embedding(rows, 2)
        self.embedding.weight.requires_grad_(use != "frozen")

    def forward(self, who, other=None):
        if self.use == "functional":
            return nn.functional.embedding(who, self.embedding.weight)
        if self.use == "both" and other is not None:
            return self.embedding(torch.stack([who, other]))
        found: Tensor = self.embedding((who + 1).clamp(max=3) if self.use == "shifted" else who)
        return found


@pytest.mark.parametrize(
    ("use", "rows", "refusal"),
    [
        ("functional", 4, r"the rows of who, which \[schema\] learns, are the input of no nn.Embedding"),
        ("", 3, r"are 0..3, but an embedding has 3 rows"),
        ("shifted", 4, "reach an embedding as other numbers"),
        ("frozen", 4, "are those of an embedding that is frozen"),
        ("both", 4, "who and other, which .* are rows of one embedding"),
        ("", 4, ""),
        ("", 5, ""),
    ],
)
def test_a_vocabulary_needs_an_embedding_whose_rows_can_start_again(use, rows, refusal):
    feature = {"dtype": "int64", "encode": {"learn": 4}}
    schema = schema_of({"who": feature, "other": feature} if use == "both" else {"who": feature})
    model = Ids(use, rows)
    FeatureLearning().convert(model, ModelContext(CPU, schema))
    learned = features_of(model)
    assert learned is not None
    if not refusal:
        assert row_tables(model, learned, sample(schema, 2, CPU)) == {"who": [model.embedding]}
        assert model.training
        return
    with pytest.raises(ModelError, match=refusal):
        row_tables(model, learned, sample(schema, 2, CPU))


@pytest.mark.parametrize("scale", ["standard", "robust", "quantile"])
@pytest.mark.parametrize("outlier", [1e145, 1.7e308])
def test_values_whose_square_no_float_holds_do_not_spoil_a_scale(scale, outlier):
    learned = LearnedFeatures(schema_of({"x": {"dtype": "float64", "scale": scale}}))
    values = np.random.default_rng(0).normal(size=64)
    observe(learned, x=np.array([values[0], outlier, outlier, -outlier]))
    observe(learned, x=values)
    found = transform(learned, x=np.array([-1, 1, outlier]))["x"]
    assert np.isfinite(found).all()
    assert found[0] < -0.15 < 0.15 < found[1] <= found[2]


@pytest.mark.parametrize("scale", ["standard", "robust", "quantile"])
@pytest.mark.parametrize(
    ("dtype", "value"), [("float64", 0.1), ("float32", 0.1), ("float32", -3.4e38), ("float32", 1e-42)]
)
def test_a_scale_of_values_that_are_all_the_same_or_nearly_is_finite(scale, dtype, value):
    learned = LearnedFeatures(schema_of({"x": {"dtype": dtype, "scale": scale}}))
    for rows in (7, 13, 64):
        observe(learned, x=np.full(rows, value, dtype))
    assert not transform(learned, x=np.array([value], dtype))["x"].any()
    observe(learned, x=np.array([0, value * 0.5], dtype))
    largest = np.finfo(np.float32).max
    assert np.isfinite(transform(learned, x=np.array([value, 0, largest, -largest], dtype))["x"]).all()


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("float32", np.inf), ("float16", 1e6)])
def test_what_replaces_a_missing_value_is_a_number_of_the_dtype(dtype, value):
    with pytest.raises(SettingsError, match=f"x.missing = {value!r} does not fit dtype {dtype}"):
        schema_of({"x": {"dtype": dtype, "missing": value}})


@pytest.mark.parametrize(
    ("feature", "sentence"),
    [
        ({"dtype": "string", "encode": {"hash": 4}, "scale": "standard"}, "encode and scale exclude each other"),
        ({"dtype": "bool", "scale": "standard"}, "scale is for numbers"),
        ({"dtype": "float32", "cycles": ["day"]}, "write int64"),
        ({"dtype": "int64", "missing": 0}, "missing is for floats"),
        ({"dtype": "float32", "missing": 0, "default": 0}, "missing and default exclude each other"),
        ({"dtype": "uint64", "encode": {"learn": 4}}, "take {learn = N}"),
        ({"dtype": "int64", "encode": {"hash": 4}}, "needs encode, and no other takes it"),
    ],
)
def test_a_feature_has_one_transformation_that_fits_its_dtype(feature, sentence):
    with pytest.raises(ValueError, match=sentence):
        schema_of({"x": feature})


@pytest.mark.parametrize(
    ("of", "sentence"),
    [(["a", "z"], "no feature"), (["a", "f"], "not categorical"), (["a", "wide"], "several shapes")],
)
def test_crossed_features_are_categorical_and_of_one_shape(of, sentence):
    features = {"a": {"dtype": "int64"}, "f": {"dtype": "float32"}, "wide": {"dtype": "int64", "shape": [2]}}
    with pytest.raises(ValueError, match=sentence):
        schema_of(features, {"c": {"of": of, "encode": {"hash": 9}}})


def test_how_a_vocabulary_admits_changes_no_digest_but_its_size_does():
    def digest(**encode):
        return schema_of({"id": {"dtype": "int64", "encode": {"learn": 4, **encode}}}).digest

    assert digest() == digest(min_count=9, expire="1d")
    assert digest() != digest(learn=5)
