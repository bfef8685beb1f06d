"""The teacher that `[model.teacher]` names: a module, a version, and one sentence where there is none."""

import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import ModelError, TeacherError, VersionError
from anabranch.learner.evaluate.chunks import Chunks
from anabranch.learner.extensions.teacher.opening import ModuleTeacher, open_teacher
from anabranch.learner.model.factory import build_on_device, check_distil
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import trained_state, write_base
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.versions.format import RegistryState, Verdict, Versions, reference_to
from tests.support.manifests import manifest_of

CPU = torch.device("cpu")
MODULE = "anabranch_teacher_test_models"
MODELS = """
    import torch
    from torch import nn

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
        def forward(self, x, word):
            return self.linear(x) + word[:, None]

    class OfX(nn.Module):
        def __init__(self, width=3):
            super().__init__()
            self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(3, width)
        def forward(self, x):
            return self.linear(self.dropout(x))

    class Frozen(OfX):
        def __init__(self):
            super().__init__()
            self.start = nn.Linear(3, 3).requires_grad_(False)
        def forward(self, x):
            return super().forward(self.start(x))

    class Of32(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
        def forward(self, x):
            if (x < 0).any():
                raise ValueError("negative")
            return self.linear(x)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / f"{MODULE}.py").write_text(textwrap.dedent(MODELS))
    yield tmp_path
    sys.modules.pop(MODULE, None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


@pytest.fixture
def schema():
    features = {"x": {"dtype": "float32", "shape": [3]}, "word": {"dtype": "string", "encode": {"vocab": ["a", "b"]}}}
    return Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))


def opened(folder, schema, teacher, state="var"):
    model = ModelSettings.model_validate({"factory": f"{MODULE}:Both", "teacher": teacher})
    assert model.teacher is not None
    return open_teacher(
        *(model.teacher, model, schema, Classification(), (3,), CPU, 32), folder=folder, state_dir=folder / state
    )


def columns(rows):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return {"offset": np.arange(rows), "feature.x": x, "feature.word": np.ones(rows, np.int64)}


def publish(path, number, name="Both", encoders=None, adapter=None):
    torch.manual_seed(number)
    settings = ModelSettings.model_validate({"factory": f"{MODULE}:{name}", "adapter": adapter})
    module = build_on_device(settings, path, CPU)
    words = {"word": {"vocab": ["a", "b"]}} if encoders is None else dict(encoders)
    manifest = manifest_of(
        number,
        step=1,
        schema="s",
        encoders=words,
        base=write_base(bases_in(path), module),
        model=reference_to(settings),
    )
    Versions(path / "versions").write(trained_state(module), manifest, Verdict("pass"))
    return module


def test_a_factory_is_a_module_in_evaluation_mode_that_does_not_change_the_random_numbers(folder, schema):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    teacher = opened(folder, schema, {"factory": f"{MODULE}:OfX", "features": ["x"]})
    assert torch.equal(torch.get_rng_state(), before), "a teacher does not change the student's weights"
    assert isinstance(teacher, ModuleTeacher)
    module, given = teacher._module, columns(1500)
    assert not any(weight.requires_grad for weight in module.parameters())
    linear: nn.Linear = module.linear  # type: ignore[assignment]
    expected = linear(torch.from_numpy(given["feature.x"])).detach().numpy()
    assert np.allclose(teacher.answer(given), expected, atol=1e-6), "without dropout"


def test_a_teacher_of_half_precision_is_close_and_finite(folder, schema):
    settings = {"factory": f"{MODULE}:OfX", "features": ["x"]}
    torch.manual_seed(0)
    full = opened(folder, schema, settings)
    torch.manual_seed(0)
    half = opened(folder, schema, {**settings, "precision": "bf16"})
    outputs = [each.answer(columns(50)) for each in (full, half)]
    assert not np.array_equal(*outputs)
    assert np.allclose(*outputs, atol=0.05)


def test_events_on_which_the_teacher_raises_have_no_output(folder, schema):
    teacher = opened(folder, schema, {"factory": f"{MODULE}:Of32", "features": ["x"]})
    given = columns(4)
    given["feature.x"] = np.array([[1, 1, 1], [-1, 1, 1], [2, 2, 2], [1, -1, 1]], np.float32)
    assert np.isnan(teacher.answer(given)).any(axis=1).tolist() == [False, True, False, True]
    given["feature.x"][:] = -1
    with pytest.raises(TeacherError, match="raises, or returns numbers that are not finite, for 4 events"):
        teacher.answer(given)


def test_without_memory_for_one_event_it_fails_as_a_server_does(folder, schema):
    class Hungry(nn.Module):
        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    teacher = ModuleTeacher("the teacher", Hungry(), ["x"], (3,), Chunks(CPU))
    with pytest.raises(TeacherError, match="the teacher has too little memory on cpu"):
        teacher.answer(columns(1))


def test_it_yields_to_requests_before_each_chunk(folder, schema):
    yields: list[int] = []
    teacher = ModuleTeacher("t", nn.Linear(3, 3), ["x"], (3,), Chunks(CPU, before_chunk=lambda: yields.append(1)))
    teacher.answer(columns(2500))
    assert len(yields) == 3


@pytest.mark.parametrize(
    ("teacher", "sentence"),
    [
        (
            {"factory": f"{MODULE}:Missing"},
            f'model.teacher.factory = "{MODULE}:Missing": .* has no function or class Missing',
        ),
        (
            {"factory": f"{MODULE}:OfX", "args": {"width": -1}, "features": ["x"]},
            r"fails with model.teacher.args = \{'width': -1\}",
        ),
        ({"factory": f"{MODULE}:OfX"}, r"model.teacher: .* fails on x .*, word .*; model.teacher.features names what"),
        (
            {"factory": f"{MODULE}:OfX", "args": {"width": 5}, "features": ["x"]},
            r"for 3 events the model returned .* \[3, 5\], but task \"classification\" needs floats of shape \[3, 3\]",
        ),
    ],
)
def test_a_module_that_does_not_fit_is_refused_at_start(folder, schema, teacher, sentence):
    with pytest.raises(ModelError, match=sentence):
        opened(folder, schema, teacher)


def test_a_precision_that_the_device_lacks_is_refused(folder, schema):
    with pytest.raises(SettingsError, match=r'model\.teacher\.precision = "fp16" needs a CUDA device'):
        opened(folder, schema, {"factory": f"{MODULE}:OfX", "features": ["x"], "precision": "fp16"})


class TestVersions:
    @pytest.fixture(autouse=True)
    def imported(self, folder, schema):
        opened(folder, schema, {"factory": f"{MODULE}:Both"})

    def test_the_version_that_is_served_is_taken_or_the_one_of_the_number(self, folder, schema):
        modules = {number: publish(folder / "var", number) for number in (1, 2, 3)}
        Versions(folder / "var" / "versions").write_state(RegistryState(serving=2))
        given = columns(5)
        for settings, number in (({}, 2), ({"number": 3}, 3)):
            teacher = opened(folder, schema, {"version": settings})
            with torch.no_grad():
                features = torch.from_numpy(given["feature.x"]), torch.from_numpy(given["feature.word"])
                expected = modules[number](*features).numpy()
            assert np.allclose(teacher.answer(given), expected)
            assert f"version {number} of" in teacher.name

    def test_another_pipeline_has_its_own_factory(self, folder, schema):
        publish(folder / "other" / "var", 7, "Of32", encoders={})
        version = {"state_dir": "other/var", "number": 7, "factory": f"{MODULE}:Of32"}
        teacher = opened(folder, schema, {"version": version, "features": ["x"]})
        given = columns(1)
        given["feature.x"] = np.abs(given["feature.x"])
        assert teacher.answer(given).shape == (1, 3)
        with pytest.raises(
            VersionError, match=r"set factory, args and adapter of model\.teacher\.version to those of its pipeline"
        ):
            opened(folder, schema, {"version": {"state_dir": "other/var", "number": 7}})

    def test_a_version_has_its_own_frozen_weights(self, folder, schema):
        module = publish(folder / "other" / "var", 7, "Frozen", encoders={})
        version = {"state_dir": "other/var", "number": 7, "factory": f"{MODULE}:Frozen"}
        teacher = opened(folder, schema, {"version": version, "features": ["x"]})
        given = columns(4)
        with torch.no_grad():
            expected = module.eval()(torch.from_numpy(given["feature.x"])).numpy()
        assert np.allclose(teacher.answer(given), expected, atol=1e-6)
        (base,) = (folder / "other" / "var" / "bases").iterdir()
        (base / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(VersionError, match="its base"):
            opened(folder, schema, {"version": version, "features": ["x"]})

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_a_version_with_adapters_teaches_with_them(self, folder, schema, precision):
        adapter = {"rank": 2, "train": ["linear"], "targets": ["start"], "base_precision": precision}
        module = publish(folder / "other" / "var", 7, "Frozen", encoders={}, adapter=adapter)
        version = {"state_dir": "other/var", "number": 7, "factory": f"{MODULE}:Frozen", "adapter": adapter}
        teacher = opened(folder, schema, {"version": version, "features": ["x"]})
        given = columns(4)
        with torch.no_grad():
            expected = module.eval()(torch.from_numpy(given["feature.x"])).numpy()
        assert np.allclose(teacher.answer(given), expected, atol=1e-6)
        for wrong, sentence in (
            ({**version, "adapter": {**adapter, "alpha": 3}}, r"other model\.adapter \(alpha\)"),
            ({**version, "adapter": None}, r"with \[model\.adapter\], .* set factory, args and adapter of"),
        ):
            with pytest.raises(VersionError, match=sentence):
                opened(folder, schema, {"version": wrong, "features": ["x"]})

    def test_what_is_not_there_or_encoded_otherwise_is_refused(self, folder, schema):
        with pytest.raises(VersionError, match=r"is served yet; name one with model\.teacher\.version\.number"):
            opened(folder, schema, {"version": {}})
        with pytest.raises(VersionError, match="version 9"):
            opened(folder, schema, {"version": {"number": 9}})
        publish(folder / "var", 1, encoders={"word": {"vocab": ["b", "a"]}})
        with pytest.raises(VersionError, match=r"has another encoder of word than schema.features.word.encode"):
            opened(folder, schema, {"version": {"number": 1}})

    def test_a_tokenizer_counts_by_its_contents(self, folder, schema, monkeypatch):
        monkeypatch.setattr(Schema, "encoders", {"word": {"tokenizer": "a" * 64, "length": 8}})
        publish(folder / "var", 1, encoders={"word": {"tokenizer": "a" * 64, "length": 8}})
        publish(folder / "var", 2, encoders={"word": {"tokenizer": "b" * 64, "length": 8}})
        assert "version 1 of" in opened(folder, schema, {"version": {"number": 1}}).name
        with pytest.raises(VersionError, match=r"has another encoder of word"):
            opened(folder, schema, {"version": {"number": 2}})

    def test_a_flipped_bit_is_refused(self, folder, schema):
        publish(folder / "var", 1)
        path = folder / "var" / "versions" / "1" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(VersionError, match="does not have its digest"):
            opened(folder, schema, {"version": {"number": 1}})


class TestCustomTasks:
    class Plain(Classification):
        distil = None  # type: ignore[assignment]

    class Wrong(Classification):
        def distil(self, output_B, teacher_B, temperature):
            return (output_B - teacher_B).square().mean()

    class Raising(Classification):
        def distil(self, output_B, teacher_B, temperature):
            raise KeyError("no")

    @pytest.mark.parametrize(
        ("task", "sentence"),
        [
            (Wrong(), r"Wrong.distil returned torch.float32 \[\] for 3 events; return one number an event"),
            (Raising(), "Raising.distil fails on outputs of zeros: KeyError: 'no'"),
        ],
    )
    def test_a_method_that_does_not_fit_is_refused(self, task, sentence):
        with pytest.raises(ModelError, match=sentence):
            check_distil(task, "my:Task", (3,), CPU)

    def test_a_task_without_the_method_is_refused(self):
        class Bare:
            check = loss = score = predict = None

        with pytest.raises(
            ModelError, match=r'model.task = "my:Bare": Bare has no method distil\(output_B, teacher_B, te'
        ):
            check_distil(Bare(), "my:Bare", (3,), CPU)  # type: ignore[arg-type]
