"""`anabranch versions export --format`: others load it and answer the same; what they could not is refused first."""

import importlib.util
import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from google.protobuf import text_format
from torch import nn

from anabranch.commands.init.command import write_example, write_history
from anabranch.commands.init.subject import SubjectOptions, write_subject
from anabranch.commands.versions.export import program
from anabranch.commands.versions.export.command import export_version
from anabranch.commands.versions.export.program import export_program
from anabranch.commands.versions.export.weights import export_weights
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.calibration import calibrated
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import build_on_device, make_task
from anabranch.learner.model.features.intercept import Residual
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.model.growing.pool import parts_in
from anabranch.learner.model.trained_set import trained_state, write_base
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.versions.format import Verdict, Versions, reference_to
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import load_version
from tests.support.manifests import manifest_of

CPU = torch.device("cpu")

PIPELINE = """
name = "numbers"
[stream]
bootstrap_servers = "localhost:9092"
topics = ["numbers"]
[schema.features.x]
dtype = "float32"
shape = [4]
[schema.label]
name = "y"
classes = 3
[model]
factory = "program_model:build"
"""
PLAIN = "self.linear(x)"
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return {}

def build():
    return Net()

def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
"""
LEARNED = """
[schema.features.amount]
dtype = "float32"
scale = "quantile"
missing = "indicator"
[schema.features.who]
dtype = "int64"
encode = {learn = 6, min_count = 1}
max = 9
[schema.features.when]
dtype = "int64"
cycles = ["day"]
[schema.features.group]
dtype = "int64"
encode = {learn = 6, min_count = 1}
intercept = true
[schema.cross.both]
of = ["who", "when"]
encode = {hash = 8}
"""
LEARNED_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.who, self.both, self.linear = nn.Embedding(6, 2), nn.Embedding(8, 2), nn.Linear(12, 3)

    def forward(self, x, amount, amount_missing, who, when, both):
        numbers = torch.stack([amount, amount_missing], dim=1)
        return self.linear(torch.cat([x, numbers, self.who(who), when, self.both(both)], dim=1))

def build():
    torch.manual_seed(0)
    return Net()
"""
EXPERTS = """embedding = "1"
[learner]
strategy = {name = "experts", size = 0.9}
"""


ISOTONIC = Calibration("isotonic", 500, scale=0.7, odds=[-1.0, 0.1, 0.2, 1.0], calibrated=[-4, -1, 0.5, 2])


@pytest.fixture
def published(tmp_path, monkeypatch):
    """`published(output)`: a pipeline with a version of a model that computes `output` of `x`."""
    monkeypatch.setattr(sys, "path", sys.path[:])

    def publish(output=PLAIN, pipeline=PIPELINE, source=None):
        (tmp_path / "program_model.py").write_text(MODEL.format(output) if source is None else source)
        (tmp_path / "pipeline.toml").write_text(pipeline)
        config = load_config(tmp_path / "pipeline.toml", {})
        write_version(config)
        return config

    for name in ("program_model", "my_model"):
        sys.modules.pop(name, None)
    yield publish
    for name in ("program_model", "my_model"):
        sys.modules.pop(name, None)


def write_version(config, rule=None, change=lambda module: None):
    """Write version 1 of a pipeline, with its first weights; where features are learned, of 40 random events."""
    model, schema = config.pipeline.model, Schema(config.pipeline.events)
    module = build_on_device(model, config.folder, CPU, schema)
    if (learned := features_of(module)) is not None:
        random = np.random.default_rng(0)
        columns = {f"feature.{each.name}": each.example(40) for each in schema.features}
        columns["feature.amount"] = random.lognormal(0, 1, 40).astype(np.float32)
        columns["feature.who"] = random.integers(0, 8, 40)
        columns["feature.group"] = random.integers(0, 8, 40)
        columns |= {"time_ms": np.zeros(40, np.int64), "weight": np.ones(40, np.float32)}
        learned.observe(columns, Residual(torch.randn(40, 3), torch.ones(40, 3)))
    strategy = build_strategy(config.pipeline.learner.strategy, model, make_task(model.task))
    module = strategy.convert(module, ModelContext(CPU, schema, model.embedding))
    change(module)
    weights = trained_state(module)
    manifest = manifest_of(
        1,
        time=1.7e9,
        schema=schema.digest,
        model=reference_to(model),
        parts=parts_in(weights),
        base=write_base(bases_in(config.state_dir), module),
        rule=rule,
        metrics={"now": 0.75},
        constant={"now": 0.5},
        through={"numbers:0": 41},
    )
    Versions(config.state_dir / "versions").write(weights, manifest, Verdict("pass"))


