"""Early negatives and their correction: the gradient by hand, and what it is on average."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import Columns, fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.stream_monitor import scored
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import EARLY, Early, examples_of, pad_single
from anabranch.learner.model.features.intercept import GroupIntercept
from anabranch.learner.model.features.learned import FeatureLearning, features_of
from anabranch.learner.model.task import Classification, Regression
from anabranch.learner.parallel.scatter import layout_of, packed, unpacked
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.early_negatives import ImportanceWeights, check_early, importance
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.learner.train.test_trainer import as_sample
from tests.support.cuda_recorder import CudaRecorder

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KINDS = [Early.PLAIN, Early.NEGATIVE, Early.CORRECTED, Early.NEGATIVE]
LABELS = [1, 0, 1, 0]


@pytest.fixture
def schema():
    return Schema(
        SchemaSettings.model_validate(
            {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": 2}}
        )
    )


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_trainer(schema, model, strategy="er", device=CPU, graphs=False, **settings):
    options = LearnerSettings.model_validate(
        {"optimizer": {"name": "sgd", "lr": 0.5}, "max_grad_norm": float("inf"), **settings}
    )
    precision = choose_precision(options.precision, CPU)
    trained = STRATEGIES[strategy]()
    wrappers = [ImportanceWeights()]
    return Trainer(
        TrainingSetup(
            *(model.to(device), Classification(), trained, schema, options, device, precision),
            loss_wrappers=wrappers,
            graphs=graphs,
        )
    )


def columns_of(schema, first=0):
    columns = fake_columns(schema, range(first, first + 4), label=LABELS)
    return {**columns, EARLY: np.array(KINDS, np.uint8), "weight": np.array([1, 2, 1, 0.5], np.float32)}


def by_hand(model, x, label, weight, rows):
    """Return the weights after one step of plain autograd, with the paper's importance weights for the new events."""
    model = copy.deepcopy(model)
    output = model(x)
    f = output.detach().softmax(1)[:rows, 1]
    factor = torch.ones(len(x))
    factor[1], factor[3], factor[2] = (1 - f[1]) * (1 + f[1]), (1 - f[3]) * (1 + f[3]), 1 + f[2]
    losses = functional.cross_entropy(output, label, reduction="none")
    ((losses * weight * factor).sum() / weight.sum()).backward()
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            each -= 0.5 * each.grad
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["none", "er"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_step_is_that_of_the_weighted_loss(schema, strategy, micro_batch_size):
    trainer = make_trainer(schema, make_model(), strategy, micro_batch_size=micro_batch_size)
    new = trainer.examples(columns_of(schema))
    old = examples_of(as_sample(fake_columns(schema, range(9, 15), label=[1, 0])), (6,)) if strategy == "er" else []
    parts = [new, *old]
    x, label, weight = (
        torch.cat([pick(part) for part in parts])
        for pick in (lambda part: part.features["x"], lambda part: part.label_B, lambda part: part.weight_B)
    )
    expected = by_hand(trainer.model, x, label, weight, 4)
    plain_loss = functional.cross_entropy(trainer.model(new.features["x"]), new.label_B, reduction="sum").item()
    result = trainer.step(new, old)
    for name, value in trainer.snapshot().items():
        torch.testing.assert_close(value, expected[name], msg=name)
    assert result.loss_new == pytest.approx(plain_loss), "the loss that is reported has no importance weights"


@pytest.mark.parametrize("strategy", ["agem", "der", "der++", "ewc", "lwf", "mir"])
def test_an_event_that_is_surely_positive_teaches_nothing_as_a_negative_under_any_strategy(schema, strategy):
    """Its weight (1 - f)(1 + f) is 0, so that the step is the one without it."""
    model = make_model()
    trainer = make_trainer(schema, model, strategy)
    head = model[2]
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.bias.copy_(torch.tensor([-60.0, 60.0]))
    columns = columns_of(schema)
    columns[EARLY][:] = Early.NEGATIVE
    columns["label"][:] = 0
    before = trainer.snapshot()
    trainer.step(trainer.examples(columns))
    for name, value in trainer.snapshot().items():
        assert torch.equal(value, before[name]), name
    del columns[EARLY]
    trainer.step(trainer.examples(columns))
    assert any(not torch.equal(value, before[name]) for name, value in trainer.snapshot().items())


def test_the_expected_gradient_over_what_is_observed_is_that_over_the_true_labels():
    """A simulation: where the model's f is the true p, weighted events of the biased stream have the true gradient."""
    random = np.random.default_rng(0)
    events = 400_000
    for p in (0.3, 0.6, 0.8):
        output = torch.tensor([[0.0, float(np.log(p / (1 - p)))]]).requires_grad_()
        model_f = p + 0.1  # the gradient is that at another f ...
        at = torch.tensor([[0.0, float(np.log(model_f / (1 - model_f)))]])
        positives = int((random.random(events) < p).sum())
        label = torch.tensor([0, 1])
        # ... weighted by f = p: what importance() returns for the calibrated output.
        weight = importance(output.expand(2, 2), torch.tensor([Early.NEGATIVE, Early.CORRECTED]))
        gradients = at.softmax(1) - functional.one_hot(label, 2)
        # The share of negatives and positives in what is observed: each event once, and each positive again.
        observed = torch.tensor([events, positives]) / (events + positives)
        true = torch.tensor([1 - p, p])
        biased = (observed[:, None] * gradients).sum(0)
        corrected = (observed[:, None] * weight[:, None] * gradients).sum(0)
        expected = (true[:, None] * gradients).sum(0)
        torch.testing.assert_close(corrected, expected, atol=3e-3, rtol=0)
        assert (biased - expected).abs().max() > 0.02


@pytest.mark.slow
def test_a_model_trained_on_early_negatives_predicts_the_true_rates(schema):
    """Two kinds of events with rates 0.1 and 0.6: with the weights it is unbiased, without them it predicts p/(1+p)."""
    rates = (0.1, 0.6)
    found = {}
    for corrects in (True, False):
        random = np.random.default_rng(1)
        trainer = make_trainer(schema, nn.Sequential(nn.Linear(4, 2)), "none", optimizer={"name": "sgd", "lr": 3.0})
        late: list[Columns] = []
        for step in range(100):
            columns = fake_columns(schema, range(step * 500, step * 500 + 500), label=[0])
            kind = random.integers(2, size=500)
            columns["feature.x"] = np.eye(4, dtype=np.float32)[kind]
            positive = random.random(500) < np.array(rates)[kind]
            columns[EARLY] = np.full(500, Early.NEGATIVE, np.uint8)
            again = {name: column[positive] for name, column in columns.items()}
            again["label"], again[EARLY] = again["label"] + 1, np.full(positive.sum(), Early.CORRECTED, np.uint8)
            late.append(again)
            new = [columns, *([late.pop(0)] if len(late) > 5 else [])]
            joined = {name: np.concatenate([each[name] for each in new]) for name in columns}
            if not corrects:
                del joined[EARLY]
            trainer.step(trainer.examples(joined))
        with torch.no_grad():
            found[corrects] = trainer.model(torch.eye(4)[:2]).softmax(1)[:, 1].tolist()
    assert found[True] == pytest.approx(rates, abs=0.06)
    assert found[False] == pytest.approx([p / (1 + p) for p in rates], abs=0.06)


def test_a_positive_after_the_time_out_takes_the_negative_back():
    """With respect to the logits, its gradient is that of the positive minus that of the negative."""
    logits = torch.tensor([[0.5, -1.0], [-2.0, 3.0]], requires_grad=True)
    weight = importance(logits, torch.tensor([Early.TAKEN_BACK] * 2))
    loss = functional.cross_entropy(logits, torch.tensor([1, 1]), reduction="none") * weight
    (taken_back,) = torch.autograd.grad(loss.sum(), logits)
    positive, negative = (
        torch.autograd.grad(functional.cross_entropy(logits, torch.full((2,), label), reduction="sum"), logits)[0]
        for label in (1, 0)
    )
    torch.testing.assert_close(taken_back, positive - negative)
    assert importance(torch.tensor([[-200.0, 200.0]]), torch.tensor([Early.TAKEN_BACK])).isfinite().all()


@pytest.mark.parametrize("others", [0, 3])
def test_a_step_with_events_that_are_taken_back_corrects_what_intercepts_learned_from_them(others):
    group = {"dtype": "int64", "encode": {"learn": 8, "min_count": 1}, "intercept": True}
    settings = {"features": {"x": {"dtype": "float32", "shape": [4]}, "group": group}}
    grouped = Schema(SchemaSettings.model_validate({**settings, "label": {"name": "y", "classes": 2}}))
    model = make_model()
    FeatureLearning().convert(model, ModelContext(CPU, grouped))
    trainer, learned = make_trainer(grouped, model), features_of(model)
    assert learned is not None
    columns = fake_columns(grouped, range(5 + others), label=[0])
    columns["feature.group"] = np.arange(5 + others) % 3
    first = {name: column[:5] for name, column in columns.items()}
    trainer.step(trainer.examples(first), columns=first)
    score, information = (learned.of(GroupIntercept)["group"].get_buffer(name) for name in ("score", "information"))
    score_before, information_before = score.clone(), information.clone()
    again = columns | {EARLY: np.array([Early.TAKEN_BACK] * 5 + [Early.PLAIN] * others, np.uint8)}
    again["label"] = np.ones_like(columns["label"])
    result = trainer.step(trainer.examples(again), columns=again)
    assert result.finite
    rows = learned.of(GroupIntercept)["group"].table(torch.arange(3))
    if others:
        assert (information[rows] > information_before[rows]).all()
    else:
        assert torch.equal(information, information_before)
        change = score[rows] - score_before[rows]
        assert torch.allclose(change, torch.tensor([[-2.0, 2.0], [-2.0, 2.0], [-1.0, 1.0]]))


def test_a_padded_event_and_a_part_keep_their_kind(schema):
    new = make_trainer(schema, make_model()).examples(columns_of(schema))
    assert new.early_B is not None
    part = pad_single(new[1:2])
    assert part.early_B is not None
    assert part.early_B.tolist() == [Early.NEGATIVE] * 2


def test_other_ranks_get_the_kind_of_each_event(schema):
    new = make_trainer(schema, make_model()).examples(columns_of(schema))
    message = packed([[new[:2]], [new[2:]]])[1]
    (received,) = unpacked(message, [layout_of(new)], [2])
    assert received.early_B is not None
    assert received.early_B.tolist() == [Early.CORRECTED, Early.NEGATIVE]
    assert torch.equal(received.weight_B, new.weight_B[2:])


def test_a_graph_computes_the_same_step(schema):
    learned = []
    for graphs in (False, True):
        with CudaRecorder():
            optimizer = {"name": "adamw", "lr": 0.01}
            trainer = make_trainer(schema, make_model(), device=CUDA, graphs=graphs, optimizer=optimizer)
            for step in range(8):
                columns = columns_of(schema, 4 * step)
                columns[EARLY] = np.roll(columns[EARLY], step % 2 * 2)
                columns["label"] = np.array([int(kind == Early.CORRECTED) for kind in columns[EARLY]])
                trainer.step(trainer.examples(columns))
            learned.append(dict(trainer.model.state_dict()))
            assert not graphs or (trainer.runner.graphs.recorded, trainer.runner.graphs.refused) == (1, None)
    torch.testing.assert_close(*learned, rtol=0, atol=0)


def test_kept_predictions_are_scored_by_the_labels_that_came_later():
    outputs = np.array([[0, 2], [1, 0], [3, 0]], np.float32)
    later = scored(Classification(), outputs, np.array([1, 1, 0]))
    assert (later.rows, later.score) == (3, 2.0)
    expected = functional.cross_entropy(torch.from_numpy(outputs), torch.tensor([1, 1, 0]), reduction="sum")
    assert later.loss == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("task", "label", "strategy", "sentence"),
    [
        (Classification(), {"classes": 3}, "er", "here there are 3 classes"),
        (Regression(), {"dtype": "float32"}, "er", "here labels are numbers"),
        (Classification(), {"classes": 2, "multi": True}, "er", "here an event has several classes"),
        (Classification(), {"classes": 2}, "slda", 'learner.strategy = "slda" does not compute'),
        (Classification(), {"classes": 2}, "er-ace", 'learner.strategy = "er-ace" does not compute'),
    ],
)
def test_what_has_no_early_negatives_is_refused_in_one_sentence(task, label, strategy, sentence):
    settings = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", **label}}
    label_ = Schema(SchemaSettings.model_validate(settings)).label
    with pytest.raises(SettingsError, match=sentence):
        check_early(task, label_, STRATEGIES[strategy](), strategy)
    binary = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}}
    check_early(Classification(), Schema(SchemaSettings.model_validate(binary)).label, STRATEGIES["er"](), "er")
