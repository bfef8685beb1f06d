"""A version that Python loads answers as serving does, whether it comes from a state directory or an object store."""

import shutil

import numpy as np
import pytest
import torch

import anabranch
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import VersionError
from anabranch.learner.object_storage.fleet import FleetRollout, RolloutFile
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import load_version
from tests.anabranch.api.conftest import orders
from tests.support.object_versions import VersionUploader

pytestmark = pytest.mark.slow


def served(config, number, columns):
    """Return what serving answers."""
    schema, cpu = Schema(config.pipeline.events), torch.device("cpu")
    deployment = Deployment("orders", schema, config.pipeline.model, config.folder, config.state_dir, cpu)
    return load_version(deployment, deployment.versions.manifest(number), 8).run(columns)


def columns_of(data):
    ids = np.array([{"a": 1, "b": 2}.get(shop, 0) for shop in data["shop"]])
    return {"amount": data["amount"], "shop": ids, "at": data["at"], "x": data["x"]}


@pytest.mark.parametrize(("version", "number"), [("served", 2), ("newest", 3), (1, 1), ("1", 1)])
def test_a_version_answers_as_serving_does(pipeline, version, number):
    model, data = anabranch.load(pipeline.state_dir, version), orders(50)
    assert (model.version, model.metrics) == (number, {"accuracy": number / 10})
    expected, found = served(pipeline, number, columns_of(data)), model.predict(data)
    np.testing.assert_allclose(found["probabilities"], expected["probabilities"], atol=1e-6)
    assert found["prediction"].tolist() == [["sale", "return"][each] for each in expected["prediction"]]
    features = {name: torch.from_numpy(column) for name, column in columns_of(data).items()}
    for answers in (model(**features), model(*features.values())):
        assert torch.equal(answers["probabilities"], torch.from_numpy(found["probabilities"]))
    output = model.module(**features).softmax(dim=1)
    assert not torch.allclose(output, answers["probabilities"], atol=0.02), "the module is not calibrated"
    with pytest.raises(anabranch.AnabranchError, match="the feature at is missing; the model takes amount, shop, at"):
        model(amount=features["amount"], shop=features["shop"])


def test_a_loaded_version_can_be_trained_on(pipeline):
    first, second = anabranch.load(pipeline.state_dir, 1), anabranch.load(pipeline.state_dir, 1)
    before = second.predict(orders(4))["probabilities"]
    module = first.module.requires_grad_(True)
    features = {name: torch.from_numpy(column) for name, column in columns_of(orders(4)).items()}
    module(**features).sum().backward()
    torch.optim.SGD([each for each in module.parameters() if each.grad is not None], 1.0).step()
    assert np.abs(first.predict(orders(4))["probabilities"] - before).max() > 0.01
    np.testing.assert_array_equal(second.predict(orders(4))["probabilities"], before)


@pytest.fixture
def bucket(pipeline, tmp_path):
    """The URL of an object store that has the versions, which the state directory has not any more."""
    pytest.importorskip("obstore")
    storage = StorageSettings(url=f"file://{tmp_path}/bucket")
    (tmp_path / "bucket").mkdir()
    versions = Versions(pipeline.state_dir / "versions")
    versions.write_verdict(3, Verdict("fail", ["it is worse"]))
    VersionUploader(storage.bucket, versions).upload(1, 2, 3)
    shutil.rmtree(pipeline.state_dir)
    return storage


@pytest.mark.parametrize(("version", "number"), [("served", 2), ("newest", 3), (1, 1)])
def test_a_version_is_loaded_from_an_object_store(bucket, pipeline, monkeypatch, version, number):
    monkeypatch.chdir(pipeline.folder)
    model = anabranch.load(bucket.url, version)
    assert model.version == number
    assert len(model.predict(orders(3))["prediction"]) == 3
    assert not pipeline.state_dir.exists()


def test_what_the_fleet_has_decided_is_what_is_served(bucket, pipeline):
    rollout = RolloutFile(bucket.quick_bucket)
    rollout.replace(FleetRollout(rolled_back=[2]))
    assert anabranch.load(bucket.url, pipeline=pipeline.path).version == 1
    rollout.replace(FleetRollout(pinned=3))
    assert anabranch.load(bucket.url, pipeline=pipeline.path).version == 3
    rollout.replace(FleetRollout(rolled_back=[1, 2]))
    with pytest.raises(anabranch.AnabranchError, match=r"no version in file://.* may be served"):
        anabranch.load(bucket.url, pipeline=pipeline.path)
    with pytest.raises(anabranch.AnabranchError, match=r"has the number 9; there are 1 to 3"):
        anabranch.load(bucket.url, 9, pipeline=pipeline.path)
    with pytest.raises(anabranch.AnabranchError, match="no version has been published yet in file://"):
        anabranch.load(f"{bucket.url}/other", pipeline=pipeline.path)
    (weights,) = pipeline.folder.glob("bucket/versions/3-*/model.safetensors")
    weights.write_bytes(b"other")
    with pytest.raises(VersionError, match="does not have its digest"):
        anabranch.load(bucket.url, 3, pipeline=pipeline.path)


def test_what_cannot_be_loaded_is_one_sentence(pipeline, tmp_path, monkeypatch):
    state = pipeline.state_dir
    with pytest.raises(anabranch.AnabranchError, match=r"there is no version 7 in .*; there are 1 to 3"):
        anabranch.load(state, 7)
    with pytest.raises(anabranch.AnabranchError, match='"best" is no version: write a number'):
        anabranch.load(state, "best")
    with pytest.raises(anabranch.AnabranchError, match="nowhere is no state directory: name one such as var"):
        anabranch.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(anabranch.AnabranchError, match=r"serving has taken no version of .*/empty/versions yet"):
        anabranch.load(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(anabranch.AnabranchError, match=r"other.toml does not exist, and says how the model is built"):
        anabranch.load("var", pipeline="other.toml")
    text = pipeline.path.read_text()
    pipeline.path.write_text(text.replace("shape = [2]", "shape = [3]"))
    with pytest.raises(
        anabranch.AnabranchError, match=r"version 2 cannot be loaded with .*: it was learned under another"
    ):
        anabranch.load("var")
    pipeline.path.write_text(text)
    (state / "versions" / "2" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(VersionError, match="does not have its digest"):
        anabranch.load("var")
