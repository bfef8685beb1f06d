"""The checkpoint format: complete checkpoints are read back; damaged ones and older formats are refused."""

import json
import shutil
import tarfile
import threading
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch

from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.format import FORMAT, Checkpoint, Checkpoints
from anabranch.learner.errors import CheckpointError, MisfitError
from anabranch.learner.state_dir.folders import MANIFEST, encode_manifest
from tests.learner.extensions.late_labels.joins import JoinBench, options
from tests.learner.learner_bench import LearnerBench, small_model
from tests.support.memory import python_memory


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove a file", "tear the manifest"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_used(make_bench, harm, caplog):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    bench.stream.blocks, bench.stop = 8, threading.Event()
    bench.stream.stop = bench.stop
    bench.run()
    bench.finish()
    newest = bench.checkpoints.path / "2"
    payload = newest / "rank-0" / "replay.safetensors"
    if harm == "flip":
        content = bytearray(payload.read_bytes())
        content[len(content) // 2] ^= 1
        payload.write_bytes(content)
    elif harm == "truncate":
        payload.write_bytes(payload.read_bytes()[:-1])
    elif harm == "remove a file":
        payload.unlink()
    else:
        (newest / MANIFEST).write_bytes((newest / MANIFEST).read_bytes()[:40])
    found = bench.checkpoints.newest()
    assert found is not None
    assert (found[0], found[1].step) == (1, 4)
    assert "; it is not used" in caplog.text
    assert bench.checkpoints.generation() == 1


def test_a_checkpoint_of_an_older_generation_is_older_whatever_its_number(make_bench):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    path, schema = bench.checkpoints.path, bench.checkpoints.schema
    found = bench.checkpoints.newest()
    assert found is not None
    later, stale = Checkpoints(path, schema, 2), Checkpoints(path, schema, 1)
    later.write(2, found[1], 0.0)
    stale.write(7, found[1], 0.0)
    stale.write(8, found[1], 0.0)
    newest = later.newest()
    assert newest is not None
    assert newest[0] == 2
    CheckpointPruning(later, 2).prune()
    assert later.numbers() == [2, 8]


def test_an_incomplete_checkpoint_does_not_exist_and_is_cleaned(make_bench):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    shutil.copytree(bench.checkpoints.path / "1", bench.checkpoints.path / "7")
    (bench.checkpoints.path / "7" / MANIFEST).unlink()
    (bench.checkpoints.path / ".tmp-1-9").mkdir()
    assert bench.checkpoints.numbers() == [1]
    bench.checkpoints.storage.clean()
    assert sorted(entry.name for entry in bench.checkpoints.path.iterdir()) == ["1"]


def test_a_checkpoint_of_another_schema_is_refused(make_bench):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    path = bench.checkpoints.path / "1" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": "0" * 64}))
    with pytest.raises(CheckpointError, match=r"checkpoint 1 in .* was made under another \[schema\]"):
        bench.checkpoints.newest()


@pytest.mark.slow
def test_no_part_is_read_into_memory_of_python(tmp_path):
    """What copies it would hold the GIL: with 10 GB, other ranks would take this one for gone."""
    checkpoints = Checkpoints(tmp_path, "", 1)
    checkpoints.write(1, Checkpoint(1, {"optimizer": {"w": torch.ones(2**24, dtype=torch.uint8)}}, {}), 0.0)
    with python_memory() as most:
        assert checkpoints.part(1, "optimizer")["w"].sum() == 2**24
        found = checkpoints.newest()
    assert most() < 4 * 2**20, "parts of a file for its digest"
    assert found is not None
    assert found[1].tensors["optimizer"]["w"].sum() == 2**24


@pytest.mark.parametrize(
    ("missing", "sentence"), [("state.json", "it has no rank-0/state.json"), ("", "is not safetensors")]
)
def test_a_checkpoint_that_has_its_digests_and_is_none_is_refused(tmp_path, missing, sentence):
    checkpoints = Checkpoints(tmp_path, "", 1)
    folder = checkpoints.write(1, Checkpoint(1, {"rng": {"cpu": torch.ones(2)}}, {}), 0.0)
    path, manifest = folder / "rank-0" / "rng.safetensors", checkpoints.manifest(1)
    files = {name: digest for name, digest in manifest.files.items() if name != f"rank-0/{missing}"}
    if not missing:
        path.write_bytes(b"{}")
        files["rank-0/rng.safetensors"] = sha256(b"{}").hexdigest()
    (folder / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(CheckpointError, match=sentence):
        checkpoints.newest()


# `before_extensions.tar.gz` has two state directories that the code of b75fc922 made: `learner`, of a bench of 6 steps
# of 32 events with a disk tier, and `join`, of 8 events that wait for labels and 3 labels, two of which match.
REFUSED = (
    f"checkpoint 1 in {{0}} is of format 13, and this release reads {FORMAT}; use the release that made it, or begin "
    "again by moving {0} away"
)


@pytest.fixture
def before(tmp_path):
    with tarfile.open(Path(__file__).with_name("before_extensions.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_checkpoint_of_before_is_refused_and_a_learner_begins_again_once_it_is_moved_away(before, schema):
    path, replay = before / "learner", {"disk": {"bytes": "100kB"}, "capacity": 40}
    torch.manual_seed(0)
    with pytest.raises(MisfitError) as refused:
        LearnerBench(path, schema, small_model(), 2, replay=replay)
    assert str(refused.value) == REFUSED.format(path / "checkpoints")
    (path / "checkpoints").rename(path / "away")
    bench = LearnerBench(path, schema, small_model(), 2, replay=replay)
    bench.run()
    bench.finish()
    assert (bench.loop.state.steps, bench.checkpoints.numbers()) == (2, [1])
    bench.close()


def test_events_that_waited_before_are_refused_and_others_wait_once_their_checkpoint_is_moved_away(before):
    path, size = before / "join", options(take_back=True, bytes=2**16)
    with pytest.raises(MisfitError) as refused:
        JoinBench(path, size).restart()
    assert str(refused.value) == REFUSED.format(path / "checkpoints")
    (path / "checkpoints").rename(path / "away")
    assert JoinBench(path, size).join.events.waiting == 0
