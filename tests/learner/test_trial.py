"""What the start tries before the first event: what cannot be used is one sentence, and what can be used works."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import ModelError
from anabranch.learner.model.factory import check_rows, forward, make_task, sample
from anabranch.learner.model.trained_set import copy_sharing_base
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.build import build_training_setup
from anabranch.learner.train.trainer import Trainer
from tests.learner.learner_spec import learner_spec

CPU = torch.device("cpu")
names = (f"anabranch_test_trial_{number}" for number in itertools.count())
CLASSES, NUMBER = {"name": "y", "classes": 2}, {"name": "y", "dtype": "float32"}
MODULE = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        {init}
    def forward(self, x):
        {forward}
def build():
    return Own()
"""


def own(forward, init="pass"):
    return MODULE.format(init=init, forward=forward)


def body(of="nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)"):
    return f"def build():\n    return nn.Sequential({of})\n"


@pytest.fixture
def build(tmp_path, monkeypatch):
    """`build(source)` returns what a learner of that factory trains with."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(source, label=None, feature=None, model=None, **learner):
        name = next(names)
        (tmp_path / f"{name}.py").write_text("import torch\nfrom torch import nn\n" + source)
        x = {"dtype": "float32", "shape": [4], **(feature or {})}
        events = SchemaSettings.model_validate({"features": {"x": x}, "label": label or CLASSES})
        settings = ModelSettings.model_validate({"factory": f"{name}:build", **(model or {})})
        options = LearnerSettings.model_validate({"device": "cpu", **learner})
        return build_training_setup(learner_spec(tmp_path, events, settings, learner=options), CPU)

    return make


REFUSED: dict[str, tuple[str, str]] = {
    "one row without a dimension": (
        own("return self.last(self.first(x)[:, :, None, None].squeeze())"),
        r"for 1 events the model returned torch.float32 \[2\].*squeeze\(\) without a dimension removes that",
    ),
    "one row for batch norm": (
        body("nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2)"),
        r"the model fails on a single event, x \[1, 4\] torch.float32: ValueError: Expected more than 1 value",
    ),
    "statistics of the batch": (
        own("return self.last(self.first(x - x.mean(0)))"),
        "an event's output depends on the other events of its batch: alone and among 3 different ones it differs by",
    ),
    "attention over the batch": (
        own(
            "return self.last(self.first(self.a(x[:, None])[:, 0]))", "self.a = nn.TransformerEncoderLayer(4, 1, 8)"
        ),
        r"depends on the other events of its batch: .*batch_first = True",
    ),
    "compiled": (
        "def build():\n    return torch.compile(nn.Linear(4, 2), backend='eager')",
        "what it returns is wrapped by torch.compile",
    ),
    "compiled within": (
        "def build():\n    return nn.Sequential(torch.compile(nn.Linear(4, 2), backend='eager'))",
        "its module 0 is wrapped by torch.compile, .*set learner.compile = true",
    ),
    "a closure": (
        "def build():\n    m = nn.Linear(4, 2)\n    own = m.forward\n    m.forward = lambda x: own(x)\n    return m",
        "a copy of the model computes with weights of the original",
    ),
    "a closure within": (
        "def build():\n    m = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))\n    own = m[0].forward\n"  # noqa: ISC004
        "    m[0].forward = lambda x: own(x)\n    return m",
        "a copy of the model computes with weights of the original",
    ),
    "a lock": (
        "import threading\n" + own("return self.last(self.first(x))", "self.lock = threading.Lock()"),
        r"the model cannot be copied, which gate and serving do: TypeError: cannot pickle '_thread.lock' object",
    ),
    "sparse gradients": (
        own("return self.last(self.first(x)) + self.e(x[:, 0].long())", "self.e = nn.Embedding(1, 2, sparse=True)"),
        'a step fails with learner.strategy = "er" and learner.optimizer = "adamw": NotImplementedError',
    ),
    "a buffer of another shape": (
        own("self.seen = torch.cat([self.seen, self.seen]); return self.last(self.first(x))",
            'self.register_buffer("seen", torch.zeros(1))'),
        "the forward pass changes buffers in a way that cannot be undone, such as to another shape",
    ),
    "an expanded parameter": (
        own("return self.last(self.first(x)) + self.b", "self.b = nn.Parameter(torch.zeros(1).expand(2))"),
        r"the parameter b \[2\] has memory for fewer numbers, as expand makes it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_one_sentence_at_the_start(build, source, sentence):
    with pytest.raises(ModelError, match=sentence) as caught:
        build(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900


def test_a_regression_that_squeezes_is_refused_for_one_row(build):
    source = own("return self.last(self.first(x))[:, :1].squeeze()")
    with pytest.raises(ModelError, match=r"for 1 events the model returned torch.float32 \[\]"):
        build(source, NUMBER, model={"task": "regression"})
    build(source.replace("squeeze()", "squeeze(1)"), NUMBER, model={"task": "regression"})


@pytest.mark.parametrize(
    ("feature", "inputs"),
    [
        ({}, r"x \[3, 4\] torch.float32"),
        ({"scale": "standard", "missing": "indicator"}, r"x \[3, 4\] torch.float32, x_missing \[3, 4\] torch.float32"),
        ({"dtype": "float64", "shape": [], "cycles": ["day", "week"]}, r"x \[3, 4\] torch.float32"),
    ],
)
def test_a_wrong_size_is_reported_with_what_forward_gets(build, feature, inputs):
    with pytest.raises(ModelError, match=f"^model.factory: the model fails on {inputs}: "):
        build("def build():\n    return nn.Linear(3, 2)", feature=feature)


USED: dict[str, str] = {
    "weight_norm": body("torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2)"),
    "spectral_norm": body("torch.nn.utils.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2)"),
    "an expanded buffer": own(
        "return self.last(self.first(x)) + self.b[0]", 'self.register_buffer("b", torch.zeros(1, 2).expand(3, 2))'
    ),
    "an output that is kept": own("self.kept = [self.last(self.first(x))]; return self.kept[0]", "self.kept = []"),
    "random numbers": own("return self.last(nn.functional.dropout(self.first(x), 0.5, True))"),
    "compiled in place": "def build():\n    m = nn.Linear(4, 2)\n    m.compile(backend='eager')\n    return m",
    "parallel": "def build():\n    return nn.DataParallel(nn.Linear(4, 2))",
}


def train(setup, steps=2):
    trainer = Trainer(setup)
    for step in range(steps):
        columns = fake_columns(setup.schema, range(8 * step, 8 * step + 8), label=[0, 1])
        columns["feature.x"][:] = columns["feature.x"].astype(np.float32) / 100
        assert trainer.step(trainer.examples(columns), columns=columns).finite
    return trainer


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("source", USED.values(), ids=USED)
def test_what_can_be_used_is_trained_copied_scored_and_resumed(build, source):
    setup = build(source)
    trainer = train(setup)
    weights = trainer.snapshot()
    copied = copy_sharing_base(trainer.model).eval()
    copied.load_state_dict(weights)
    x = sample(setup.schema, 1, CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = forward(trainer.model.eval(), x)
        torch.manual_seed(0)
        assert torch.allclose(forward(copied, x), expected)
    trainer.restore(trainer.tensors(), trainer.state())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_weight_norm_can_be_copied_after_a_pass(build):
    setup = build(body("torch.nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2)"))
    trainer = train(setup)
    assert not trainer.model[0].weight.is_leaf, "computed by the last pass"  # type: ignore[index]
    copied = copy_sharing_base(trainer.model)
    assert {*copied.state_dict()} == {*trainer.model.state_dict()}
    x = {"x": torch.randn(3, 4)}
    with torch.no_grad():
        before = forward(trainer.model.eval(), x)
        assert torch.equal(forward(copied.eval(), x), before)
        copied[0].weight_g.mul_(3)  # type: ignore[index]
        assert not torch.equal(forward(copied, x), before)
        assert torch.equal(forward(trainer.model, x), before)


FROZEN = """
def build():
    torch.manual_seed(1)
    backbone = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU())
    backbone[1].running_mean.fill_(0.25)
    backbone.requires_grad_(False)
    {what}.eval()
    return nn.Sequential(backbone, nn.BatchNorm1d(16), nn.Linear(16, 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("experts", "progressive")])
