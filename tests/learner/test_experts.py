"""Experts: small parts on top of a frozen model, of which a router chooses one for each event."""

import copy
import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import ModelError
from anabranch.learner.evaluate.chunks import Chunks
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.evaluate.scoring import ResidentModels
from anabranch.learner.model.device import Precision, choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.growing.pool import POOL, grow, grown, parts_in, pool_of
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import base_state, trained_state
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.experts import Experts
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended

CPU = torch.device("cpu")
CLASSES = 6
EVENTS = {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": CLASSES}}
IMAGES = {**EVENTS, "features": {"x": {"dtype": "float32", "shape": [2, 6, 6]}}}
CENTRES = torch.randn(CLASSES, 4, generator=torch.Generator().manual_seed(5)) * 4


@pytest.fixture
def schema():
    return Schema(SchemaSettings.model_validate(EVENTS))


def body(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6)
    )


def images(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 6)
    )


def make_trainer(schema, model=None, embedding="0", precision="fp32", **arguments):
    model = model or body()
    strategy = extended(Experts(**{"size": 5.0, "least": 20, **arguments}), model, schema, embedding=embedding)
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.02}, "max_grad_norm": math.inf})
    return Trainer(
        TrainingSetup(model, Classification(), strategy, schema, settings, CPU, choose_precision(precision, CPU))
    )


def events(classes, seed, n=16):
    generator = torch.Generator().manual_seed(seed)
    label_B = torch.tensor(classes)[torch.arange(n) % len(classes)]
    x = CENTRES[label_B] + torch.randn(n, 4, generator=generator)
    return Examples({"x": x}, label_B, torch.ones(n))


TASKS = (0, 1), (2, 3), (4, 5)


def learn(trainer, tasks=TASKS, steps=15):
    for index, classes in enumerate(tasks):
        for step in range(steps):
            assert trainer.step(events(classes, 1000 * index + step)).finite


def pool(trainer):
    found = pool_of(trainer.model)
    assert found is not None
    return found


def predicted(model, x):
    with torch.inference_mode():
        output: Tensor = model.eval()(x)
    return output


def frozen(trainer, count):
    """Return the tensors of the first experts, and the prototypes that choose them."""
    tensors = {
        name: value[:count].clone()
        for name, value in pool(trainer).state_dict().items()
        if name == "shift" or (name.endswith(("first", "second")) and "open" not in name)
    }
    return tensors | {"mean": trainer.strategy.tensors()["mean"][: 2 * count].clone()}


