"""Intercepts of groups: their closed form, their prior, and their table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.features import LearnedVocabulary
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import forward
from anabranch.learner.model.features.intercept import GroupIntercept, Residual, residual_of
from anabranch.learner.model.features.learned import FeatureLearning, features_of
from anabranch.learner.model.features.vocabulary import VocabularyTable
from anabranch.learner.model.task import Classification, MultiLabel, Regression
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.model import ModelSettings
from tests.support.facts import facts_of

CPU = torch.device("cpu")


def table(rows=64, width=1, **more):
    return GroupIntercept(LearnedVocabulary.model_validate({"learn": rows, "min_count": 1, **more}), width)


def keys_of(*keys):
    return np.array(keys, np.int64)


def observe(found, keys, values, time_ms=0):
    """Learn from events whose distance from the shared model's output is known, as a regression does."""
    shared_B = torch.tensor(values)[:, None]
    residual = shared_B - found(torch.tensor(keys))
    found.observe(keys_of(*keys), time_ms, Residual(residual, torch.ones_like(residual)), torch.ones(len(keys)))


@pytest.mark.parametrize(
    ("task", "label", "scale"),
    [
        (Classification(), torch.tensor([2, 0, 1]), 1.0),
        (MultiLabel(), torch.tensor([[True, False, True], [False] * 3, [True] * 3]), 3.0),  # its loss is a mean
        (Regression(), torch.tensor([1.5, -2.0, 0.0]), 0.5),  # and this one has no factor 1/2
    ],
)
def test_a_residual_is_minus_the_gradient_of_the_loss_and_information_its_curvature(task, label, scale):
    width = 1 if isinstance(task, Regression) else 3
    output = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(task.loss(output, label).sum(), output)
    found = residual_of(task, output, label)
    assert torch.allclose(found.value_BK, -scale * gradient.float(), atol=1e-6)
    hessian = torch.autograd.functional.hessian(lambda o: task.loss(o, label).sum().double(), output.detach())
    diagonal = hessian.reshape(3 * width, 3 * width).diagonal().reshape(3, width)  # type: ignore[union-attr]
    assert torch.allclose(found.information_BK, scale * diagonal.float(), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(-8, 8)), min_size=1, max_size=60),
    st.lists(st.integers(1, 7), min_size=60, max_size=60),
)
def test_an_intercept_is_the_shrunk_mean_of_its_group_however_events_are_batched(events, sizes):
    found, begin = table(), 0
    for size in sizes:
        some = events[begin : begin + size]
        begin += size
        if some:
            observe(found, [key for key, _ in some], [float(value) for _, value in some])
    strength = float(found.get_buffer("log_strength").exp())
    for key in range(10):
        of_group = [value for other, value in events if other == key]
        expected = sum(of_group) / (len(of_group) + strength)
        assert float(found(torch.tensor([key]))) == pytest.approx(expected, abs=1e-4)


def test_an_intercept_of_events_that_are_taken_back_has_the_sums_of_their_labels():
    output_B, keys, weight_B = torch.tensor([[0.3, 0.1], [0.0, 1.0], [2.0, 0.0]]), keys_of(5, 6, 5), torch.ones(3)
    found, expected = table(width=2), table(width=2)
    residuals = [residual_of(Classification(), output_B, label_B) for label_B in torch.tensor([[0, 0, 0], [1, 0, 1]])]
    for each, residual in zip((found, expected), residuals, strict=True):
        each.observe(keys, 0, residual, weight_B)
    taken_back = np.array([True, False, True])
    found.take_back(keys[taken_back], torch.tensor([1, 1]), weight_B[:2])
    assert torch.allclose(found.get_buffer("score"), expected.get_buffer("score"))
    assert torch.equal(found.get_buffer("information"), expected.get_buffer("information"))
    found.take_back(keys_of(99), torch.tensor([1]), torch.ones(1))  # has no row
    assert torch.allclose(found.get_buffer("score"), expected.get_buffer("score"))


def test_a_group_of_which_nothing_is_known_has_the_prior():
    found = table(min_count=3)
    observe(found, [7, 7], [5.0, 5.0])
    assert not found(torch.tensor([7, 8])).any()  # 7 has no row yet, and shares one
    observe(found, [7], [5.0])
    assert found(torch.tensor([7])) > 0
    assert not found(torch.tensor([8, -3, 2**62])).any()
    assert not found.get_buffer("score")[: found.table.shared].any()


