"""A learner with adapters: it goes on bit for bit, and a hostile adapter is refused by one sentence."""

import hashlib
import json
import os
import pickle
import shutil

import msgspec
import pytest
import safetensors.torch
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.learner.errors import CheckpointError
from anabranch.learner.model.adapter import Adapter
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.trained_set import decide_trained_set, trained_state, write_base
from anabranch.learner.settings.model import AdapterSettings
from anabranch.learner.state_dir.bases import Bases
from anabranch.learner.versions.format import Verdict


def adapted(precision="fp32", **settings):
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    chosen = {"rank": 2, "train": ["4"], "base_precision": precision, **settings}
    model = Adapter(AdapterSettings.model_validate(chosen)).convert(model, ModelContext(torch.device("cpu")))
    decide_trained_set(model)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16", "nf4"])
def test_a_learner_goes_on_bit_for_bit_and_stores_the_adapters_alone(make_bench, tmp_path, precision):
    through = make_bench(12, lambda: adapted(precision))
    through.run()
    expected = {name: value.clone() for name, value in through.trainer.model.state_dict().items()}
    through.finish()
    through.close()
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    interrupted = make_bench(7, lambda: adapted(precision))
    interrupted.run()
    interrupted.finish()
    interrupted.close()

    resumed = make_bench(12, lambda: adapted(precision))
    assert resumed.found is not None
    stored = resumed.found[1].tensors
    resumed.resume()
    resumed.run()

    matrices = [f"{layer}.lora_{side}.default.weight" for layer in (0, 2) for side in "AB"]
    assert stored["model"].keys() == {*matrices, "4.weight", "4.bias"}
    assert {value.dtype for value in stored["model"].values()} == {torch.float32}
    state = resumed.trainer.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


def test_a_base_of_four_bits_has_the_same_digest_whenever_it_is_built(tmp_path):
    digests = set()
    for _ in range(2):
        torch.manual_seed(0)
        digests.add(write_base(Bases(tmp_path), adapted("nf4")))
    assert len(digests) == 1


A = "0.lora_A.default.weight"


def saved(change):
    return lambda tensors: safetensors.torch.save(change(tensors))


def without(tensors):
    return {name: value for name, value in tensors.items() if name != A}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (lambda _tensors: pickle.dumps(os.system), "is not safetensors: its header has"),
        (lambda _tensors: (2**63).to_bytes(8, "little") + b"{}", "its header has 9223372036854775808 bytes"),
        (saved(lambda tensors: {**tensors, A: torch.zeros(2, 4)}), rf"{A}.*\[2, 4\].*\[2, 3\]"),
        (saved(without), f"missing {A}, unexpected none"),
        (saved(lambda tensors: {**tensors, "evil": torch.zeros(1)}), "missing none, unexpected evil"),
        (
            saved(lambda tensors: {**tensors, "0.base_layer.weight": torch.zeros(64, 3)}),
            "there are tensors for frozen weights: 0.base_layer.weight",
        ),
    ],
)
def test_a_checkpoint_with_a_hostile_adapter_is_refused_by_one_sentence(make_bench, tmp_path, content, sentence):
    bench = make_bench(4, adapted)
    bench.run()
    bench.finish()
    bench.close()
    for path in tmp_path.glob("**/checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_bytes())
        (name,) = [name for name in manifest["files"] if name.endswith("model.safetensors")]
        file = path.parent / name
        changed = content(safetensors.torch.load_file(file))
        file.unlink()
        file.write_bytes(changed)
        manifest["files"][name] = hashlib.sha256(changed).hexdigest()
        path.write_text(json.dumps(manifest))

    with pytest.raises(SettingsError, match=sentence) as refused:
        make_bench(6, adapted).resume()

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../model.safetensors"])
def test_a_checkpoint_that_names_a_file_elsewhere_is_refused(make_bench, tmp_path, name):
    bench = make_bench(4, adapted)
    bench.run()
    bench.finish()
    bench.close()
    for path in tmp_path.glob("**/checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_bytes())
        manifest["files"][name] = hashlib.sha256(b"").hexdigest()
        path.write_text(json.dumps(manifest))

    with pytest.raises(SettingsError, match=f"'{name}' is not the name of a file") as refused:
        make_bench(6, adapted).resume()

    assert "\n" not in str(refused.value)


def test_a_version_with_a_hostile_adapter_is_no_baseline(make_bench):
    bench = make_bench(4, adapted)
    bench.run()
    bench.finish()
    number = bench.versions.numbers()[-1]
    assert bench.publisher.gate.read(number, bench.holdout.held) is not None
    manifest = msgspec.structs.replace(bench.versions.manifest(number), number=number + 1)
    weights = {**trained_state(bench.trainer.model), A: torch.zeros(2, 4)}
    bench.versions.write(weights, manifest, Verdict("pass"))

    assert bench.publisher.gate.read(number + 1, bench.holdout.held) is None


def test_another_alpha_is_refused_since_no_tensor_would_show_it(make_bench):
    before = make_bench(7, adapted)
    before.run()
    before.finish()
    before.close()
    after = make_bench(12, lambda: adapted(alpha=64))
    sentence = r"model\.adapter\.alpha / model\.adapter\.rank = 8\.0, and that is 32\.0 now; put it back"
    with pytest.raises(CheckpointError, match=sentence):
        after.resume()