class TestStream:
    def test_classes_that_come_one_after_the_other_are_kept_without_a_stored_event(self, schema):
        trainer = make_trainer(schema)
        learn(trainer)
        test = events(tuple(range(CLASSES)), 9, 600)
        plain = nn.Sequential(*body())
        assert pool(trainer).size == 3
        right = (predicted(trainer.model, test.features["x"]).argmax(dim=1) == test.label_B).float()
        assert right.mean() > 0.9
        assert right[test.label_B < 2].mean() > 0.85
        assert predicted(plain, test.features["x"]).shape == (600, 6)

    def test_a_frozen_expert_and_its_class_means_keep_every_bit(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, TASKS[:2])
        base, first = base_state(trainer.model), frozen(trainer, 1)
        before = {name: value.clone() for name, value in base.items()}
        learn(trainer, TASKS[2:])
        trainer.on_drift()
        learn(trainer, ((0, 5),))
        assert pool(trainer).size == 4
        assert all(torch.equal(frozen(trainer, 1)[name], value) for name, value in first.items())
        assert all(torch.equal(value, before[name]) for name, value in base_state(trainer.model).items())

    def test_an_expert_is_frozen_by_drift_too_but_not_before_it_has_trained_on_least_events(self, schema):
        trainer = make_trainer(schema, least=32)
        trainer.step(events((0, 1), 0))
        trainer.on_drift()
        trainer.step(events((2, 3), 1))  # 16 events: the classes join
        assert pool(trainer).size == 1
        trainer.on_drift()
        assert pool(trainer).size == 2
        trainer.on_drift()
        assert pool(trainer).size == 2

    def test_at_most_parts_the_last_expert_goes_on_learning_with_a_warning(self, schema, caplog):
        trainer = make_trainer(schema, most=2)
        learn(trainer, TASKS[:2])
        assert not trainer.warning
        with caplog.at_level(logging.WARNING):
            learn(trainer, TASKS[2:])
        assert pool(trainer).size == 2
        assert trainer.warning is not None
        assert "classes 4, 5 are new, and the model has most = 2 parts: the last one goes on" in trainer.warning
        assert caplog.text.count("the last one goes on") == 1
        test = events((4, 5), 7, 100)
        assert (predicted(trainer.model, test.features["x"]).argmax(dim=1) == test.label_B).float().mean() > 0.8

    def test_the_optimizer_starts_again_with_each_expert(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, TASKS[:1])
        trainer.on_drift()
        assert not trainer.tensors()["optimizer"]
        assert trainer.step(events((0, 1), 3)).finite

    def test_a_step_that_is_not_finite_opens_no_class(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, TASKS[:1])
        poisoned = events((2, 3), 0)
        poisoned.features["x"][0] = math.inf
        assert not trainer.step(poisoned).finite
        assert trainer.step(events((0, 1), 1)).finite
        assert (pool(trainer).router.label.tolist(), pool(trainer).size) == ([0, 1], 1)

    def test_the_score_of_a_step_is_that_of_the_chosen_experts(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, TASKS[:2])
        new = events((0, 1), 77)
        right = (predicted(trainer.model, new.features["x"]).argmax(dim=1) == new.label_B).sum()
        trainer.model.train()
        assert trainer.step(new).score == right > 12


class TestRouting:
    @pytest.mark.parametrize("embedding", ["0", "2", "5"], ids=["first", "middle", "last but one"])
    def test_a_mixed_batch_gives_each_event_what_it_gets_alone(self, schema, embedding):
        trainer = make_trainer(schema, embedding=embedding)
        learn(trainer, steps=10)
        x = events(tuple(range(CLASSES)), 5, 24).features["x"]
        alone = torch.cat([predicted(trainer.model, x[i : i + 1]) for i in range(24)])
        assert torch.allclose(predicted(trainer.model, x).exp(), alone.exp(), atol=1e-3)

    def test_so_it_does_through_convolutions(self):
        schema = Schema(SchemaSettings.model_validate(IMAGES))
        for embedding in ("0", "3"):
            trainer = make_trainer(schema, images(), embedding=embedding, least=4)
            for step, classes in enumerate((*TASKS, *TASKS[2:])):
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(8, 2, 6, 6, generator=generator) + step
                assert trainer.step(Examples({"x": x}, torch.tensor(classes).repeat(4), torch.ones(8))).finite
            x = torch.cat([torch.randn(2, 2, 6, 6, generator=generator) + step for step in range(3)])
            alone = torch.cat([predicted(trainer.model, x[i : i + 1]) for i in range(6)])
            assert torch.allclose(predicted(trainer.model, x).exp(), alone.exp(), atol=1e-3)
            assert len(set(pool(trainer).router.owner.tolist())) == 3

    def test_the_output_is_the_logarithm_of_probabilities(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, steps=10)
        output = predicted(trainer.model, events((0, 3, 5), 1).features["x"])
        assert torch.allclose(output.exp().sum(dim=1), torch.ones(16), atol=1e-4)

    def test_only_chosen_experts_are_computed(self, schema):
        """The weights of the others may be anything."""
        trainer = make_trainer(schema)
        learn(trainer)
        x = events((0, 1), 2, 8).features["x"]
        before = predicted(trainer.model, x)
        assert before.argmax(dim=1).max() < 2
        for name, value in pool(trainer).named_parameters():
            if name.endswith(("first", "second")):
                (value.data if "open" in name else value.data[1:]).fill_(math.nan)
        assert torch.equal(predicted(trainer.model, x), before)

    def test_the_embedding_of_a_request_is_that_of_the_base(self, schema):
        trainer = make_trainer(schema, embedding="5")
        source, base = Embedding(trainer.model, "5"), body().eval()
        x = events((0, 1, 2), 1).features["x"]
        for tasks in (TASKS[:1], TASKS[1:]):
            learn(trainer, tasks, steps=5)
            source.capture_next()
            predicted(trainer.model, x)
            assert torch.allclose(source.captured(), base[:6](x), atol=1e-6)


