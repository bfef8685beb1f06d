"""A pipeline with versions, for the tests of what is asked of one from Python."""

import sys

import numpy as np
import pytest
import torch

from anabranch.config.loader import load_config
from anabranch.ingest.events.schema import Schema
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.learner.model.factory import build_on_device
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.model.trained_set import trained_state
from anabranch.learner.versions.format import RegistryState, Verdict, Versions, reference_to
from tests.support.manifests import manifest_of

PIPELINE = """
name = "orders"
[stream]
bootstrap_servers = "{bootstrap}"
topics = ["orders"]
[schema.features.amount]
dtype = "float32"
scale = "standard"
missing = "mean"
[schema.features.shop]
dtype = "string"
encode = {{vocab = ["a", "b"]}}
default = "b"
[schema.features.at]
dtype = "float64"
cycles = ["day"]
[schema.features.x]
dtype = "float32"
shape = [2]
[schema.label]
name = "kind"
classes = ["sale", "return"]
[model]
factory = "orders_model:build"
[learner]
batch_size = 16
device = "cpu"
status = "127.0.0.1:{status}"
[serving]
port = {port}
tokens = {{read = "lesen", admin = "verwalten"}}
"""
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shop, self.linear = nn.Embedding(3, 2), nn.Linear(7, 2)

    def forward(self, amount, shop, at, x):
        return self.linear(torch.cat([amount.unsqueeze(-1), self.shop(shop), at, x], dim=1))


def build():
    torch.manual_seed(0)
    return Net()
"""
RULE = AnswerRule(Calibration("platt", 500, scale=0.7, bias=[0.5, -1.0]), odds=-0.2)


def orders(count, seed=0):
    """Return events of the pipeline, without missing values."""
    random = np.random.default_rng(seed)
    shop = random.choice(["a", "b", "c"], count)
    return {
        "amount": random.lognormal(3, 1, count).astype(np.float32),
        "shop": shop,
        "at": 1.7e9 + 600.0 * np.arange(count),
        "x": random.normal(size=(count, 2)).astype(np.float32),
        "kind": np.where(shop == "b", "return", "sale"),
    }


def publish(config, number, seed=0, rule=RULE, verdict="pass"):
    """Write a version with random weights, which has learned the scale of `amount`."""
    model, schema = config.pipeline.model, Schema(config.pipeline.events)
    module = build_on_device(model, config.folder, torch.device("cpu"), schema)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight))
    columns = {f"feature.{each.name}": each.example(40) for each in schema.features}
    columns["feature.amount"] = orders(40)["amount"]
    columns |= {"time_ms": np.zeros(40, np.int64), "weight": np.ones(40, np.float32)}
    features_of(module).observe(columns, None)
    metrics = {"accuracy": number / 10}
    manifest = manifest_of(
        number, time=1.7e9, schema=schema.digest, model=reference_to(model), rule=rule, metrics=metrics
    )
    Versions(config.state_dir / "versions").write(trained_state(module), manifest, Verdict(verdict))


@pytest.fixture
def pipeline(tmp_path, monkeypatch, free_port):
    """A pipeline with versions 1 to 3, of which 2 is served."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    sys.modules.pop("orders_model", None)
    (tmp_path / "orders_model.py").write_text(MODEL)
    text = PIPELINE.format(bootstrap="127.0.0.1:1", status=free_port(), port=free_port())
    (tmp_path / "pipeline.toml").write_text(text)
    config = load_config(tmp_path / "pipeline.toml", {})
    for number in (1, 2, 3):
        publish(config, number, seed=number)
    Versions(config.state_dir / "versions").write_state(RegistryState(serving=2))
    yield config
    sys.modules.pop("orders_model", None)
