"""The base of a model is read and verified once, and all versions on it share its tensors."""

import copy
import gc
import hashlib
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import VersionError
from anabranch.learner.model.factory import build_model
from anabranch.learner.model.trained_set import base_parameters, trained_state, write_base
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.bases import Bases, bases_in
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.model.pieces import collecting_at_end
from anabranch.serving.rollout.hot_swap import VersionSwapper
from tests.serving.conftest import Publisher
from tests.support.tokenizer import write_tokenizer

ROW = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture
def half_frozen(deploy):
    """Publishes versions of a model whose `body` is frozen."""
    return deploy("half_frozen")


def base_of(publisher, change=bool):
    """Write the base of the publisher's model, changed, and return its SHA-256."""
    model = build_model(publisher.deployment.model.factory, {}, publisher.deployment.folder)
    change(model)
    sha256 = write_base(bases_in(publisher.deployment.state_dir), model)
    assert sha256 is not None
    return sha256


def trained(number):
    return {
        "head.weight": torch.zeros(1, 4),
        "head.bias": torch.zeros(1),
        "number": torch.tensor(float(number)),
    }


def load(publisher, number, base, weights=None):
    publisher.publish(number, trained(number) if weights is None else weights, base=base)
    return load_version(publisher.deployment, publisher.versions.manifest(number), 8)


def shared(version):
    return [value.data_ptr() for value in base_parameters(version._module).values()]


def answer(version):
    return float(version.run(ROW)["prediction"][0])


def test_versions_on_one_base_share_its_tensors_which_are_read_once(half_frozen, monkeypatch):
    base, read = base_of(half_frozen), []
    tensors = Bases.tensors
    monkeypatch.setattr(Bases, "tensors", lambda *args: read.append(1) or tensors(*args))

    versions = [load(half_frozen, number, base) for number in (1, 2, 3)]

    assert [answer(version) for version in versions] == [1, 2, 3]
    assert shared(versions[0]) == shared(versions[1]) == shared(versions[2])
    assert len(read) == 1
    assert base_parameters(half_frozen.deployment.template.module)["body.weight"].is_meta


def test_versions_answer_with_the_weights_of_the_base_that_they_name(half_frozen):
    ones = base_of(half_frozen, lambda model: (nn.init.ones_(model.body.weight), nn.init.zeros_(model.body.bias)))
    twos = base_of(
        half_frozen, lambda model: (nn.init.constant_(model.body.weight, 2), nn.init.zeros_(model.body.bias))
    )
    weights = {**trained(0), "head.weight": torch.ones(1, 4)}

    versions = [load(half_frozen, number, base, weights) for number, base in ((1, ones), (2, twos), (3, ones))]

    assert [answer(version) for version in versions] == [16, 32, 16]
    assert shared(versions[0]) == shared(versions[2]) != shared(versions[1])


def test_the_memory_of_a_base_is_freed_with_its_last_version(half_frozen):
    first, second = (base_of(half_frozen, lambda model, n=n: nn.init.constant_(model.body.bias, n)) for n in (1, 2))
    version = load(half_frozen, 1, first)
    kept = half_frozen.deployment._shared._templates
    del version
    gc.collect()
    assert list(kept) == [first]

    version = load(half_frozen, 2, second)

    gc.collect()
    assert list(kept) == [second]
    assert answer(version) == 2


def test_a_model_that_takes_part_in_loading_shares_the_base_too(deploy):
    publisher = deploy("hooked")
    base = base_of(publisher)

    versions = [load(publisher, number, base) for number in (1, 2)]

    assert not publisher.deployment.template_on(base).loads_plainly
    assert shared(versions[0]) == shared(versions[1])
    assert [answer(version) for version in versions] == [1, 2]


def pickled(path):
    path.write_bytes(pickle.dumps(os.system))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def huge_header(path):
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def saved(path, **tensors):
    safetensors.torch.save_file(tensors, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def other_shapes(path):
    return saved(path, **{"body.weight": torch.zeros(4, 4000), "body.bias": torch.zeros(4)})


def other_names(path):
    return saved(path, **{"body.weight": torch.zeros(4, 4), "head.weight": torch.zeros(1, 4)})


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (pickled, r"version 2: its base '\w{12}' cannot be used: .*is not safetensors: its header has"),
        (huge_header, r"its base '\w{12}' cannot be used: .* its header has 9223372036854775808 bytes"),
        (
            other_shapes,
            r"its base '\w{12}' does not fit \[model\]: the frozen weight body.weight has the shape \[4, 4000\]",
        ),
        (other_names, r"does not fit \[model\]: .* missing body.bias, unexpected head.weight"),
    ],
)
def test_a_hostile_base_is_refused_by_one_sentence_and_the_served_version_stays(half_frozen, tmp_path, write, sentence):
    served = load(half_frozen, 1, base_of(half_frozen))
    sha256 = write(tmp_path / "hostile")
    bases_in(half_frozen.deployment.state_dir).add(sha256, (tmp_path / "hostile").rename)

    with pytest.raises(VersionError, match=sentence) as refused:
        load(half_frozen, 2, sha256)

    assert "\n" not in str(refused.value)
    assert answer(served) == 1


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x", "0" * 63, "0" * 63 + "\n"])
def test_a_base_whose_name_is_no_digest_is_refused(half_frozen, name):
    with pytest.raises(VersionError, match=r"cannot be used: '.*' is not a SHA-256"):
        load(half_frozen, 1, name)