class TestState:
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_weights_are_loaded_into_a_fresh_module_of_any_size(self, schema, precision):
        trainer = make_trainer(schema, precision=precision)
        other = make_trainer(schema, precision=precision).model.eval()
        x = events(tuple(range(CLASSES)), 5).features["x"]
        kept: list[tuple[dict[str, Tensor], Tensor]] = []
        for classes in TASKS:
            learn(trainer, (classes,), steps=5)
            weights = {name: value.clone() for name, value in trained_state(trainer.model).items()}
            kept.append((weights, predicted(trainer.model, x)))
            trainer.model.train()
        assert [parts_in(weights) for weights, _ in kept] == [1, 2, 3]
        for weights, output in (kept[1], kept[2], kept[0]):
            version = grown(other, weights)
            version.load_state_dict(weights, strict=False)
            assert torch.equal(predicted(version, x), output)
            assert parts_in(trained_state(other)) == 1
            assert version[0].weight is other[0].weight  # type: ignore[index]

    def test_the_gates_copy_takes_versions_with_other_numbers_of_experts(self, schema):
        trainer = make_trainer(schema)
        models = ResidentModels(trainer.model, Chunks(CPU, Precision("fp32", None), bool))
        x, whole = events((0, 2, 4), 5).features["x"], []
        for classes in TASKS:
            learn(trainer, (classes,), steps=5)
            whole.append((dict(trainer.snapshot()), predicted(trainer.model, x)))
            trainer.model.train()
        for weights, output in (whole[2], whole[0], whole[1]):
            assert torch.equal(predicted(models.of(weights), x), output)

    @pytest.mark.parametrize("stop", [1, 7, 14, 15, 22])
    def test_a_restart_after_any_step_goes_on_with_the_same_bits(self, schema, stop):
        steps = [events(classes, step) for step, classes in enumerate([TASKS[0]] * 7 + [TASKS[1]] * 8 + [TASKS[2]] * 9)]
        through = make_trainer(schema)
        for step, new in enumerate(steps):
            through.step(new)
            if step + 1 == stop:
                tensors, state = copy.deepcopy((through.tensors(), through.state()))
        resumed = make_trainer(schema)
        learn(resumed, TASKS[1:], steps=4)  # it has more experts than the checkpoint, or fewer
        resumed.restore(tensors, state)
        for new in steps[stop:]:
            resumed.step(new)
        assert pool(through).size == 3
        for part, named in through.tensors().items():
            assert resumed.tensors()[part].keys() == named.keys()
            assert all(torch.equal(resumed.tensors()[part][name], value) for name, value in named.items())
        assert resumed.state() == through.state()

    def test_events_that_wait_for_labels_are_predicted_by_the_chosen_experts(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, steps=5)
        exact = Precision("fp32", None)
        predictor = EventTimePredictor(trainer.model, Classification(), schema, CPU, exact, (CLASSES,))
        x = events((0, 2, 4), 5).features["x"]
        found = predictor.predict({"feature.x": x.numpy(), "offset": np.arange(16)})
        assert torch.allclose(torch.from_numpy(found), predicted(trainer.model, x), atol=1e-4)

    def test_weights_that_do_not_fit_are_refused(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, steps=5)
        weights = trained_state(trainer.model)
        with pytest.raises(RuntimeError, match=r"3 parts, and learner\.strategy allows most = 2; raise it to 3"):
            grow(make_trainer(schema, most=2).model, weights)
        with pytest.raises(RuntimeError, match=r"have no parts, and learner\.strategy of the config adds them"):
            grow(trainer.model, body().state_dict())
        with pytest.raises(RuntimeError, match=r"have parts, and learner\.strategy of the config adds none"):
            grow(body(), weights)
        hostile: list[tuple[str, Callable[[Tensor], Tensor]]] = [
            ("router.owner", lambda owner: owner + 1),
            ("router.label", lambda label: label - 1),
            ("router.label", lambda label: label.double()),
        ]
        for name, change in hostile:
            name = f"{POOL}.{name}"
            with pytest.raises(RuntimeError, match="refers to parts or classes that do not exist"):
                grow(trainer.model, {**weights, name: change(weights[name])})

    def test_the_base_is_no_part_of_a_version(self, schema):
        trainer = make_trainer(schema)
        learn(trainer, steps=5)
        own = {name for name in trained_state(trainer.model) if not name.startswith(POOL)}
        assert own == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert set(base_state(trainer.model)) == {name for name, _ in body().named_parameters()}

    @pytest.mark.slow
    def test_frozen_weights_are_kept_in_bf16_where_that_is_asked_for(self, schema):
        trainer = make_trainer(schema, base_precision="bf16")
        full = make_trainer(schema)
        learn(trainer)
        learn(full)
        kinds = {name: value.dtype for name, value in pool(trainer).named_parameters()}
        assert kinds["layers.0.first"] is torch.bfloat16
        assert kinds["layers.0.open_first"] is torch.float32
        assert trainer.model[0].weight.dtype is torch.bfloat16  # type: ignore[index]
        x = events(tuple(range(CLASSES)), 3, 300)
        same = predicted(trainer.model, x.features["x"]).argmax(dim=1) == predicted(full.model, x.features["x"]).argmax(
            dim=1
        )
        assert same.float().mean() > 0.95