@pytest.mark.parametrize("what", ["backbone", "backbone[1]"])
def test_modules_that_the_factory_gave_in_evaluation_mode_stay_so(build, name, what):
    setup = build(FROZEN.format(what=what), strategy=name, model={"embedding": "1"})
    trainer = train(setup, 4)
    with torch.no_grad():
        forward(trainer.model.eval(), sample(setup.schema, 3, CPU))
    trainer.model.train()
    model: Any = copy_sharing_base(trainer.model).train()
    for each in (trainer.model, model):
        assert not each.get_submodule("0.1").training
        assert each.get_submodule("0.2").training == (what != "backbone")
        assert each.get_submodule("1").training
    assert model[0][1].running_mean.tolist() == [0.25] * 16
    assert model[0][1].running_var.tolist() == [1.0] * 16
    assert model[0][1].num_batches_tracked.item() == 0
    if STRATEGIES[name].kind.learns_gradient:
        assert model[1].num_batches_tracked.item() > 0


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained_as_a_whole(build):
    setup = build(body("nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)").rstrip() + ".eval()\n")
    trainer = train(setup)
    assert all(module.training for module in trainer.model.modules())
    assert trainer.model[1].num_batches_tracked.item() == 2  # type: ignore[index]


def test_the_trial_changes_neither_the_model_nor_random_numbers(build, monkeypatch):
    source = body("nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)")
    tried = build(source)
    after = torch.rand(3)
    monkeypatch.setattr("anabranch.learner.train.build.try_steps", lambda *_given: None)
    monkeypatch.setattr("anabranch.learner.train.build.check_copies", lambda *_given: None)
    plain = build(source)
    assert torch.equal(torch.rand(3), after)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(tried.model.state_dict()[name], value), name
    assert all(weight.grad is None for weight in tried.model.parameters())
    assert tried.model.training == plain.model.training


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_adapter_that_a_strategy_would_never_train_is_refused(build, strategy):
    pytest.importorskip("peft")
    source = body("nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2)")
    adapter = {"targets": ["0"], "train": ["2", "4"], "rank": 2}
    options = {"size": 20.0} if strategy == "experts" else {}
    arguments: dict[str, Any] = {"strategy": {"name": strategy, **options}}
    model = {"embedding": "3", "adapter": adapter}
    if strategy in ("experts", "slda", "ncm"):
        sentence = rf'learner.strategy = "{strategy}" trains nothing of what model.adapter.targets names'
        with pytest.raises(ModelError, match=sentence):
            build(source, model=model, **arguments)
    elif strategy == "progressive":
        with pytest.raises(ModelError, match=r"connects columns of an nn\.Sequential"):
            build(source, model=model, **arguments)
    else:
        setup = build(source, model=model, **arguments)
        before = {name: value.detach().clone() for name, value in setup.model.named_parameters()}
        trainer = train(setup)
        moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
        assert any("lora" in name for name in moved)
        assert any(name.startswith("2.") for name in moved)


def test_rows_are_compared_on_integers_and_texts_too():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 2)

        def forward(self, word, count):
            x = self.table(word) * count[:, None].float()
            output: Tensor = self.out(x / x.norm())
            return output

    features = {"word": {"dtype": "string", "encode": {"hash": 8}}, "count": {"dtype": "int64", "min": 1}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": CLASSES}))
    with pytest.raises(ModelError, match="depends on the other events of its batch"):
        check_rows(Mixed().eval(), make_task("classification"), schema, CPU)
