"""The version format: complete versions are read back, and damaged ones are refused."""

import hashlib
import json
import os
import pickle
import shutil
import threading
from datetime import date
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core import atomic_files as files
from anabranch.learner.errors import VersionError
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.stream.trained_through import PartitionProgress, format_trained_through, parse_trained_through
from anabranch.learner.versions.format import (
    Manifest,
    ModelReference,
    RegistryState,
    Verdict,
    Versions,
    other_model,
    reference_to,
)
from tests.support.waiting import PATIENCE_SECONDS

PASS = Verdict("pass", ["better"], {"drop": -0.1})


def manifest_of(number, **changes):
    fields = {
        "number": number,
        "generation": 1,
        "parent": number - 1 or None,
        "time": 1.5,
        "step": 10 * number,
        "trained_through": {"events:0": PartitionProgress(4711, 0, 1234)},
        "metrics": {"now": 0.5},
        "schema": "0" * 64,
        "encoders": {},
        "model": ModelReference("m:build", {"hidden": 8}, "classification"),
        "files": {},
    }
    return Manifest(**(fields | changes))


def weights_of(number):
    return {"w": torch.full((64, 3), float(number)), "b": torch.arange(3) + number}


def assert_intact(versions, number):
    manifest = versions.manifest(number)
    assert (manifest.number, manifest.step) == (number, 10 * number)
    assert versions.verdict(number) == PASS
    found = versions.weights(manifest)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in weights_of(number).items()
    }


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path / "versions")


@pytest.fixture
def one(versions):
    """A directory with version 1."""
    versions.write(weights_of(1), manifest_of(1), PASS)
    return versions


class TestWriting:
    def test_a_version_is_read_back(self, one):
        assert one.numbers() == [1]
        assert_intact(one, 1)
        files = sorted(path.name for path in one.directory(1).iterdir())
        assert files == ["manifest.json", "model.safetensors", "verdict.json"]

    def test_the_manifest_has_the_digest_of_each_file(self, one):
        payload = (one.directory(1) / "model.safetensors").read_bytes()
        assert one.manifest(1).files == {"model.safetensors": hashlib.sha256(payload).hexdigest()}

    def test_versions_are_sorted_by_number(self, versions):
        for number in (10, 9, 1):
            versions.write(weights_of(number), manifest_of(number), PASS)
        assert versions.numbers() == [1, 9, 10]

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor(3.5),
            torch.zeros(0, 4),
            torch.arange(12).reshape(3, 4).T,
            torch.ones(2, dtype=torch.bfloat16),
            torch.tensor([True, False]),
        ],
        ids=["a number", "empty", "transposed", "bfloat16", "bool"],
    )
    def test_any_tensor_can_be_written(self, versions, tensor):
        versions.write({"t": tensor}, manifest_of(1), PASS)
        found = versions.weights(versions.manifest(1))["t"]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)

    def test_tensors_may_share_memory(self, versions):
        tied = torch.arange(6.0).reshape(2, 3)
        versions.write({"in": tied, "out": tied, "row": tied[1]}, manifest_of(1), PASS)
        found = versions.weights(versions.manifest(1))
        assert torch.equal(found["in"], tied)
        assert torch.equal(found["out"], tied)
        assert torch.equal(found["row"], tied[1])

    def test_a_number_cannot_be_written_twice(self, one):
        with pytest.raises(OSError, match="1"):
            one.write(weights_of(2), manifest_of(1), PASS)
        assert_intact(one, 1)
        assert [path.name for path in one.path.iterdir()] == ["1"]


class TestMissingFiles:
    def test_an_empty_directory_is_no_error(self, versions):
        assert versions.numbers() == []
        assert versions.state() == RegistryState()
        versions.storage.clean()

    def test_a_folder_without_a_manifest_does_not_exist(self, one):
        (one.directory(1) / "manifest.json").unlink()
        assert one.numbers() == []
        with pytest.raises(VersionError, match=r"manifest\.json does not exist"):
            one.manifest(1)

    def test_other_files_are_no_versions(self, one):
        (one.path / ".tmp-1-2").mkdir()
        (one.path / ".tmp-1-2" / "manifest.json").write_text("{}")
        (one.path / "other").mkdir()
        (one.path / "3").write_text("")
        assert one.numbers() == [1]

    def test_no_verdict_is_none(self, one):
        (one.directory(1) / "verdict.json").unlink()
        assert one.verdict(1) is None

    def test_deleting_twice_is_no_error(self, one):
        one.delete(1)
        one.delete(1)
        assert list(one.path.iterdir()) == []


