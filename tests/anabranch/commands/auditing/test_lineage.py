"""Statements on the origin of versions: what they say, and that a changed one is noticed."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as other_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cli import app as cli
from anabranch.commands.auditing.lineage import lineage, verify_lineage
from anabranch.commands.auditing.signing import sign, verified
from anabranch.config.loader import Config, load_config
from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema
from learner.errors import VersionError
from learner.state_dir.origin import ResumedFrom, VersionOrigin
from learner.state_dir.trained_through import PartitionProgress
from learner.state_dir.undo_file import OffsetRanges, UndoRecord, append_record
from learner.state_dir.version import VERSION_FORMAT, Manifest, ModelReference, Verdict, Versions

ORIGIN = VersionOrigin(
    seed=7,
    settings={"learner.batch_size": 64},
    code={"my_model": "ab" * 32},
    packages={"python": "3.11.9", "torch": "2.9.0", "numpy": "2.1.0", "anabranch": "1.0"},
    device="cpu",
    resumed_from=ResumedFrom(3, 60),
)


@pytest.fixture
def config(example: Path) -> Config:
    return load_config(example / "pipeline.toml", {})


@pytest.fixture
def publish(config: Config) -> Callable[..., Versions]:
    """Publishes a version; `known=False`: as an earlier release did."""
    versions = Versions(config.state_dir / "versions")

    def write(number: int, *, known: bool = True, **changes: Any) -> Versions:
        more: dict[str, Any] = {
            "format": VERSION_FORMAT,
            "origin": ORIGIN,
            "learned_from": {"events:0": 5},
            "erasures": 0,
        }
        manifest = Manifest(
            number=number,
            generation=2,
            parent=number - 1,
            time=1_700_000_000.0 + number,
            step=number * 100,
            trained_through={"events:0": PartitionProgress(number * 10)},
            metrics={"now": 0.875},
            schema=Schema(config.pipeline.events).digest,
            encoders={},
            model=ModelReference("my_model:build", {}, "classification"),
            files={},
            **(more if known else {}),
        )
        manifest = msgspec.structs.replace(manifest, **changes)
        versions.write({"w": torch.full((3,), float(number))}, manifest, Verdict("pass", [], {"drop_new": 0.25}))
        return versions

    return write


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "private.pem"
    private = Ed25519PrivateKey.generate()
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    return path


def test_a_statement_says_where_a_version_comes_from(config: Config, publish: Callable[..., Versions]) -> None:
    publish(4)
    versions = publish(5)
    statement = lineage(config, 5)
    manifest, folder = versions.manifest(5), versions.directory(5)

    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {each["name"]: each["digest"]["sha256"] for each in statement["subject"]} == {
        f"versions/5/{name}": hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "manifest.json")
    }
    predicate = statement["predicate"]
    external = predicate["buildDefinition"]["externalParameters"]
    assert external["seed"] == 7
    assert external["settings"] == {"learner.batch_size": 64}
    dependencies = predicate["buildDefinition"]["resolvedDependencies"]
    assert dependencies[0] == {
        "name": "events:0",
        "uri": "kafka:events/0",
        "annotations": {"incarnation": 0, "first_offset": 5, "last_offset": 50, "first_offset_after_parent": 41},
    }
    assert {"name": "module my_model", "digest": {"sha256": "ab" * 32}} in dependencies
    assert {"uri": "pkg:pypi/torch@2.9.0"} in dependencies
    assert predicate["runDetails"]["metadata"]["finishedOn"] == "2023-11-14T22:13:25Z"
    own = predicate["anabranchLineage"]
    assert own["gate"] == {"verdict": "pass", "reasons": [], "numbers": {"drop_new": 0.25}}
    assert own["erasures"] == {"records_applied": 0, "records_since": 0}
    assert [(each["version"], each["sha256"]) for each in own["parents"]] == [
        (5, manifest.files["model.safetensors"]),
        (4, versions.manifest(4).files["model.safetensors"]),
        (3, "unknown"),
    ]
    assert own["parents"][0]["learner_resumed_from_checkpoint"] == {"number": 3, "step": 60}


def test_versions_after_the_checkpoint_that_a_learner_resumed_from_are_no_parents(
    config: Config, publish: Callable[..., Versions]
) -> None:
    """Versions 3 and 4 have learned more than the checkpoint that version 5 continues, as after a kill."""
    for number, step in ((2, 60), (3, 80), (4, 90)):
        publish(number, generation=1, step=step, parent=None if number == 2 else number - 1)
    publish(5, generation=2, step=70)  # ORIGIN names a checkpoint of step 60
    publish(6, generation=2, step=80)
    predicate = lineage(config, 6)["predicate"]
    assert [each["version"] for each in predicate["anabranchLineage"]["parents"]] == [6, 5, 2]
    (dependency, *_) = lineage(config, 5)["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert dependency["annotations"]["first_offset_after_parent"] == 21, "version 2 ends at offset 20"


@pytest.mark.timeout(60)
def test_a_parent_that_is_no_earlier_version_ends_the_list(config: Config, publish: Callable[..., Versions]) -> None:
    publish(4, parent=5)
    publish(5)
    assert [each["version"] for each in lineage(config, 5)["predicate"]["anabranchLineage"]["parents"]] == [5, 4]


def test_a_statement_lists_what_was_undone_before_the_version_and_since(
    config: Config, publish: Callable[..., Versions]
) -> None:
    publish(5)
    ranges = {"events#0[0]": OffsetRanges([7, 20], [9, 20])}
    append_record(config.state_dir, lambda number: UndoRecord(number=number, time=1.0, ranges=ranges, until={}))
    publish(6, undone=1)
    stated = {number: lineage(config, number)["predicate"]["anabranchLineage"]["undone"] for number in (5, 6)}
    each = {"undo": 1, "time": "1970-01-01T00:00:01Z", "ranges": {"events#0[0]": [[7, 9], [20, 20]]}}
    assert stated == {5: [{**each, "applied": False}], 6: [{**each, "applied": True}]}


def test_what_an_older_release_did_not_record_is_unknown(config: Config, publish: Callable[..., Versions]) -> None:
    publish(5, known=False)
    predicate = lineage(config, 5)["predicate"]
    external = predicate["buildDefinition"]["externalParameters"]
    assert (external["seed"], external["settings"]) == ("unknown", "unknown")
    annotations = predicate["buildDefinition"]["resolvedDependencies"][0]["annotations"]
    assert (annotations["first_offset"], annotations["first_offset_after_parent"]) == ("unknown", "unknown")
    own = predicate["anabranchLineage"]
    assert own["manifest_format"] == 0
    assert own["erasures"] == {"records_applied": "unknown", "records_since": "unknown"}


def test_the_origin_in_a_manifest_keeps_its_form(publish: Callable[..., Versions]) -> None:
    versions = publish(5)
    document = json.loads((versions.directory(5) / "manifest.json").read_bytes())
    assert document["format"] == 1
    assert document["origin"] == {
        "seed": 7,
        "settings": {"learner.batch_size": 64},
        "code": {"my_model": "ab" * 32},
        "packages": {"python": "3.11.9", "torch": "2.9.0", "numpy": "2.1.0", "anabranch": "1.0"},
        "device": "cpu",
        "found": {},
        "resumed_from": {"number": 3, "step": 60},
    }
    assert (document["learned_from"], document["erasures"]) == ({"events:0": 5}, 0)


def test_a_version_whose_weights_are_damaged_gets_no_statement(
    config: Config, publish: Callable[..., Versions]
) -> None:
    path = publish(5).directory(5) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(VersionError, match="does not have its digest"):
        lineage(config, 5)


def test_a_version_that_is_deleted_meanwhile_gets_no_statement(
    config: Config, publish: Callable[..., Versions], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish(5).directory(5)
    contents = Versions.contents

    def and_delete(self: Versions, manifest: Manifest) -> dict[str, bytes]:
        read = contents(self, manifest)
        shutil.rmtree(folder)
        return read

    monkeypatch.setattr(Versions, "contents", and_delete)
    with pytest.raises(SettingsError, match="version 5 cannot be read: No such file"):
        lineage(config, 5)


def test_a_signed_statement_is_verified_by_either_key_and_a_changed_one_is_not(
    config: Config, publish: Callable[..., Versions], key: Path, tmp_path: Path
) -> None:
    publish(4)
    publish(5)
    envelope = lineage(config, 5, key)
    path = tmp_path / "signed.json"
    path.write_text(json.dumps(envelope))
    assert json.loads(base64.b64decode(envelope["payload"]))["predicate"]["anabranchLineage"]["version"] == 5
    for each in (key, key.with_name("public.pem")):
        assert "is valid, and version 5 has the files" in verify_lineage(config, 5, path, each)

    with pytest.raises(SettingsError, match=r"signed, but not of version 4 as it is now: versions/4/manifest.json, "):
        verify_lineage(config, 4, path, key)
    payload = base64.b64decode(envelope["payload"]).replace(b'"seed":7', b'"seed":8')
    path.write_text(json.dumps({**envelope, "payload": base64.b64encode(payload).decode()}))
    with pytest.raises(SettingsError, match="signature is NOT valid"):
        verify_lineage(config, 5, path, key)
    path.write_text("{}")
    with pytest.raises(SettingsError, match="no signed statement"):
        verify_lineage(config, 5, path, key)


def test_a_verified_statement_says_the_verdict_of_the_gate_which_may_not_have_changed(
    config: Config, publish: Callable[..., Versions], key: Path, tmp_path: Path
) -> None:
    versions, path = publish(5), tmp_path / "signed.json"
    verdict = versions.directory(5) / "verdict.json"
    for stated in (Verdict("fail", ["worse on new events"], {}), Verdict("pass")):
        verdict.write_bytes(msgspec.json.encode(stated))
        path.write_text(json.dumps(lineage(config, 5, key)))
        sentence = verify_lineage(config, 5, path, key).splitlines()[1]
        assert sentence == f"the gate's verdict is {stated.verdict}{': worse on new events' if stated.reasons else ''}"
    for content in (msgspec.json.encode(Verdict("inconclusive")), None):
        if content is None:
            verdict.unlink()
        else:
            verdict.write_bytes(content)
        now = "verdict is inconclusive" if content else "has not judged it"
        with pytest.raises(SettingsError, match=f"is signed, but the gate's verdict is pass, and now the gate.*{now}"):
            verify_lineage(config, 5, path, key)


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 1), (0o604, 1)])
def test_a_key_that_others_may_read_is_used_with_a_warning(
    key: Path, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    key.chmod(mode)
    sign(b"{}", key)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


def test_both_forms_of_base64_are_read(key: Path) -> None:
    payload = b"\xfb\xef\xbe\xff\xff\xff"
    envelope = sign(payload, key)
    assert envelope["payload"] == "++++////"
    signature = base64.urlsafe_b64encode(base64.b64decode(envelope["signatures"][0]["sig"])).decode()
    urlsafe = {**envelope, "payload": "----____", "signatures": [{"sig": signature}]}
    assert verified(json.dumps(urlsafe).encode(), key)[0] == payload


def test_the_key_may_be_in_the_settings(
    example: Path, publish: Callable[..., Versions], key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(5)
    pipeline = example / "pipeline.toml"
    key.rename(example / "audit.pem")
    pipeline.write_text(pipeline.read_text() + '\n[lineage]\nsign_key = "audit.pem"\n')
    assert cli.main(["versions", "lineage", "5", "-c", str(pipeline)]) == 0
    (example / "signed.json").write_text(capsys.readouterr().out)
    command = ["versions", "lineage", "5", "-c", str(pipeline), "--verify-signature", str(example / "signed.json")]
    assert cli.main(command) == 0
    assert "is valid" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_that_is_no_key_is_refused_with_the_way_to_make_one(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "key.pem").write_bytes(content)
    with pytest.raises(SettingsError, match="openssl genpkey -algorithm ed25519"):
        sign(b"{}", path)
    other = other_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(other)
    with pytest.raises(SettingsError, match="another kind than Ed25519"):
        sign(b"{}", path)
    unknown = b"MC4CAQAwBQYDK2V/BCIEI" + b"C" + b"A" * 42  # of an unknown algorithm
    path.write_bytes(b"-----BEGIN PRIVATE KEY-----\n" + unknown + b"\n-----END PRIVATE KEY-----\n")
    for refuses in (sign, verified):
        with pytest.raises(SettingsError, match="without a password in PEM"):
            refuses(b"{}", path)
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        verified(b"{}", tmp_path / "none.pem")


@given(data=st.binary(max_size=200))
def test_no_bytes_pass_for_an_envelope(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pem"
    if not path.exists():
        private = Ed25519PrivateKey.generate()
        path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(SettingsError):
        verified(data, path)


@pytest.mark.process
def test_lineage_loads_no_torch() -> None:
    code = "import anabranch.commands.auditing.lineage, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