class TestSize:
    @pytest.mark.parametrize(("size", "adapted"), [(0.02, 2), (0.04, 3)])
    def test_an_expert_has_at_most_the_given_fraction_of_the_parameters(self, size, adapted):
        schema = Schema(
            SchemaSettings.model_validate(
                {"features": {"x": {"dtype": "float32", "shape": [784]}}, "label": {"name": "y", "classes": 10}}
            )
        )
        model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
        total = sum(each.numel() for each in model.parameters())
        trainer = make_trainer(schema, model, embedding="0", size=size)
        one = sum(value.numel() for value in trainer.strategy.learner.weights) + 10
        assert 0.8 * size < one / total <= size
        assert len(pool(trainer).layers) == adapted  # type: ignore[arg-type]

    def test_a_head_that_is_too_large_is_refused_with_the_size_that_suffices(self, schema):
        with pytest.raises(
            SettingsError, match=r"an expert's head has 108 parameters, and size = 0\.02 of the model's 486"
        ):
            make_trainer(schema, size=0.02)

    @pytest.mark.parametrize(
        ("model", "embedding", "error", "sentence"),
        [
            (body, "", ModelError, r'routes events by their embedding, and model\.embedding is ""'),
            (body, "9", ModelError, r'model\.embedding = "9": the model has no such module, but 0, 1'),
            (lambda: nn.Sequential(nn.Flatten(), nn.Softmax(1)), "0", SettingsError, "gives each expert its own last"),
        ],
    )
    def test_models_that_cannot_have_experts_are_refused(self, schema, model, embedding, error, sentence):
        with pytest.raises(error, match=sentence):
            make_trainer(schema, model(), embedding=embedding)

    def test_a_model_whose_first_dimension_is_time_is_refused(self, schema):
        class TimeFirst(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(1, 3), nn.Linear(3, 6)

            def forward(self, x):
                hidden: Tensor = self.body(x.T[..., None]).mean(dim=0)
                output: Tensor = self.head(hidden)
                return output

        with pytest.raises(ModelError, match="the layer body gets 4 rows for 3 events and 4 for 2"):
            make_trainer(schema, TimeFirst(), embedding="head")