def refused(config, folder, form="program"):
    with pytest.raises(SettingsError) as refusal:
        export_program(config, "latest", folder, form)
    assert not list(folder.parent.glob("*program*"))
    return str(refusal.value)


@pytest.mark.slow
def test_a_program_takes_any_number_of_rows(published, tmp_path):
    exported = export_program(published(), "latest", tmp_path / "a" / "program", "program")
    assert exported.rows == 74
    assert exported.difference <= 1e-5
    assert sorted(path.name for path in (tmp_path / "a" / "program").iterdir()) == [
        "README.md",
        "manifest.json",
        "model.pt2",
    ]
    module = torch.export.load(tmp_path / "a" / "program" / "model.pt2").module()
    for rows in (1, 5):
        assert module(torch.zeros(rows, 4))["probabilities"].shape == (rows, 3)
    assert not isinstance(module, nn.Linear)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["program", "onnx"])
def test_a_program_has_what_was_learned_of_features(published, tmp_path, form):
    pytest.importorskip("onnxscript" if form == "onnx" else "torch")
    config = published(pipeline=PIPELINE.replace("[schema.label]", f"{LEARNED}[schema.label]"), source=LEARNED_MODEL)
    exported = export_program(config, "latest", tmp_path / "program", form)
    assert exported.rows == 74
    assert exported.difference < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("form", ["program", "onnx"])
@pytest.mark.parametrize("kind", ["example", "history", "history of a regression", "subject"])
def test_what_init_writes_can_be_exported(tmp_path, registry, kind, form):
    pytest.importorskip("onnxscript" if form == "onnx" else "torch")
    folder = tmp_path / "pipeline"
    if kind == "example":
        write_example(folder)
    elif kind == "subject":
        fields = [("amount", "double"), ("merchant", "string"), ("fraud", "int")]
        text = {"type": "record", "name": "P", "fields": [{"name": name, "type": type_} for name, type_ in fields]}
        registry.register("payments-value", json.dumps(text), "AVRO")
        write_subject(folder, SubjectOptions("payments-value", registry.url, "fraud", "2"), {}, force=True)
    else:
        columns: dict[str, Any] = {"amount": [0.5] * 6, "pixels": np.ones((6, 3)).tolist(), "country": ["CH"] * 6}
        columns |= {"fraud": [0, 1] * 3, "price": [0.5, 1.5] * 3}
        table = pa.table(columns).set_column(1, "pixels", pa.array(columns["pixels"], pa.list_(pa.float32(), 3)))
        pq.write_table(table, tmp_path / "part-0.parquet")
        write_history(folder, f"{tmp_path}/*.parquet", "fraud" if kind == "history" else "price")
    config = load_config(folder / "pipeline.toml", {})
    write_version(config)
    assert export_program(config, "latest", tmp_path / "program", form).rows == 74


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "rule"),
    [
        ("program", AnswerRule(Calibration("platt", 500, scale=0.7, bias=[0.5, -1.0]), odds=-1.2)),
        ("onnx", AnswerRule(ISOTONIC, costs=[[0, 1], [0.3, 0]])),
    ],
)
def test_a_program_has_the_calibration_and_the_decision(published, tmp_path, form, rule):
    pytest.importorskip("onnxscript" if form == "onnx" else "torch")
    two = {"pipeline": PIPELINE.replace("classes = 3", "classes = 2"), "source": MODEL.replace("(4, 3)", "(4, 2)")}
    config = published(**(two | {"source": two["source"].replace("return {}", f"return {PLAIN}")}))
    shutil.rmtree(config.state_dir)
    write_version(config, rule)
    exported = export_program(config, "latest", tmp_path / "program", form)
    assert exported.difference <= 1e-5
    schema = Schema(config.pipeline.events)
    deployment = Deployment("numbers", schema, config.pipeline.model, config.folder, config.state_dir, CPU)
    version = load_version(deployment, deployment.versions.manifest(1), 8)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    with torch.no_grad():
        log_BC = version.module(torch.from_numpy(x)).log_softmax(dim=1).numpy()
    expected = np.exp(calibrated(rule.calibration, log_BC))
    assert np.abs(expected - np.exp(log_BC)).max() > 0.05
    np.testing.assert_allclose(version.run({"x": x})["probabilities"], expected, atol=1e-6)


GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "rollout.md"


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_exported_weights_load_and_answer_as_the_guide_says(published, tmp_path, monkeypatch, learns):
    more = {"pipeline": PIPELINE.replace("[schema.label]", f"{LEARNED}[schema.label]"), "source": LEARNED_MODEL}
    config = published(**(more if learns else {}))
    export_version(config, "latest", tmp_path / "weights")
    text = GUIDE.read_text().partition("## Compare and export versions")[2]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(blocks[learns].replace("my_model", "program_model"), scope)
    pipeline = config.pipeline
    schema = Schema(pipeline.events)
    deployment = Deployment("numbers", schema, pipeline.model, config.folder, config.state_dir, CPU)
    version = load_version(deployment, deployment.versions.manifest(1), 8)
    events = {each.name: each.example(8) for each in schema.features}
    if learns:
        events["amount"] = np.array([0.1, 1, 2, 3, 4, 5, np.nan, 9], np.float32)
    features = {name: torch.from_numpy(array) for name, array in events.items()}
    with torch.no_grad():
        output = scope["model"](**features)
    np.testing.assert_allclose(output.softmax(1).numpy(), version.run(events)["probabilities"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("self.linear(x) if x.sum() > 0 else self.linear(-x)", "torch.export cannot trace the model"),
        ("self.linear(x) + torch.rand_like(x)[:, :3]", "answers otherwise than the version"),
    ],
)
def test_what_a_program_cannot_hold_is_refused(published, tmp_path, output, sentence):
    assert sentence in refused(published(output), tmp_path / "b" / "program")


def test_a_version_of_another_model_is_refused(published, tmp_path):
    config = published()
    path = tmp_path / "pipeline.toml"
    path.write_text(PIPELINE.replace("classes = 3", "classes = 4"))
    assert "another schema" in refused(load_config(path, {}), tmp_path / "b" / "program")
    path.write_text(PIPELINE.replace('"program_model:build"', '"other_model:build"'))
    assert "[model] names other_model:build" in refused(load_config(path, {}), tmp_path / "b" / "program")
    assert config.path == path


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ('[model.adapter]\nbase_precision = "nf4"\n', "cannot hold weights of 4 bits"),
        ('[storage]\nurl = "memory://models"\nmode = "only"\n', "reads state_dir, which has no versions"),
    ],
)
def test_what_is_not_there_or_has_other_numbers_is_refused_first(published, tmp_path, more, sentence):
    published()
    (tmp_path / "pipeline.toml").write_text(PIPELINE + more)
    assert sentence in refused(load_config(tmp_path / "pipeline.toml", {}), tmp_path / "b" / "program")


def test_a_version_with_experts_is_refused(published, tmp_path):
    config = published(pipeline=PIPELINE.replace(":build", ":layers") + EXPERTS)
    assert "chooses one of 1 parts for each event in Python" in refused(config, tmp_path / "b" / "program")


def test_onnx_without_its_extra_is_one_sentence(published, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "find_spec", lambda name: None if name == "onnxruntime" else object())
    assert refused(published(), tmp_path / "b" / "program", "onnx") == (
        '--format onnx needs onnxruntime: pip install "anabranch[onnx]"; --format program needs no extra'
    )


SIZED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.body(x))

def build(width):
    torch.manual_seed(0)
    return Net(width)
