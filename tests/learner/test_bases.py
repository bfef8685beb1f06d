"""Frozen weights are in `bases/` once: versions, checkpoints and strategies have the trained set alone."""

import hashlib
import shutil
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from torch import nn

from anabranch.core.errors import DependencyError
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.assembly import learn
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.errors import MisfitError
from anabranch.learner.evaluate.scoring import ResidentModels
from anabranch.learner.model.trained_set import base_state, trained_state, write_base
from anabranch.learner.object_storage.head import decode_head
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.bases import Bases, bases_in
from anabranch.learner.state_dir.folders import BASE_FILE
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.versions.format import Versions
from anabranch.learner.versions.named_bases import prune_bases
from tests.learner.learner_bench import OpenStream
from tests.learner.learner_spec import learner_spec

FACTORY = """
import torch
from torch import nn


def build(seed=0, frozen=True):
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU())
    return nn.Sequential(body.requires_grad_(not frozen), nn.Linear(16, 3))
"""


def half_frozen():
    """The model of `small_model`, whose first layers do not learn."""
    body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(body, nn.Dropout(0.2), nn.Linear(16, 3))


TRAINED = {"0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked", "2.weight", "2.bias"}


def weights_of(bench):
    return {name: value.clone() for name, value in bench.trainer.model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["er", "ewc", "lwf", "agem", "der"])
def test_a_learner_with_frozen_weights_goes_on_from_its_checkpoint_bit_for_bit(make_bench, tmp_path, name):
    def strategy():
        return STRATEGIES[name](**({"every": 3} if name in ("ewc", "lwf") else {}))

    through = make_bench(14, half_frozen, strategy=strategy())
    frozen = {name: value.clone() for name, value in base_state(through.trainer.model).items()}
    through.run()
    expected = weights_of(through)
    through.finish()
    through.close()
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    interrupted = make_bench(8, half_frozen, strategy=strategy())
    interrupted.run()
    interrupted.finish()
    interrupted.close()

    resumed = make_bench(14, half_frozen, strategy=strategy())
    assert resumed.found is not None
    tensors = resumed.found[1].tensors
    resumed.resume()
    resumed.run()

    assert tensors["model"].keys() == TRAINED
    assert {key.partition(".")[0] for key in tensors["optimizer"]} == {"0", "1"}
    assert all(sum(each.numel() for each in part.values()) < 400 for key, part in tensors.items() if key == "strategy")
    assert all(torch.equal(value, expected[name]) for name, value in resumed.trainer.model.state_dict().items())
    assert all(torch.equal(value, frozen[name]) for name, value in base_state(resumed.trainer.model).items())
    manifest = resumed.versions.manifest(resumed.versions.numbers()[0])
    assert resumed.versions.weights(manifest).keys() == TRAINED


def test_models_that_score_versions_share_the_base_of_the_trained_model(schema):
    model = half_frozen()
    chunks = SimpleNamespace(device=torch.device("cpu"), follow=lambda: None)
    weights = {name: value + 1 for name, value in trained_state(model).items()}

    resident = ResidentModels(model, cast("Any", chunks))
    scored = resident.of(weights)

    assert all(value.data_ptr() == base_state(model)[name].data_ptr() for name, value in base_state(scored).items())
    assert all(torch.equal(value, weights[name]) for name, value in trained_state(scored).items())
    assert resident.nbytes == sum(value.nbytes for value in trained_state(model).values())


@pytest.fixture
def run(tmp_path, schema):
    """Runs a learner over 4 blocks, with these `model.args`."""
    (tmp_path / "model_with_base.py").write_text(FACTORY)

    def start(host="var", storage=None, **args):
        stop = threading.Event()
        stream = OpenStream(schema, 4, stop)
        deployment = spec(tmp_path, schema.settings, state_dir=tmp_path / host, storage=storage, args=args)
        learn(deployment, stop, source=cast("BlockReader", stream))

    return start


def spec(folder, events, args, **more):
    model = ModelSettings.model_validate({"factory": "model_with_base:build", "args": args})
    options = LearnerSettings.model_validate(
        {"batch_size": 31, "max_delay": "1ms", "status": "127.0.0.1:0", "device": "cpu"}
    )
    return learner_spec(folder, events, model, learner=options, **more)