@pytest.mark.slow
def test_a_row_of_an_evicted_or_expired_group_starts_again():
    found = table(rows=8, expire="1s")
    for step in range(12):
        observe(found, [1, 2], [4.0, -4.0], time_ms=10_000 + step)
    known = found(torch.tensor([1, 2]))
    assert known.abs().min() > 1
    for step in range(300):  # after these the clock is past `expire`
        observe(found, [3], [1.0], time_ms=20_000 + step)
    assert not found(torch.tensor([1, 2])).any()
    observe(found, [1], [0.5], time_ms=20_020)
    strength = float(found.get_buffer("log_strength").exp())
    assert float(found(torch.tensor([1]))) == pytest.approx(0.5 / (1 + strength), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_the_strength_of_the_prior_follows_how_much_groups_differ(spread):
    generator = np.random.default_rng(0)
    found = table(rows=4096)
    first = float(found.get_buffer("log_strength"))
    for step in range(200):
        groups = np.repeat(np.arange(4) + 4 * (step // 10), 4)
        of_group = np.random.default_rng(step // 10).normal(0, spread, 4)
        observe(found, groups.tolist(), (np.repeat(of_group, 4) + generator.normal(0, 1, 16)).tolist())
    last = float(found.get_buffer("log_strength"))
    assert last > first + 1 if spread == 0 else last < first - 1


def test_what_is_not_finite_or_too_large_teaches_nothing():
    found = table()
    residual = torch.tensor([[float("nan")], [float("inf")], [3e30]])
    found.observe(keys_of(1, 2, 3), 0, Residual(residual, torch.ones(3, 1)), torch.ones(3))
    observe(found, [4], [2.0])
    assert all(buffer.isfinite().all() for buffer in found.buffers())
    assert found(torch.tensor([4])) > 0


def test_weights_count_as_so_many_events():
    twice, heavy = table(), table()
    residual = torch.tensor([[3.0]])
    twice.observe(keys_of(1, 1), 0, Residual(residual.expand(2, 1), torch.ones(2, 1)), torch.ones(2))
    heavy.observe(keys_of(1), 0, Residual(residual, torch.ones(1, 1)), torch.tensor([2.0]))
    for name in ("score", "information"):
        assert torch.equal(twice.get_buffer(name), heavy.get_buffer(name))


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ({"who": {"dtype": "int64", "intercept": True}}, "with encode = {learn = N} and without shape"),
        ({"who": {"dtype": "string", "encode": {"hash": 8}, "intercept": True}}, "intercept is for a feature that is"),
        ({"who": {"dtype": "int64", "shape": [2], "encode": {"learn": 8}, "intercept": True}}, "one for each event"),
        ({"who": {"dtype": "int64", "encode": {"learn": 8}, "intercept": True}}, "the model gets no input"),
    ],
)
def test_what_is_no_group_of_one_event_is_refused(features, says):
    with pytest.raises(ValueError, match=says):
        SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}})


@pytest.mark.parametrize(
    ("task", "refused"), [("my_task:build", True), ("token-classification", True), ("regression", False)]
)
def test_a_task_whose_residual_is_unknown_is_refused(task, refused):
    features = {"x": {"dtype": "float32"}, "who": {"dtype": "int64", "encode": {"learn": 8}, "intercept": True}}
    schema = SchemaSettings.model_validate({"features": features, "label": {"name": "y", "dtype": "float32"}})
    model = ModelSettings(factory="model:build", task=task)
    found = list(conflicts(facts_of(model=model, schema=schema)))
    assert [key for key, _ in found] == ["model.task"] * refused
    assert not refused or f'model.task = "{task}" does not go with a feature of [schema] with intercept' in found[0][1]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        output: Tensor = self.linear(x)
        return output


def test_a_model_gets_no_group_and_its_output_the_intercept():
    features = {
        "x": {"dtype": "float32", "shape": [3]},
        "who": {"dtype": "int64", "encode": {"learn": 16, "min_count": 1}, "intercept": True},
    }
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))
    model = Plain()
    FeatureLearning().convert(model, ModelContext(CPU, schema))
    x, who = torch.randn(4, 3), torch.tensor([1, 1, 2, 3])
    before = forward(model, {"x": x, "who": who})
    assert torch.equal(before, model.linear(x))
    learned = features_of(model)
    assert learned is not None
    label = np.array([0, 0, 1, 2])
    columns = {"feature.who": who.numpy(), "time_ms": np.zeros(4, np.int64), "weight": np.ones(4, np.float32)}
    learned.observe(columns, residual_of(Classification(), before, torch.from_numpy(label)))
    after = forward(model, {"x": x, "who": who})
    assert torch.allclose(after - before, learned.of(GroupIntercept)["who"](who), atol=1e-6)
    assert (after - before)[0].argmax() == 0
    assert torch.equal(forward(model, {"x": x, "who": who + 100}), before)
    assert not learned.of(VocabularyTable)