class TestDamage:
    @pytest.mark.parametrize("index", [0, 8, 40, -1, None], ids=str)
    def test_a_flipped_bit_and_a_truncated_file_are_detected(self, one, index):
        path = one.directory(1) / "model.safetensors"
        content = bytearray(path.read_bytes())
        if index is None:
            del content[100:]
        else:
            content[index] ^= 1
        path.write_bytes(content)
        with pytest.raises(VersionError, match=r"version 1: .*model\.safetensors does not have its digest"):
            one.weights(one.manifest(1))

    def test_a_missing_file_is_detected(self, one):
        (one.directory(1) / "model.safetensors").unlink()
        with pytest.raises(VersionError, match=r"version 1: cannot read .*model\.safetensors"):
            one.weights(one.manifest(1))

    @pytest.mark.parametrize("name", ["manifest.json", "verdict.json"])
    @pytest.mark.parametrize("content", [b"", b'{"number": 1', b"[]", b"\xff", b'{"verdict": "maybe"}'])
    def test_a_damaged_document_is_detected(self, one, name, content):
        (one.directory(1) / name).write_bytes(content)
        with pytest.raises(VersionError, match=f"{name} cannot be read"):
            one.manifest(1) if name == "manifest.json" else one.verdict(1)

    def test_a_document_that_is_a_folder_is_refused(self, one):
        (one.directory(1) / "verdict.json").unlink()
        (one.directory(1) / "verdict.json").mkdir()
        with pytest.raises(VersionError, match="cannot be read"):
            one.verdict(1)

    def test_a_damaged_state_is_detected(self, one):
        (one.path / "state.json").write_bytes(b"{")
        with pytest.raises(VersionError, match=r"state\.json cannot be read"):
            one.state()

    def test_the_manifest_of_another_version_is_refused(self, one):
        shutil.copytree(one.directory(1), one.directory(2))
        with pytest.raises(VersionError, match="is that of version 1"):
            one.manifest(2)

    def test_a_manifest_without_weights_is_refused(self, one):
        with pytest.raises(VersionError, match=r"version 1: its manifest lists no model\.safetensors"):
            one.weights(manifest_of(1))

    def test_a_pickle_with_the_right_digest_is_not_executed(self, one, tmp_path):
        class Evil:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "run",))

        content = pickle.dumps(Evil())
        (one.directory(1) / "model.safetensors").write_bytes(content)
        manifest = manifest_of(1, files={"model.safetensors": hashlib.sha256(content).hexdigest()})
        with pytest.raises(VersionError, match="is not safetensors"):
            one.weights(manifest)
        assert not (tmp_path / "run").exists()


class PowerCutError(BaseException):
    """A BaseException, so that no handler of the program runs."""


