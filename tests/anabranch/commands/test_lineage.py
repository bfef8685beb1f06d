"""Statements on the origin of versions: what they say, and what other tools make of them."""

import hashlib
import json
import shutil
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from anabranch import cli
from anabranch.commands.versions.lineage import lineage_of
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import VersionError
from anabranch.learner.state_dir.origin import ResumedFrom, VersionOrigin
from anabranch.learner.state_dir.undo_file import OffsetRanges, UndoRecord, append_record
from anabranch.learner.versions.format import VERSION_FORMAT, Verdict, Versions
from tests.support.manifests import manifest_of

ORIGIN = VersionOrigin(
    seed=7,
    settings={"learner.batch_size": 64},
    code={"my_model": "ab" * 32},
    packages={"python": "3.11.9", "torch": "2.9.0", "numpy": "2.1.0", "anabranch": "1.0"},
    device="cpu",
    resumed_from=ResumedFrom(3, 60),
)


@pytest.fixture
def config(example):
    return load_config(example / "pipeline.toml", {})


@pytest.fixture
def publish(config):
    """Publishes a version; `known=False`: as an earlier release did."""
    versions = Versions(config.state_dir / "versions")

    def write(number, *, known=True, **changes):
        more: dict[str, Any] = {
            "format": VERSION_FORMAT,
            "origin": ORIGIN,
            "learned_from": {"events:0": 5},
            "erasures": 0,
        }
        manifest = manifest_of(
            number,
            generation=2,
            parent=number - 1,
            time=1_700_000_000.0 + number,
            step=number * 100,
            through={"events:0": number * 10},
            metrics={"now": 0.875},
            schema=Schema(config.pipeline.events).digest,
            factory="my_model:build",
            **more if known else {},
        )
        manifest = msgspec.structs.replace(manifest, **changes)
        versions.write({"w": torch.full((3,), float(number))}, manifest, Verdict("pass", [], {"drop_new": 0.25}))
        return versions

    return write


def test_a_statement_says_where_a_version_comes_from(config, publish):
    publish(4)
    versions = publish(5)
    statement = lineage_of(config, 5)
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
    assert own["gate"] == {"verdict": "pass", "reasons": [], "numbers": {"drop_new": 0.25}, "slices": {}}
    assert own["erasures"] == {"records_applied": 0, "records_since": 0}
    assert [(each["version"], each["sha256"]) for each in own["parents"]] == [
        (5, manifest.files["model.safetensors"]),
        (4, versions.manifest(4).files["model.safetensors"]),
        (3, "unknown"),
    ]
    assert own["parents"][0]["learner_resumed_from_checkpoint"] == {"number": 3, "step": 60}


