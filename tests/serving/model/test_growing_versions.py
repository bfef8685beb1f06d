"""Versions of a model that grows: each is served with its number of experts, whatever the one before had."""

import msgspec
import numpy as np
import pytest
import torch

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import VersionError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.factory import build_on_device
from anabranch.learner.model.growing.pool import POOL, parts_in
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import write_base
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.strategies import StrategySettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import Manifest, Verdict, reference_to
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import load_version

CPU = torch.device("cpu")
SCHEMA = {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": 4}}
CODE = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
"""
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


class Learner:
    """Publishes versions of a model with experts or columns."""

    def __init__(self, folder, strategy):
        (folder / "anabranch_test_growing.py").write_text(CODE)
        chosen = StrategySettings.model_validate(strategy)
        model = ModelSettings(factory="anabranch_test_growing:build", embedding="0")
        schema = Schema(SchemaSettings.model_validate(SCHEMA))
        self.deployment = Deployment("tiny", schema, model, folder, folder / "var", CPU, strategy=chosen)
        torch.manual_seed(0)
        module = build_on_device(model, folder, CPU)
        method = build_strategy(chosen, model, Classification())
        method.convert(module, ModelContext(CPU, schema, model.embedding))
        self.base = write_base(bases_in(folder / "var"), module)
        settings = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}})
        precision = choose_precision("fp32", CPU)
        self.trainer = Trainer(TrainingSetup(module, Classification(), method, schema, settings, CPU, precision))
        self.number = 0

    def publish(self, classes, **changes):
        """Train some steps, and publish a version; return its manifest and the model's output for `X`."""
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            label_B = torch.tensor(classes).repeat(8)
            x = torch.randn(16, 4, generator=generator) + label_B[:, None]
            assert self.trainer.step(Examples({"x": x}, label_B, torch.ones(16))).finite
        self.number += 1
        weights = self.trainer.snapshot()
        members: dict[str, object] = {
            "number": self.number,
            "generation": 1,
            "parent": None,
            "time": 0.0,
            "step": 0,
            "trained_through": {},
            "metrics": {},
            "schema": self.deployment.schema.digest,
            "encoders": {},
            "files": {},
            "model": reference_to(self.deployment.model),
            "parts": parts_in(weights),
            "base": self.base,
            **changes,
        }
        self.deployment.versions.write(weights, Manifest(**members), Verdict("pass"))  # type: ignore[arg-type]
        with torch.inference_mode():
            output = self.trainer.model.eval()(torch.from_numpy(X))
        self.trainer.model.train()
        return self.deployment.versions.manifest(self.number), output


def answer(version):
    return version.run({"x": X})["probabilities"]


@pytest.mark.parametrize("strategy", ["experts", "progressive"])
def test_versions_with_other_numbers_of_parts_are_served_one_after_the_other(tmp_path, strategy):
    learner = Learner(tmp_path, {"name": strategy, "least": 20, **({"size": 5.0} if strategy == "experts" else {})})
    published = [learner.publish(classes) for classes in ((0, 1), (2, 3))]
    learner.trainer.on_drift()
    published.append(learner.publish((0, 3)))
    assert [manifest.parts for manifest, _ in published] == [1, 2, 3]
    before = None
    for index in (2, 0, 1, 2):  # forward, and back as in a rollback, with the version before still in use
        manifest, output = published[index]
        version = load_version(learner.deployment, manifest, 8)
        assert np.allclose(answer(version), output.softmax(dim=1).numpy(), atol=1e-5)
        if before is not None:
            assert np.allclose(answer(before[0]), before[1], atol=1e-6)
        before = version, answer(version)


def test_versions_that_do_not_fit_the_strategy_are_refused_by_a_sentence(tmp_path):
    learner = Learner(tmp_path, {"name": "experts", "least": 20, "size": 5.0})
    learner.publish((0, 1))
    manifest, _ = learner.publish((2, 3))
    for strategy, sentence in (
        (
            {"name": "experts", "size": 5.0, "most": 1},
            "2 parts, and learner.strategy allows most = 1; raise it to 2",
        ),
        ({"name": "er"}, r"its base '\w+' does not fit \[model\]"),
    ):
        chosen, now = StrategySettings.model_validate(strategy), learner.deployment
        other = Deployment(now.name, now.schema, now.model, now.folder, now.state_dir, CPU, strategy=chosen)
        with pytest.raises(VersionError, match=f"version 2: .*{sentence}"):
            load_version(other, manifest, 8)
    wrong, _ = learner.publish((2, 3), parts=7)
    with pytest.raises(VersionError, match=r"version 3: .*its manifest names 7 parts, and its weights have 2"):
        load_version(learner.deployment, wrong, 8)


def test_a_hostile_router_is_refused(tmp_path):
    """On a GPU an index out of range would take the device from all versions."""
    learner = Learner(tmp_path, {"name": "experts", "least": 20, "size": 5.0})
    learner.publish((0, 1))
    manifest, _ = learner.publish((2, 3))
    weights = learner.deployment.versions.weights(manifest)
    weights[f"{POOL}.router.owner"][0] = 99
    learner.deployment.versions.write(weights, msgspec.structs.replace(manifest, number=9), Verdict("pass"))
    with pytest.raises(VersionError, match="the router of the weights refers to parts or classes that do not exist"):
        load_version(learner.deployment, learner.deployment.versions.manifest(9), 8)