"""
SIZED_PIPELINE = f"{PIPELINE}args = {{width = 5}}\n"
ADAPTED_PIPELINE = f'{SIZED_PIPELINE}[model.adapter]\nrank = 2\nalpha = 3.0\ntargets = ["body.0"]\ntrain = ["head"]\n'


def sized(published, pipeline):
    """Publish a version of the sized model, whose weights and buffers are all random."""
    config = published(pipeline=pipeline, source=SIZED)
    shutil.rmtree(config.state_dir)

    def change(module):
        generator = torch.Generator().manual_seed(0)
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and (".lora_" in name or "head" in name or "running_mean" in name):
                tensor += torch.randn(tensor.shape, generator=generator)

    write_version(config, change=change)
    return config


def version_of(config):
    schema = Schema(config.pipeline.events)
    deployment = Deployment("numbers", schema, config.pipeline.model, config.folder, config.state_dir, CPU)
    return load_version(deployment, deployment.versions.manifest(1), 8)


def events_of(version, rows):
    """Return features of some rows, which differ."""
    generator = np.random.default_rng(1)
    events = version.zeros(rows)
    return {
        name: array + generator.random(array.shape).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in events.items()
    }


@pytest.mark.slow
def test_the_mixin_of_the_hub_loads_what_hf_has(published, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    config = sized(published, SIZED_PIPELINE)
    folder = tmp_path / "out"
    assert export_weights(config, "latest", folder, "hf").difference <= 1e-5
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["anabranch"]["version"] == 1

    class OfHub(sys.modules["program_model"].Net, hub.PyTorchModelHubMixin):
        pass

    version = version_of(config)
    x = events_of(version, 5)
    with torch.no_grad():
        found = OfHub.from_pretrained(str(folder)).eval()(torch.from_numpy(x["x"])).softmax(1)
    np.testing.assert_allclose(found.numpy(), version.run(x)["probabilities"], rtol=1e-5)


@pytest.mark.slow
def test_peft_loads_the_adapter_and_what_else_trains(published, tmp_path):
    peft = pytest.importorskip("peft")
    config = sized(published, ADAPTED_PIPELINE)
    assert export_weights(config, "latest", tmp_path / "out", "peft").difference <= 1e-5
    version = version_of(config)
    x = events_of(version, 5)
    with warnings.catch_warnings(action="ignore"):
        module = peft.PeftModel.from_pretrained(sys.modules["program_model"].build(5), str(tmp_path / "out")).eval()
    with torch.no_grad():
        found = module(torch.from_numpy(x["x"])).softmax(1).numpy()
    np.testing.assert_allclose(found, version.run(x)["probabilities"], rtol=1e-5)


def test_an_adapter_of_a_model_that_begins_at_random_is_refused(published, tmp_path):
    pytest.importorskip("peft")
    config = sized(published, ADAPTED_PIPELINE)
    module = sys.modules["program_model"]
    module.build = lambda width: module.Net(width)
    with pytest.raises(SettingsError, match="answers otherwise than the version"):
        export_weights(config, "latest", tmp_path / "out", "peft")
    assert not (tmp_path / "out").exists()


def two_classes(published, rule):
    source = MODEL.replace("(4, 3)", "(4, 2)").replace("return {}", f"return {PLAIN}")
    config = published(pipeline=PIPELINE.replace("classes = 3", "classes = 2"), source=source)
    shutil.rmtree(config.state_dir)
    write_version(config, rule)
    return config


def learning(published):
    return published(pipeline=PIPELINE.replace("[schema.label]", f"{LEARNED}[schema.label]"), source=LEARNED_MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["learned features", "calibration"])
def test_mlflow_loads_a_version_with_all_that_it_answers_from(published, tmp_path, kind):
    pandas = pytest.importorskip("pandas")
    pyfunc = pytest.importorskip("mlflow.pyfunc")
    learns = kind == "learned features"
    config = learning(published) if learns else two_classes(published, AnswerRule(ISOTONIC))
    folder = tmp_path / "out"
    assert export_program(config, "latest", folder, "mlflow").difference <= 1e-5
    version = version_of(config)
    events = events_of(version, 5)
    expected = version.run(events)
    try:
        model = pyfunc.load_model(str(folder))
        frame = pandas.DataFrame({name: list(array) for name, array in events.items()})
        for rows in (events, frame):
            found = model.predict(rows)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5)
    finally:
        sys.modules.pop("anabranch_program", None)
    assert {each.name for each in model.metadata.get_input_schema().inputs} == events.keys()


class Backend(ModuleType):
    """The module that Triton gives to models in Python."""

    class Tensor(SimpleNamespace):
        def __init__(self, name, array):
            super().__init__(name=name, as_numpy=lambda: array)

    @staticmethod
    def get_input_tensor_by_name(request, name):
        return Backend.Tensor(name, request[name])

    @staticmethod
    def InferenceResponse(output_tensors):
        return {each.name: each.as_numpy() for each in output_tensors}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "python"])
def test_triton_has_a_repository_whose_configuration_fits_what_runs(published, tmp_path, monkeypatch, backend):
    configs = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    if backend == "python":
        monkeypatch.setattr(program, "find_spec", lambda _: None)
    else:
        pytest.importorskip("onnxscript")
    config = learning(published)
    exported = export_program(config, "latest", tmp_path / "out", "triton")
    assert exported.file == f"numbers/1/model.{'onnx' if backend == 'onnxruntime' else 'pt2'}"
    text = (tmp_path / "out/numbers/config.pbtxt").read_text()
    described = text_format.Parse(text, configs.ModelConfig())
    assert (described.name, described.backend, described.max_batch_size) == ("numbers", backend, 1024)
    version = version_of(config)
    events = events_of(version, 5)
    expected = version.run(events)
    for each, arrays in ((described.input, events), (described.output, expected)):
        assert [tensor.name for tensor in each] == [*arrays]
        for tensor in each:
            array = arrays[tensor.name]
            shape = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
            assert (tuple(shape), [*tensor.dims]) == (array.shape[1:], [*(array.shape[1:] or (1,))])
            assert configs.DataType.Name(tensor.data_type) == TYPES[array.dtype.name]
    if backend == "python":
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", Backend("backend"))
        spec = importlib.util.spec_from_file_location("triton_model", tmp_path / "out/numbers/1/model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        names = {key: [{"name": tensor.name} for tensor in getattr(described, key)] for key in ("input", "output")}
        model.initialize({"model_config": json.dumps(names)})
        (found,) = model.execute([events])
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "out" / exported.file)
        found = dict(zip(expected, session.run([*expected], events), strict=True))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}


@pytest.mark.parametrize(
    ("form", "kind", "sentence"),
    [
        ("hf", "learned", "[schema] learns features, which others do not have; take --format mlflow"),
        ("hf", "rule", "[task] changes what the model answers; take --format mlflow"),
        ("hf", "adapter", "its weights are those of [model.adapter]; take --format peft"),
        ("peft", "plain", "it has no [model.adapter]; take --format hf"),
    ],
)
def test_what_weights_alone_do_not_answer_is_refused(published, tmp_path, form, kind, sentence):
    if kind == "adapter":
        pytest.importorskip("peft")
    config = {
        "learned": lambda: learning(published),
        "rule": lambda: two_classes(published, AnswerRule(ISOTONIC)),
        "adapter": lambda: sized(published, ADAPTED_PIPELINE),
        "plain": published,
    }[kind]()
    with pytest.raises(SettingsError, match=re.escape(f"version 1 cannot be exported as {form}: {sentence}")):
        export_weights(config, "latest", tmp_path / "out", form)
    assert not (tmp_path / "out").exists()


def test_a_model_card_has_what_is_known_and_leaves_the_intended_use_to_a_person(published, tmp_path):
    export_weights(published(), "latest", tmp_path / "out", "hf")
    card = (tmp_path / "out/README.md").read_text()
    for line in (
        "# numbers, version 1",
        "| `x` | float32 | [4] |",
        "| now | 0.75 | 0.5 |",
        "- `numbers:0`: 41",
        "*To be written by a person: for what and for whom the model is, and for what it is not.*",
    ):
        assert line in card.splitlines()
    assert "verdict: pass" in card
