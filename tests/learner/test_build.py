"""What a start builds for training: in the arithmetic, the memory format and with the checks of the settings."""

import itertools
import sys
from datetime import timedelta

import pytest
import torch

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.assembly import build_trainer
from anabranch.learner.errors import ModelError
from anabranch.learner.model.examples import Examples
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.pipeline import ServedSettings
from anabranch.learner.settings.search import SearchSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.build import build_training_setup
from anabranch.learner.versions.origin import settings_of_weights
from tests.learner.learner_spec import learner_spec

CPU = torch.device("cpu")
SOURCE = """
import torch
from torch import nn
from anabranch.learner.model.task import Classification


def build(size=8):
    return nn.Sequential(
        nn.Conv2d(3, size, 3), nn.BatchNorm2d(size), nn.ReLU(), nn.Flatten(), nn.Linear(size * 16, 3 + (size == 13))
    )


class Undistilled(Classification):
    distil = None


class Own(Classification):
    def loss(self, output_B, label_B):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("binary_cross_entropy and BCELoss are unsafe to autocast")
        return super().loss(output_B, label_B)
"""
EVENTS = {"features": {"x": {"dtype": "float32", "shape": [3, 6, 6]}}, "label": {"name": "y", "classes": 3}}
names = (f"anabranch_test_build_{number}" for number in itertools.count())


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """`spec(model={}, **learner)`: the settings of a learner of small images."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = next(names)
    (tmp_path / f"{name}.py").write_text(SOURCE)

    def make(model=None, **learner):
        task = (model or {}).get("task", "classification")
        task = f"{name}:{task}" if task in ("Own", "Undistilled") else task
        settings = ModelSettings.model_validate({"factory": f"{name}:build", **(model or {}), "task": task})
        options = LearnerSettings.model_validate({"device": "cpu", **learner})
        return learner_spec(tmp_path, SchemaSettings.model_validate(EVENTS), settings, learner=options)

    return make


def test_a_task_that_fails_under_autocast_is_refused_before_the_first_step(spec):
    build_training_setup(spec({"task": "Own"}, precision="fp32"), CPU)
    with pytest.raises(ModelError, match=r"Own\.loss fails in training, in bf16 by autocast .*unsafe to autocast"):
        build_training_setup(spec({"task": "Own"}, precision="bf16"), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "progressive"])  # of linear layers
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_channels_last_learns_what_contiguous_weights_learn(spec, strategy, precision):
    """With each strategy, and from a checkpoint on, whose tensors are contiguous."""
    losses = []
    for last in (False, True):
        embedding = {"slda": "3", "ncm": "3", "experts": "0"}.get(strategy, "")
        chosen = {"channels_last": last, "embedding": embedding}
        arguments = {"size": 10} if strategy == "experts" else {}
        options = {
            "strategy": {"name": strategy, **arguments},
            "precision": precision,
            "optimizer": {"name": "adamw", "lr": 0.01},
        }
        setup = build_training_setup(spec(chosen, **options), CPU)
        trainer, found = build_trainer(setup, None), []
        columns = fake_columns(setup.schema, range(12), label=[0, 1, 2])
        columns["feature.x"][:] = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(0)).numpy()
        new = trainer.examples(columns)
        old = Examples(new.features, new.label_B, new.weight_B, torch.zeros(12, 3))
        for step in range(6):
            result = trainer.step(new, [old] * len(trainer.strategy.samples(12)))
            assert result.finite
            found.append(result.loss)
            if step == 2:
                tensors = trainer.tensors()
                trainer.restore(
                    {part: {key: each.contiguous() for key, each in named.items()} for part, named in tensors.items()},
                    trainer.state(),
                )
        weight = next(trainer.model.parameters())
        assert weight.is_contiguous(memory_format=torch.channels_last) == last
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if precision == "fp32" else 0.1, abs=1e-4)


def test_a_section_search_builds_a_trainer_with_challengers(spec):
    """A version's settings have the section, since weights depend on it."""
    plain = spec({}, precision="fp32")
    searching = plain.with_changes(search=SearchSettings(challengers=2))
    setup = build_training_setup(searching, CPU)
    trainer = build_trainer(setup, None, spec=searching)
    events = fake_columns(setup.schema, range(8), label=[0, 1, 2])
    for _ in range(3):
        assert trainer.step(trainer.examples(events)).finite
    assert trainer.wrappers[0].report.steps == 6
    assert settings_of_weights(searching)["search"]["challengers"] == 2
    assert "search" not in settings_of_weights(plain)


@pytest.mark.parametrize("size", [12, 13], ids=["fits", "has another output"])
def test_a_space_with_arguments_of_the_factory_builds_their_networks(spec, size):
    """13 channels have one output more."""
    served = ServedSettings(max_batch=4, slo=timedelta(hours=1))
    search = SearchSettings(challengers=1, space={"model.args.size": (size, size + 1)})
    searching = spec({"args": {"size": 8}}, precision="fp32").with_changes(search=search, serving=served)
    setup = build_training_setup(searching, CPU)
    trainer = build_trainer(setup, None, spec=searching)
    events = fake_columns(setup.schema, range(8), label=[0, 1, 2])
    assert trainer.step(trainer.examples(events)).finite
    report = trainer.wrappers[0].report
    assert report is not None
    assert report.given == {"model.args.size": 8.0}
    if size == 13:
        assert report.outcomes == {"raised": 1}
    else:
        assert [(each.values["model.args.size"], each.taught) for each in report.challengers] == [(12.0, 1)]


def test_networks_need_a_task_by_which_they_learn_from_the_model(spec):
    space = {"model.args.size": (4, 32)}
    searching = spec({"args": {"size": 8}, "task": "Undistilled"}).with_changes(search=SearchSettings(space=space))
    setup = build_training_setup(searching, CPU)
    with pytest.raises(ModelError, match=r"has no method distil, .* take those keys out of search\.space"):
        build_trainer(setup, None, spec=searching)