class Disk:
    """Allows `steps` operations on the disk, and then fails like a power loss: data that was not fsynced is lost."""

    def __init__(self, monkeypatch, steps):
        self.left = steps
        self.unsynced = {}
        for owner, name in (
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "replace"),
            (Path, "unlink"),
            (os, "rmdir"),
            (os, "unlink"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        self._open, self._fsync = Path.open, os.fsync
        monkeypatch.setattr(Path, "open", lambda path, mode="r", *rest: self.open(path, mode, *rest))
        monkeypatch.setattr(files.os, "fsync", self.fsync)

    def step(self):
        if self.left == 0:
            for descriptor in self.unsynced.values():
                os.ftruncate(descriptor, 0)
                os.close(descriptor)
            self.unsynced = {}
            raise PowerCutError
        self.left -= 1

    def _counted(self, real):
        def counted(*args, **options):
            self.step()
            return real(*args, **options)

        return counted

    def open(self, path, mode, *rest):
        if "w" not in mode:
            return self._open(path, mode, *rest)
        self.step()
        file = TornFile(self, self._open(path, mode, buffering=0))
        # A separate descriptor, which a rename does not invalidate.
        self.unsynced[os.fstat(file.fileno()).st_ino] = os.dup(file.fileno())
        return file

    def fsync(self, descriptor):
        self.step()
        self._fsync(descriptor)
        synced = self.unsynced.pop(os.fstat(descriptor).st_ino, None)
        if synced is not None:
            os.close(synced)


class TornFile:
    def __init__(self, disk, file):
        self._disk, self._file = disk, file
        self.fileno = file.fileno
        self.flush = file.flush

    def write(self, content):
        half = len(content) // 2
        self._file.write(content[:half])
        self._disk.step()
        self._file.write(content[half:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def with_every_crash(tmp_path, monkeypatch, prepare, act, check):
    """Run `act` with a power cut after 0, 1, 2 ... steps until it finishes, and `check` the versions each time."""
    for steps in range(100):
        versions = Versions(tmp_path / f"checkpoint-{steps}")
        prepare(versions)
        with monkeypatch.context() as patch:
            disk = Disk(patch, steps)
            try:
                act(versions)
                done = True
            except PowerCutError:
                done = False
        check(versions, done)
        if done:
            assert disk.left == 0
            return steps
    raise AssertionError("`act` takes more than 100 steps")


class TestCrashes:
    def test_a_crash_while_a_version_is_written_leaves_all_of_it_or_nothing(self, tmp_path, monkeypatch):
        seen = set()

        def prepare(versions):
            versions.write(weights_of(1), manifest_of(1), PASS)

        def act(versions):
            versions.write(weights_of(2), manifest_of(2), PASS)

        def check(versions, done):
            numbers = versions.numbers()
            seen.add(tuple(numbers))
            assert numbers in ([1, 2],) if done else ([1], [1, 2])
            for number in numbers:
                assert_intact(versions, number)
            versions.storage.clean()
            assert sorted(path.name for path in versions.path.iterdir()) == [str(number) for number in numbers]
            if numbers == [1]:
                act(versions)
            assert_intact(versions, 2)

        steps = with_every_crash(tmp_path, monkeypatch, prepare, act, check)
        assert steps > 12
        assert seen == {(1,), (1, 2)}

    def test_a_crash_while_a_version_is_deleted_leaves_all_of_it_or_nothing(self, tmp_path, monkeypatch):
        def prepare(versions):
            versions.write(weights_of(1), manifest_of(1), PASS)
            versions.write(weights_of(2), manifest_of(2), PASS)

        def check(versions, done):
            numbers = versions.numbers()
            assert numbers in ([2],) if done else ([2], [1, 2])
            for number in numbers:
                assert_intact(versions, number)
            versions.delete(1)
            assert [path.name for path in versions.path.iterdir()] == ["2"]

        with_every_crash(tmp_path, monkeypatch, prepare, lambda versions: versions.delete(1), check)

    def test_a_crash_while_the_state_is_replaced_leaves_the_old_or_the_new_state(self, tmp_path, monkeypatch):
        old, new = RegistryState(serving=1), RegistryState(serving=2, previous=1)
        seen = []

        def check(versions, done):
            seen.append(versions.state())
            assert seen[-1] == new if done else seen[-1] in (old, new)

        with_every_crash(tmp_path, monkeypatch, lambda v: v.write_state(old), lambda v: v.write_state(new), check)
        assert seen[0] == old

    def test_a_full_disk_leaves_no_version_and_its_number_can_be_written_later(self, one, monkeypatch):
        with monkeypatch.context() as patch:

            def full(descriptor):
                raise OSError(28, "No space left on device")

            patch.setattr(files.os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                one.write(weights_of(2), manifest_of(2), PASS)
        assert [path.name for path in one.path.iterdir()] == ["1"]
        one.write(weights_of(2), manifest_of(2), PASS)
        assert_intact(one, 2)


def test_a_reader_sees_only_complete_versions_while_one_is_written(versions):
    last, errors, read = 60, [], []

    def read_all():
        try:
            while last not in read:
                for number in versions.numbers():
                    try:
                        verdict = versions.verdict(number)
                        weights = versions.weights(versions.manifest(number))
                    except VersionError:
                        verdict = None
                    if verdict is None:
                        assert number not in versions.numbers()  # deleted meanwhile
                    else:
                        assert torch.equal(weights["w"], weights_of(number)["w"])
                        read.append(number)
        except Exception as exc:  # noqa: BLE001 - the test fails with it, in its own thread
            errors.append(exc)

    readers = [threading.Thread(target=read_all) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, last + 1):
        versions.write(weights_of(number), manifest_of(number), PASS)
        versions.delete(number - 2)
    for reader in readers:
        reader.join(PATIENCE_SECONDS)
    assert errors == []
    assert {last - 1, last} >= set(versions.numbers())
    assert last in read


def test_the_state_is_read_back(versions):
    state = RegistryState(serving=3, previous=2, pinned=3, rolled_back=[1])
    versions.write_state(state)
    assert versions.state() == state
    assert json.loads((versions.path / "state.json").read_text())["rolled_back"] == [1]


class TestTrainedThrough:
    def test_it_has_the_format_of_http_replies(self):
        trained = {"events:1": PartitionProgress(4698), "events:0": PartitionProgress(4711, 2, 5)}
        assert format_trained_through(trained) == "events:0=4711,events:1=4698"
        assert parse_trained_through(" events:0=4711, events:1=-1 ") == {"events:0": 4711, "events:1": -1}

    @pytest.mark.parametrize("text", ["", "events:0", "events=3", "events:0=x", "events:0=1;events:1=2", "a b:0=1"])
    def test_other_formats_are_refused(self, text):
        with pytest.raises(ValueError, match='is not of the form "topic:partition=offset"'):
            parse_trained_through(text)

    @given(
        st.dictionaries(
            st.from_regex(r"\A[A-Za-z0-9._-]{1,20}:[0-9]{1,4}\Z"), st.integers(-1, 2**62), min_size=1, max_size=5
        )
    )
    def test_formatted_text_is_parsed_back(self, offsets):
        trained = {name: PartitionProgress(offset) for name, offset in offsets.items()}
        assert parse_trained_through(format_trained_through(trained)) == offsets


def test_a_model_is_the_configured_one_if_its_arguments_are_equal_as_json():
    settings = ModelSettings(factory="m:build", args={"sizes": (8, 1.0), "since": date(2026, 1, 2)})
    expected = reference_to(settings)
    read = msgspec.json.decode(msgspec.json.encode(expected), type=ModelReference)
    assert other_model(read, expected) is None
    for args in ({}, {**expected.args, "x" * 1000: 1}, {**expected.args, "sizes": None}):
        difference = other_model(ModelReference("m:build", args, "classification"), expected)
        assert difference is not None
        assert "set them back to serve it" in difference
        assert len(difference) < 300