def test_a_base_that_is_a_link_missing_or_damaged_is_refused_and_used_once_it_is_back(half_frozen):
    base = base_of(half_frozen)
    bases = bases_in(half_frozen.deployment.state_dir)
    content, path = bases.file(base).read_bytes(), bases.file(base)

    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(VersionError, match="is not a regular file"):
        load(half_frozen, 1, base)
    path.unlink()
    with pytest.raises(VersionError, match=r"version 2: its base .*model\.safetensors does not exist"):
        load(half_frozen, 2, base)
    path.parent.rename(bases.path / "elsewhere")
    path.parent.symlink_to(bases.path / "elsewhere")
    with pytest.raises(VersionError, match="is a link, not a folder"):
        load(half_frozen, 3, base)
    path.parent.unlink()
    bases.write(base, [content])
    path.write_bytes(content[:-1])
    with pytest.raises(VersionError, match="does not have its digest"):
        load(half_frozen, 4, base)
    bases.write(base, [content])
    assert answer(load(half_frozen, 5, base)) == 5


def test_a_version_that_was_refused_for_its_base_is_served_once_the_base_is_there(half_frozen):
    base = base_of(half_frozen)
    bases = bases_in(half_frozen.deployment.state_dir)
    content = bases.file(base).read_bytes()
    bases.prune([])
    swap = VersionSwapper(half_frozen.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: None, pytest.fail)
    half_frozen.publish(1, trained(1), base=base)
    assert not swap.poll()
    assert any("does not exist" in problem for problem in swap.problems)

    bases.write(base, [content])

    assert swap.poll()
    assert swap.current is not None
    assert answer(swap.current) == 1


def test_a_base_and_a_model_without_one_do_not_go_together(half_frozen, numbers):
    with pytest.raises(VersionError, match=r"it names no base, and the model of \[model\] has frozen weights"):
        load(half_frozen, 1, None)
    with pytest.raises(
        VersionError, match=r"does not fit \[model\]: .*missing none, unexpected body.bias, body.weight"
    ):
        load(numbers, 2, base_of(half_frozen), {"number": torch.zeros(())})


def test_weights_for_the_base_in_a_version_are_refused_and_the_base_is_unchanged(half_frozen):
    base = base_of(half_frozen)
    served = load(half_frozen, 1, base)
    before = copy.deepcopy(served._module.body.weight)
    weights = {**trained(2), "body.weight": torch.full((4, 4), 9.0)}

    with pytest.raises(VersionError, match=r"version 2: .*tensors for frozen weights: body.weight"):
        load(half_frozen, 2, base, weights)

    assert torch.equal(served._module.body.weight, before)
    assert trained_state(served._module).keys() == trained(1).keys()


WITHIN = """
import torch
from torch import nn

class Within(nn.Module):
    \"\"\"The mean of a text without its first and last token: NaN of a text of one.\"\"\"

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 2).requires_grad_(False)
        self.head = nn.Linear(2, 1)

    def forward(self, text):
        inner = (text != 0) & (text != 3)
        inner[:, 0] = False
        return self.head((self.words(text) * inner.unsqueeze(-1)).sum(1) / inner.sum(1, keepdim=True))

def build():
    return Within()
"""


def test_a_custom_model_on_a_base_is_tried_on_texts_without_padding(tmp_path):
    (tmp_path / "within_model.py").write_text(WITHIN)
    tokens = {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer.json")), "length": 6}
    fields = {"features": {"text": {"dtype": "string", "encode": tokens}}, "label": {"name": "y", "dtype": "float32"}}
    schema, model = Schema(SchemaSettings.model_validate(fields)), ModelSettings(factory="within_model:build")
    publisher = Publisher(
        Deployment(
            *("tiny", schema, model.model_copy(update={"task": "regression"}), tmp_path, tmp_path / "var"),
            torch.device("cpu"),
        )
    )
    base, weights = base_of(publisher), {"head.weight": torch.zeros(1, 2), "head.bias": torch.ones(1)}
    versions = [load(publisher, number, base, weights) for number in (1, 2)]
    assert [version.number for version in versions] == [1, 2]


def test_garbage_is_collected_again_after_a_load_whatever_ends_it():
    with pytest.raises(OSError, match="stopped"), collecting_at_end(no_piece):
        assert not gc.isenabled()
    assert gc.isenabled()


def no_piece():
    raise OSError("stopped")
