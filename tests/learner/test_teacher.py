"""`[model.teacher]`, and the teacher's part of a step's loss for each strategy, against its formula."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional

from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import Examples, pad_single
from anabranch.learner.model.task import Classification, MultiLabel, Regression
from anabranch.learner.parallel.scatter import RankBatch, layout_of, packed, scatter, unpacked
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings, TeacherSettings, teacher_conflicts
from anabranch.learner.strategies.base import LossWrapper
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.strategies.teacher_loss import TeacherLoss, kept_outputs
from anabranch.learner.train.micro_batches import idle
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.support.facts import facts_of

CPU = torch.device("cpu")
WEIGHT, TEMPERATURE = 0.3, 2.0
LEARNED = sorted(set(STRATEGIES) - {"slda", "ncm", "experts", "progressive"})


def examples(n, seed):
    """Events of which every third has no label, and every fourth no output of the teacher."""
    generator = torch.Generator().manual_seed(seed)
    x, teacher_B = torch.randn(n, 3, generator=generator), torch.randn(n, 3, generator=generator)
    label_B, weight_B = torch.randint(0, 3, (n,), generator=generator), torch.rand(n, generator=generator) + 0.5
    labelled_B = torch.arange(n) % 3 != 2
    teacher_B[torch.arange(n) % 4 == 1] = torch.nan
    return Examples(
        {"x": x},
        label_B.where(labelled_B, 0),
        weight_B.where(labelled_B, 0),
        output_B=torch.randn(n, 3, generator=generator),
        teacher_B=teacher_B,
        taught_B=weight_B,
        labelled_B=labelled_B,
    )


def plain(events):
    return replace(events, teacher_B=None, taught_B=None, labelled_B=None)


def trainer_of(make_model, schema, strategy="er", *wrappers, **learner):
    options = {"optimizer": {"name": "sgd", "lr": 0.1}, "max_grad_norm": 1e9, **learner}
    settings = LearnerSettings.model_validate(options)
    return Trainer(
        TrainingSetup(
            make_model(),
            Classification(),
            STRATEGIES[strategy](),
            schema,
            settings,
            CPU,
            choose_precision("fp32", CPU),
            loss_wrappers=wrappers,
        )
    )


@pytest.fixture
def teaching():
    return TeacherLoss(Classification(), WEIGHT, TEMPERATURE)


@pytest.fixture
def make_linear():
    def make():
        torch.manual_seed(0)
        return nn.Linear(3, 3)

    return make


def divergence(output_B, teacher_B):
    target = (teacher_B / TEMPERATURE).softmax(1)
    return (target * (target.log() - (output_B / TEMPERATURE).log_softmax(1))).sum(1) * TEMPERATURE**2


def by_hand(model, groups, *, together):
    """The loss as the guide writes it, event by event."""
    sums, weights = [], []
    for events in groups:
        output_B = model(events.features["x"])
        label = functional.cross_entropy(output_B, events.label_B, reduction="none")
        total, whole = output_B.new_zeros(()), output_B.new_zeros(())
        assert events.teacher_B is not None
        assert events.taught_B is not None
        assert events.labelled_B is not None
        for index in range(len(events)):
            weight = events.taught_B[index]
            known, labelled = bool(events.teacher_B[index].isfinite().all()), bool(events.labelled_B[index])
            if not known and not labelled:
                continue
            part = (WEIGHT if labelled else 1.0) if known else 0.0
            whole = whole + weight
            total = total + weight * (1 - part) * label[index]
            if known:
                total = total + weight * part * divergence(output_B[[index]], events.teacher_B[[index]])[0]
        sums.append(total)
        weights.append(whole)
    if together:
        return sum(sums[1:], sums[0]) / sum(weights[1:], weights[0])
    return torch.stack([total / whole for total, whole in zip(sums, weights, strict=True)]).sum()


def test_each_event_counts_once_and_its_weight_is_divided_between_label_and_teacher(teaching):
    events = examples(12, 0)
    balanced = teaching.weigh(events)
    assert balanced.taught_B is not None
    assert balanced.teacher_B is not None
    assert events.taught_B is not None
    known, labelled = torch.arange(12) % 4 != 1, torch.arange(12) % 3 != 2
    total = balanced.weight_B + balanced.taught_B
    assert torch.allclose(total, torch.where(known | labelled, events.taught_B, 0))
    both = known & labelled
    assert torch.allclose(balanced.taught_B[both], WEIGHT * events.taught_B[both])
    assert balanced.teacher_B.isfinite().all()


@pytest.mark.parametrize("micro", [None, 5])
def test_the_gradient_of_er_is_that_of_the_formula_over_new_and_old_events(make_linear, schema, teaching, micro):
    new, old = examples(10, 1), examples(8, 2)
    trainer = trainer_of(make_linear, schema, "er", teaching, micro_batch_size=micro)
    expected = make_linear()
    by_hand(expected, [new, old], together=True).backward()
    trainer.step(new, [old])
    for found, parameter in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(found, parameter.detach() - 0.1 * parameter.grad, atol=1e-6)


def test_without_replay_the_gradient_is_that_of_the_formula_over_new_events(make_linear, schema, teaching):
    new = examples(10, 1)
    trainer, expected = trainer_of(make_linear, schema, "none", teaching), make_linear()
    by_hand(expected, [new], together=False).backward()
    trainer.step(new)
    for found, parameter in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(found, parameter.detach() - 0.1 * parameter.grad, atol=1e-6)


@pytest.mark.parametrize("strategy", LEARNED)
def test_every_strategy_learns_from_the_teacher_and_splits_into_micro_batches_alike(
    make_linear, schema, teaching, strategy
):
    samples = len(STRATEGIES[strategy]().samples(6))
    olds = [examples(30 if strategy == "mir" else 6, 5 + index) for index in range(samples)]
    if not STRATEGIES[strategy].teaches_old:
        olds = [plain(old) for old in olds]
    weights = []
    for micro, new in ((None, examples(10, 1)), (4, examples(10, 1)), (None, plain(examples(10, 1)))):
        trainer = trainer_of(make_linear, schema, strategy, teaching, micro_batch_size=micro)
        result = trainer.step(new, olds)
        assert result.finite
        weights.append(torch.cat([value.reshape(-1) for value in trainer.snapshot().values()]))
    assert torch.allclose(weights[0], weights[1], atol=1e-5)
    assert not torch.allclose(weights[0], weights[2], atol=1e-5), "the teacher's outputs change the step"


def test_a_step_without_any_output_is_that_of_its_labels(make_linear, schema, teaching):
    events = replace(plain(examples(9, 3)), output_B=None)
    unanswered = replace(
        events, teacher_B=torch.full((9, 3), torch.nan), taught_B=torch.ones(9), labelled_B=events.weight_B > 0
    )
    first, second = (trainer_of(make_linear, schema, "er", teaching) for _ in range(2))
    first.step(events)
    second.step(unanswered)
    for name, value in first.snapshot().items():
        assert torch.equal(value, second.snapshot()[name])


def test_scores_and_losses_are_those_of_labelled_events(make_linear, schema, teaching):
    new, model = examples(9, 4), make_linear()
    assert new.labelled_B is not None
    output_B = model(new.features["x"])[new.labelled_B]
    label_B = new.label_B[new.labelled_B]
    result = trainer_of(make_linear, schema, "er", teaching).step(new)
    assert result.score == (output_B.argmax(1) == label_B).sum().item()
    assert result.loss_new == pytest.approx(functional.cross_entropy(output_B, label_B, reduction="sum").item())


def test_events_of_weight_0_teach_nothing():
    one = examples(1, 0)
    pair = pad_single(one)
    assert pair.taught_B is not None
    assert one.taught_B is not None
    assert pair.taught_B.tolist() == [*one.taught_B.tolist(), 0.0]
    weightless, _ = idle(examples(4, 0), [])
    assert weightless.total_weight == 0


class TestTasks:
    def test_classes_are_compared_by_their_divergence_at_the_temperature(self):
        output_B, teacher_B = torch.randn(2, 5, 4)
        found = Classification().distil(output_B, teacher_B, TEMPERATURE)
        assert torch.allclose(found, divergence(output_B, teacher_B), atol=1e-6)
        assert torch.allclose(Classification().distil(teacher_B, teacher_B, TEMPERATURE), torch.zeros(5), atol=1e-6)

    def test_each_of_several_classes_is_compared_as_a_bernoulli_variable(self):
        output_B, teacher_B = torch.randn(2, 5, 4)
        pairs = [torch.stack([torch.zeros_like(each), each], dim=-1).reshape(-1, 2) for each in (output_B, teacher_B)]
        expected = divergence(pairs[0], pairs[1]).reshape(5, 4).mean(1)
        assert torch.allclose(MultiLabel().distil(output_B, teacher_B, TEMPERATURE), expected, atol=1e-5)

    def test_numbers_are_compared_by_their_squared_difference(self):
        found = Regression().distil(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [2.0]]), TEMPERATURE)
        assert found.tolist() == [4.0, 0.0]


def test_outputs_are_kept_where_old_events_are_learned_from_by_their_labels():
    kept = {name: kept_outputs(kind(), (3,), taught=True)["teacher"] for name, kind in STRATEGIES.items()}
    assert {name for name, shape in kept.items() if shape == [3]} == {"er", "er-ace", "mir"}
    assert kept_outputs(STRATEGIES["er"](), (3,), taught=False) == {"output": None, "teacher": None}


class Doubling(LossWrapper):
    """Doubles the weights of events, and the loss; writes down who is asked, and the weight of the new events."""

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def weigh(self, events):
        return replace(events, weight_B=2 * events.weight_B)

    def loss(self, compute, forward, new, old, step):
        self.asked.append((self.name, step.new.item()))
        loss = compute(forward, new, old, step)
        return replace(loss, total=2 * loss.total)


def test_wrappers_of_a_loss_are_asked_the_outermost_first_with_weights_that_all_have_changed(make_linear, schema):
    new, asked = replace(plain(examples(6, 1)), weight_B=torch.ones(6)), list[tuple[str, float]]()
    alone = trainer_of(make_linear, schema, "er")
    wrapped = trainer_of(make_linear, schema, "er", Doubling("outer", asked), Doubling("inner", asked))
    assert wrapped.step(new).loss == 4 * alone.step(new).loss
    assert asked == [("outer", 24.0), ("inner", 24.0)]


def test_the_teachers_outputs_are_scattered_to_the_ranks_with_their_events():
    groups = [examples(5, 1), examples(1, 2)]
    batches = [RankBatch.of(groups, slices) for slices in scatter([5, 1], 2)]
    layouts = [layout_of(events) for events in groups]
    messages = packed([batch.parts for batch in batches])
    received = unpacked(messages[1], layouts, batches[1].counts)
    for sent, found in zip(batches[1].parts, received, strict=True):
        for name, value in sent.optional.items():
            assert torch.equal(value.nan_to_num(9), found.optional[name].nan_to_num(9)), name
    (without,) = [batch.parts[1] for batch in batches if not batch.real[1]]
    assert without.total_weight == 0, "a placeholder teaches nothing"


URL = {"url": "https://models:8000/", "model": "large"}


def test_the_defaults_are_those_of_the_guide():
    teacher = TeacherSettings.model_validate(URL)
    assert (teacher.url, teacher.kind, teacher.weight, teacher.temperature) == ("https://models:8000", "url", 0.5, 2.0)
    assert (teacher.timeout, teacher.retries, teacher.request_rows) == (timedelta(seconds=1), 2, 256)
    assert TeacherSettings.model_validate({"version": {}}).kind == "version"
    assert TeacherSettings.model_validate({"factory": "m:f"}).kind == "factory"


def test_the_token_is_not_shown():
    teacher = TeacherSettings.model_validate({**URL, "token": "secret\n"})
    assert "secret" not in repr(teacher)
    assert teacher.token is not None
    assert teacher.token.get_secret_value() == "secret"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "set exactly one of factory, version and url; there is none of them"),
        ({**URL, "factory": "m:f"}, "there is factory and url"),
        ({"url": "https://models:8000"}, "model is missing: the name of the model on the server of url"),
        ({"factory": "m:f", "timeout": "2s"}, "timeout is for a teacher with url; remove it"),
        ({"version": {}, "args": {"a": 1}}, "args are for factory; remove them, or write version.args"),
        ({"version": {"args": {"a": 1}}}, "version.args are for version.factory; set it too"),
        ({**URL, "precision": "bf16"}, "precision is for a teacher in this process; remove it"),
        ({**URL, "url": "ftp://models"}, "write the address of the server"),
        ({**URL, "url": "https://a:b@models"}, "contains credentials; write them as token"),
        ({**URL, "url": "https://models?x=1"}, "ends with the path"),
        ({**URL, "token": "two words"}, "write the token alone"),
        ({**URL, "model": "../admin"}, "write the name of a model"),
        ({"factory": "m:f", "weight": 0}, "greater than 0"),
        ({"factory": "m:f", "features": []}, "at least 1 item"),
    ],
)
def test_what_is_wrong_is_said_with_the_way_out(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        TeacherSettings.model_validate(settings)


def test_the_teacher_has_to_fit_the_stream_and_the_schema():
    (without,) = teacher_conflicts(None, "distil", ("x",))
    assert without[0] == "stream.unlabelled"
    assert "needs a teacher; write [model.teacher]" in without[1]
    teacher = TeacherSettings.model_validate({"factory": "m:f", "features": ["x", "z"]})
    (absent,) = teacher_conflicts(teacher, "distil", ("x", "y"))
    assert absent == (
        "model.teacher.features",
        "model.teacher.features names 'z', which is no feature of the schema; those are x, y",
    )
    assert list(teacher_conflicts(teacher, "skip", ("x", "z"))) == []


@pytest.mark.parametrize(
    ("learner", "labels", "sentence"),
    [
        ({"strategy": "ncm"}, None, 'model.teacher = "url" does not go with learner.strategy = "ncm"'),
        ({"deterministic": True}, None, 'learner.deterministic = true does not go with model.teacher = "url"'),
        (
            {},
            {"topics": ["labels"], "early": "negative-then-correct", "unmatched": "negative", "wait": "1h"},
            'model.teacher = "url" does not go with stream.labels.early = "negative-then-correct"',
        ),
    ],
)
def test_settings_that_exclude_a_teacher_are_said(learner, labels, sentence):
    stream = StreamSettings.model_validate({"topics": ["events"], "labels": labels})
    model = ModelSettings.model_validate({"factory": "m:f", "teacher": URL})
    settings = LearnerSettings.model_validate(learner)
    ((_, said),) = conflicts(facts_of(learner=settings, stream=stream, model=model))
    assert said.startswith(sentence)
    assert not list(conflicts(facts_of(learner=settings, stream=stream)))


def test_events_without_a_label_do_not_wait_for_one_and_for_the_teacher():
    with pytest.raises(ValidationError, match='unlabelled = "distil" contradicts'):
        StreamSettings.model_validate(
            {"topics": ["events"], "unlabelled": "distil", "labels": {"topics": ["labels"], "wait": "1h"}}
        )