def test_versions_after_the_checkpoint_that_a_learner_resumed_from_are_no_parents(config, publish):
    """Versions 3 and 4 have learned more than the checkpoint that version 5 continues, as after a kill."""
    for number, step in ((2, 60), (3, 80), (4, 90)):
        publish(number, generation=1, step=step, parent=None if number == 2 else number - 1)
    publish(5, generation=2, step=70)  # ORIGIN names a checkpoint of step 60
    publish(6, generation=2, step=80)
    predicate = lineage_of(config, 6)["predicate"]
    assert [each["version"] for each in predicate["anabranchLineage"]["parents"]] == [6, 5, 2]
    (dependency, *_) = lineage_of(config, 5)["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert dependency["annotations"]["first_offset_after_parent"] == 21, "version 2 ends at offset 20"


@pytest.mark.timeout(60)
def test_a_parent_that_is_no_earlier_version_ends_the_list(config, publish):
    publish(4, parent=5)
    publish(5)
    assert [each["version"] for each in lineage_of(config, 5)["predicate"]["anabranchLineage"]["parents"]] == [5, 4]


def test_a_statement_lists_what_was_undone_before_the_version_and_since(config, publish):
    publish(5)
    ranges = {"events#0[0]": OffsetRanges([7, 20], [9, 20])}
    append_record(config.state_dir, lambda number: UndoRecord(number=number, time=1.0, ranges=ranges, until={}))
    publish(6, undone=1)
    stated = {number: lineage_of(config, number)["predicate"]["anabranchLineage"]["undone"] for number in (5, 6)}
    each = {"undo": 1, "time": "1970-01-01T00:00:01Z", "ranges": {"events#0[0]": [[7, 9], [20, 20]]}}
    assert stated == {5: [{**each, "applied": False}], 6: [{**each, "applied": True}]}


def test_what_an_older_release_did_not_record_is_unknown(config, publish):
    publish(5, known=False)
    predicate = lineage_of(config, 5)["predicate"]
    external = predicate["buildDefinition"]["externalParameters"]
    assert (external["seed"], external["settings"]) == ("unknown", "unknown")
    annotations = predicate["buildDefinition"]["resolvedDependencies"][0]["annotations"]
    assert (annotations["first_offset"], annotations["first_offset_after_parent"]) == ("unknown", "unknown")
    own = predicate["anabranchLineage"]
    assert own["manifest_format"] == 0
    assert own["erasures"] == {"records_applied": "unknown", "records_since": "unknown"}


def test_the_origin_in_a_manifest_keeps_its_form(publish):
    versions = publish(5)
    document = json.loads((versions.directory(5) / "manifest.json").read_bytes())
    assert document["format"] == 2
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


def test_a_version_whose_weights_are_damaged_gets_no_statement(config, publish):
    path = publish(5).directory(5) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(VersionError, match="does not have its digest"):
        lineage_of(config, 5)


def test_a_version_that_is_deleted_meanwhile_gets_no_statement(config, publish, monkeypatch):
    folder = publish(5).directory(5)
    contents = Versions.contents

    def and_delete(self, manifest):
        read = contents(self, manifest)
        shutil.rmtree(folder)
        return read

    monkeypatch.setattr(Versions, "contents", and_delete)
    with pytest.raises(SettingsError, match="version 5 cannot be read: No such file"):
        lineage_of(config, 5)


@pytest.mark.process
def test_a_printed_statement_can_be_signed_and_its_subjects_be_checked_with_other_tools(
    config, publish, tmp_path, capsys
):
    """As docs/guides/audit.md does it."""
    versions, base = publish(4), b"frozen"
    sha256 = hashlib.sha256(base).hexdigest()
    path = config.state_dir / "bases" / sha256 / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(base)
    publish(5, base=sha256)
    assert cli.main(["versions", "lineage", "5", "-c", str(config.path)]) == 0
    (tmp_path / "lineage.json").write_text(capsys.readouterr().out)
    made = "genpkey -algorithm ed25519 -out audit.pem", "pkey -in audit.pem -pubout -out audit.pub"
    signed = "pkeyutl -sign -inkey audit.pem -rawin -in lineage.json -out lineage.sig"
    verify = "pkeyutl -verify -pubin -inkey audit.pub -rawin -in lineage.json -sigfile lineage.sig"
    for arguments in (*made, signed, verify):
        subprocess.run(["openssl", *arguments.split()], cwd=tmp_path, check=True, capture_output=True)

    subjects = json.loads((tmp_path / "lineage.json").read_text())["subject"]
    sums = "".join(f"{each['digest']['sha256']}  {each['name']}\n" for each in subjects)
    check = ["sha256sum", "--check"]
    subprocess.run(check, cwd=config.state_dir, input=sums.encode(), check=True, capture_output=True)
    assert len(subjects) == 3
    (versions.directory(5) / "manifest.json").write_text("{}")
    done = subprocess.run(check, cwd=config.state_dir, input=sums.encode(), check=False, capture_output=True)
    assert b"versions/5/manifest.json: FAILED" in done.stdout


@pytest.mark.process
def test_lineage_loads_no_torch():
    code = "import anabranch.commands.versions.lineage, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