@pytest.mark.process
@pytest.mark.slow
def test_a_learner_writes_its_base_before_what_names_it_and_deletes_it_after_the_last(run, tmp_path, schema):
    state_dir = tmp_path / "var"
    run()
    (first,) = bases_in(state_dir).digests()
    checkpoints = Checkpoints(state_dir / "checkpoints", schema.digest, 1)
    versions = Versions(state_dir / "versions")
    assert {versions.manifest(number).base for number in versions.numbers()} == {first}
    assert checkpoints.manifest(max(checkpoints.numbers())).base == first
    stored = safetensors.torch.load_file(bases_in(state_dir).checked(first))
    assert stored.keys() == {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"}

    sentence = rf"checkpoint \d in .*checkpoints was trained with the base '{first[:12]}', and \[model\] has the base '"
    with pytest.raises(MisfitError, match=sentence):
        run(seed=1)
    with pytest.raises(MisfitError, match=r"has no frozen weights now; put the pretrained weights and \[model.adapter"):
        run(frozen=False)

    for folder in ("checkpoints", "versions"):
        (state_dir / folder).rename(tmp_path / folder)
    run(seed=1)
    (second,) = bases_in(state_dir).digests()
    assert second != first


def test_a_version_of_another_base_is_no_baseline(make_bench, caplog):
    bench = make_bench(4, half_frozen)
    bench.versions.base = "a" * 64
    bench.run()
    bench.finish()
    number = bench.versions.numbers()[-1]
    assert bench.publisher.gate.read(number, bench.holdout.held) is not None

    bench.versions.base = "b" * 64

    assert bench.publisher.gate.read(number, bench.holdout.held) is None
    assert f"version {number} was trained with the base 'aaaaaaaaaaaa', and [model] has the base 'bbbb" in caplog.text


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mirror", "only"])
def test_a_learner_uploads_its_base_and_one_on_another_host_goes_on_with_it(run, tmp_path, mode):
    storage = StorageSettings.model_validate({"url": f"file://{tmp_path}/bucket", "mode": mode})
    run(storage=storage)
    (base,) = bases_in(tmp_path / "var").digests()
    assert [path.name for path in (tmp_path / "bucket" / "bases").iterdir()] == [f"{base}-1"]
    with pytest.raises(MisfitError, match="was trained with the base"):
        run("other", storage, seed=1)

    run("another", storage)

    assert bases_in(tmp_path / "another").digests() == {base}
    assert decode_head(storage.bucket, storage.bucket.read("head.json")).bases[base] == 1


@pytest.mark.process
@pytest.mark.slow
def test_a_full_disk_ends_a_learner_before_anything_names_its_base(run, tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.learner.state_dir.bases.write_durably", full)
        with pytest.raises(
            DependencyError, match=r"the frozen weights of the model cannot be written to .*No space left"
        ):
            run()
    assert not list((tmp_path / "var" / "bases").iterdir())
    assert not (tmp_path / "var" / "versions").exists()

    run()
    assert len(bases_in(tmp_path / "var").digests()) == 1


def test_a_base_that_a_kill_left_without_a_version_is_used_and_a_damaged_one_written_again(tmp_path):
    bases, model = Bases(tmp_path / "bases"), half_frozen()
    sha256 = write_base(bases, model)
    assert sha256 is not None
    written = bases.file(sha256).stat()
    (bases.path / f".tmp-{sha256}").write_bytes(b"half")

    assert write_base(bases, model) == sha256
    assert bases.file(sha256).stat() == written

    bases.file(sha256).write_bytes(b"damaged")
    assert write_base(bases, model) == sha256
    assert bases.is_intact(sha256)
    assert sorted(path.name for path in bases.path.iterdir()) == [sha256]
    assert (bases.path / sha256 / BASE_FILE).stat().st_size == written.st_size


def test_only_bases_that_nothing_names_are_deleted(tmp_path, schema):
    """A checkpoint that was set aside may be put back, and one without tensors fits any base."""
    bases, checkpoints = bases_in(tmp_path), Checkpoints(tmp_path / "checkpoints", schema.digest, 1)
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
    for number, sha256 in enumerate(digests):
        bases.write(sha256, [bytes([number])])
    for number, tensors in ((1, {"model": {}}), (2, {"model": {}}), (3, {})):
        checkpoints.base = digests[number - 1]
        checkpoints.write(number, Checkpoint(1, tensors, {}), 1.0)
    checkpoints.storage.set_aside(2)
    assert checkpoints.manifest(3).base is None

    prune_bases(tmp_path, digests[3])

    assert bases.digests() == {digests[0], digests[1], digests[3]}
    prune_bases(tmp_path / "none", None)


def test_a_model_without_frozen_weights_has_no_base(tmp_path):
    assert write_base(Bases(tmp_path / "bases"), nn.Linear(2, 2)) is None
    assert not (tmp_path / "bases").exists()
