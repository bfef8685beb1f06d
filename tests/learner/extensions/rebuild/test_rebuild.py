"""Versions that are rebuilt: bit for bit where that is promised, and else with how far they are, and why."""

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch

from anabranch import cli
from anabranch.commands.versions.lineage import lineage_of
from anabranch.commands.versions.rebuild import learn_again
from anabranch.config.loader import load_config
from anabranch.core.files import digest_of_file
from anabranch.ingest.errors import GapError
from anabranch.ingest.reader.bounded_reader import BoundedReader
from anabranch.learner.assembly import rebuild_version
from anabranch.learner.extensions.rebuild.start import RebuildError
from anabranch.learner.object_storage.erasure_upload import ERASURES, stored_erasures
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.learner.state_dir.undo_file import OffsetRanges, UndoRecord, append_record
from anabranch.learner.versions.format import WEIGHTS
from anabranch.replay.erasure.erased_events import ByKey, ByRange, hash_of_key
from anabranch.replay.erasure.erasure_log import COMMAND, ErasureLog
from anabranch.runtime.lifecycle import Exit
from tests.learner.extensions.rebuild.audited import events

pytestmark = [pytest.mark.any_broker, pytest.mark.process, pytest.mark.timeout(300)]


def files_in(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_random_versions_of_a_learner_that_was_killed_are_rebuilt_bit_for_bit(audited, produce, monkeypatch):
    """Partitions of unlike length, bad messages, a disk tier that is ahead of its checkpoint, and two kills."""
    for partition, count in enumerate((450, 200)):
        values: list[Any] = events(count, partition)
        values[40:40] = [b"not JSON", {"x": [1.0], "y": 0, "user": "a"}]
        produce(audited.bootstrap, audited.topic, values, partition=partition)
    audited.learn(monkeypatch, 22, (6, 14), killed=True)
    audited.learn(monkeypatch, 38, (28,), killed=True)
    audited.learn(monkeypatch, 60, (50,))
    numbers = audited.versions.numbers()
    before = files_in(audited.spec.state_dir)

    chosen = random.Random(0).sample(numbers, 20)
    rebuilt = {number: audited.rebuild(number) for number in chosen}

    assert len(numbers) > 60, "steps after a kill are published again"
    assert {number: each.reasons for number, each in rebuilt.items() if not each.equal or each.reasons} == {}
    assert len({each.start.checkpoint for each in rebuilt.values()}) >= 4
    for number, each in rebuilt.items():
        assert each.distance is not None
        assert each.distance.different == each.distance.other_predictions == 0
        assert each.manifest == audited.versions.manifest(number)
    assert files_in(audited.spec.state_dir) == before


def test_a_version_before_the_first_checkpoint_is_rebuilt_from_the_start_of_the_stream(
    audited, produce, consume_all, monkeypatch
):
    """The topic was not empty when the pipeline began at its end, and no dead letter is written a second time."""
    produce(audited.bootstrap, audited.topic, events(50))
    audited.rewrite("[stream]", '[stream]\nstart = "latest"')

    def with_events(*arguments):
        produce(audited.bootstrap, audited.topic, [*events(100, 1), b"not JSON", *events(100, 2)], partition=1)

    produced = threading.Event()

    def open_first(self, *arguments, **named):
        opens(self, *arguments, **named)
        if not produced.is_set():
            produced.set()
            with_events()

    from anabranch.ingest.reader.reader import BlockReader

    opens = BlockReader.open
    monkeypatch.setattr(BlockReader, "open", open_first)
    audited.learn(monkeypatch, 20)
    letters = len(consume_all(audited.bootstrap, f"{audited.topic}.dead", at_least=1))

    rebuilt = audited.rebuild(audited.versions.numbers()[9])

    assert rebuilt.equal, rebuilt
    assert rebuilt.start.checkpoint is None
    assert audited.versions.manifest(1).learned_from == {f"{audited.topic}:0": 50, f"{audited.topic}:1": 0}
    assert len(consume_all(audited.bootstrap, f"{audited.topic}.dead", at_least=1)) == letters == 1


def test_a_version_with_features_learned_on_the_stream_is_rebuilt_bit_for_bit(audited, produce, monkeypatch):
    audited.learn_features()
    for partition in range(2):
        values = [{**event, "item": event["user"]} for event in events(250, partition)]
        produce(audited.bootstrap, audited.topic, values, partition=partition)
    audited.learn(monkeypatch, 20, (8,), killed=True)
    audited.learn(monkeypatch, 40)

    for number in (5, 15, 30):
        rebuilt = audited.rebuild(number)
        assert rebuilt.equal, rebuilt
    weights = audited.versions.weights(audited.versions.manifest(30))
    assert int(weights["learned_features.feature_item.state.totals"][3]) > 0
    assert all(weights[f"learned_features.feature_x.{name}"].any() for name in ("shift", "factor"))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_rebuild_takes_no_step_after_the_last_one_of_the_version(audited, produce, monkeypatch, batch_size):
    """One more event of each partition is read than the version has learned, which may be all that a step needs."""
    audited.rewrite("batch_size = 8", f"batch_size = {batch_size}")
    audited.rewrite("replay_ratio", 'round = "1h"\nreplay_ratio')
    for partition in range(2):
        produce(audited.bootstrap, audited.topic, events(50, partition), partition=partition)
    audited.learn(monkeypatch, 20)

    for number in (3, 8, 11, 15):
        rebuilt = audited.rebuild(number)
        assert (rebuilt.equal, rebuilt.steps) == (True, audited.versions.manifest(number).step)


def test_a_learner_calibrates_its_versions_and_a_rebuilt_one_keeps_that(audited, produce, monkeypatch):
    audited.environment = {"ANABRANCH__TASK__CALIBRATE": "platt"}
    produce(audited.bootstrap, audited.topic, events(500))
    audited.learn(monkeypatch, 45)
    first, last = (audited.versions.manifest(number).rule for number in (1, audited.versions.numbers()[-1]))
    assert first is not None
    assert (first.calibration.kind, first.calibration.rows) == ("platt", 0)
    assert last is not None
    assert last.calibration.rows >= 200
    assert last.calibration.scale < 0.9, "there is nothing to learn of these events, and the model is too sure"
    rebuilt = audited.rebuild(audited.versions.numbers()[-1])
    assert rebuilt.equal
    assert rebuilt.manifest.rule == last


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(audited, produce, monkeypatch):
    produce(audited.bootstrap, audited.topic, events(400))
    audited.learn(monkeypatch, 30, (10, 20))
    numbers = audited.checkpoints("").numbers()
    part = audited.spec.state_dir / "checkpoints" / str(numbers[-2]) / "rank-0" / "optimizer.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"!")

    rebuilt = audited.rebuild(25)

    assert rebuilt.equal
    assert rebuilt.start.checkpoint == numbers[-3]
    assert any("does not have its digest" in reason for reason in rebuilt.reasons)


def test_a_version_that_has_learned_events_erased_since_is_rebuilt_without_them(audited, produce, monkeypatch):
    produce(audited.bootstrap, audited.topic, events(400))
    audited.learn(monkeypatch, 30, (10,))
    name = f"{audited.topic}#0[0]"
    log = ErasureLog(audited.spec.state_dir / "erasures.log")
    log.append([ByKey(time=1.0, by=COMMAND, key_hash=hash_of_key(b"user-3"), up_to={name: 400})])

    rebuilt = audited.rebuild(25)

    assert not rebuilt.equal
    assert any("events were erased, and are not learned again" in reason for reason in rebuilt.reasons)
    assert rebuilt.distance is not None
    assert rebuilt.distance.max_abs > 0
    assert rebuilt.distance.worst is not None
    assert rebuilt.distance.holdout > 0


def test_on_another_host_what_was_erased_is_not_learned_again(audited, produce, monkeypatch, tmp_path):
    """With storage.mode "only", its log of erasures is in the object store."""
    audited.rewrite("[gate]", f'[storage]\nurl = "file://{tmp_path}/bucket"\nmode = "only"\n[gate]')
    produce(audited.bootstrap, audited.topic, events(200))
    audited.learn(monkeypatch, 15, (5,))
    record = ByKey(time=1.0, by=COMMAND, key_hash=hash_of_key(b"user-3"), up_to={f"{audited.topic}#0[0]": 200})
    ErasureLog(tmp_path / "erasures.log").append([record])
    storage, erasures = audited.spec.storage, stored_erasures(tmp_path)
    assert storage is not None
    assert erasures is not None
    storage.bucket.create(ERASURES, erasures)
    shutil.rmtree(audited.spec.state_dir)

    report = learn_again(load_config(audited.path), 12, None)

    assert report is not None
    assert report.rebuilt.start.checkpoint is not None, "its secret is that of the object store"
    assert any("events were erased, and are not learned again" in reason for reason in report.rebuilt.reasons)
    since = lineage_of(load_config(audited.path), 12)["predicate"]["anabranchLineage"]["erasures"]
    assert since == {"records_applied": 0, "records_since": 1}


def test_versions_from_before_and_after_an_undo_are_rebuilt_bit_for_bit(audited, produce, monkeypatch):
    produce(audited.bootstrap, audited.topic, events(400))
    audited.learn(monkeypatch, 30, (10, 20))
    state_dir, name = audited.spec.state_dir, f"{audited.topic}#0[0]"
    ranges = {name: OffsetRanges([100, 150], [120, 150])}
    append_record(state_dir, lambda number: UndoRecord(number=number, time=1.0, ranges=ranges, until={}))
    before = audited.versions.numbers()
    audited.learn(monkeypatch, 30, (25,))
    after = [number for number in audited.versions.numbers() if number not in before]

    rebuilt = {number: audited.rebuild(number) for number in (before[-2], after[0], after[-1])}

    assert {number: each.reasons for number, each in rebuilt.items() if not each.equal or each.reasons} == {}
    assert [audited.versions.manifest(number).undone for number in rebuilt] == [0, 1, 1]
    starts = [each.start.checkpoint for each in rebuilt.values()]
    assert starts[0] == starts[1] != starts[2], "the learner has returned to the first, and has made another since"
    (state_dir / "undo.json").unlink()
    with pytest.raises(RebuildError, match=r"made after undo 1, which undo\.json in state_dir does not have"):
        audited.rebuild(after[-1])


def test_a_rebuild_ends_where_erasure_has_left_too_few_events(audited, produce, monkeypatch):
    produce(audited.bootstrap, audited.topic, events(200))
    audited.learn(monkeypatch, 20)
    name = f"{audited.topic}#0[0]"
    ErasureLog(audited.spec.state_dir / "erasures.log").append(
        [ByRange(time=1.0, by=COMMAND, partition=name, first=0, last=199)]
    )

    rebuilt = audited.rebuild(12)

    assert not rebuilt.equal
    assert any("the stream has too few events: it ends at step " in reason for reason in rebuilt.reasons)


def test_events_that_retention_has_removed_are_named(audited, produce, monkeypatch):
    produce(audited.bootstrap, audited.topic, events(200))
    audited.learn(monkeypatch, 15)

    def poll(self, timeout):
        raise GapError(
            f"{audited.topic}[0]@0 and 99 offsets after it were removed by retention before they were read; x"
        )

    monkeypatch.setattr(BoundedReader, "poll", poll)
    with pytest.raises(RebuildError, match=r"version 9 .*since the start of the stream .*\[0\]@0 and 99 offsets after"):
        audited.rebuild(9)


def test_frozen_weights_come_from_the_factory_and_are_kept_with_the_version(audited, produce, monkeypatch, tmp_path):
    audited.rewrite('factory = "audited_model:build"', 'factory = "audited_model:build"\nargs = {frozen = true}')
    produce(audited.bootstrap, audited.topic, events(200))
    audited.learn(monkeypatch, 15, (5,))
    manifest, found = audited.versions.manifest(9), dict[str, Any]()

    def keep(folder, base):
        assert base is not None
        found.update(base=digest_of_file(base), weights=digest_of_file(folder / WEIGHTS))
        found["names"] = set(safetensors.torch.load_file(base))

    rebuilt = audited.rebuild(9, keep)

    assert rebuilt.equal
    assert found == {"base": manifest.base, "weights": manifest.files[WEIGHTS], "names": {"0.weight", "0.bias"}}


def test_batches_that_follow_the_arrival_of_events_are_compared_by_their_distance(audited, produce, monkeypatch):
    audited.rewrite("deterministic = true", 'deterministic = false\nmax_delay = "1ms"')
    audited.rewrite("fraction = 0.1", "fraction = 0.0")  # else each run by itself decides how many of ten users
    for partition in range(2):
        produce(audited.bootstrap, audited.topic, events(200, partition), partition=partition)
    audited.learn(monkeypatch, 25, (5,))
    manifest = audited.versions.manifest(audited.versions.numbers()[-1])

    rebuilt = audited.rebuild(manifest.number)

    assert rebuilt.equal or any("learner.deterministic is false" in reason for reason in rebuilt.reasons)
    assert rebuilt.distance is not None
    assert rebuilt.manifest.trained_through == manifest.trained_through


def test_a_rebuild_ends_where_the_topic_was_created_again_with_fewer_events(
    audited, produce, recreate_topic, monkeypatch
):
    audited.rewrite("deterministic = true", 'deterministic = false\nmax_delay = "1ms"')
    audited.rewrite("fraction = 0.1", "fraction = 0.0")  # else each run by itself decides how many of ten users
    produce(audited.bootstrap, audited.topic, events(150))
    audited.learn(monkeypatch, 13)
    recreate_topic(audited.bootstrap, audited.topic, 2)
    produce(audited.bootstrap, audited.topic, events(60, 1))

    rebuilt = audited.rebuild(audited.versions.numbers()[9])

    assert not rebuilt.equal
    assert any("the stream has too few events: it ends at step " in reason for reason in rebuilt.reasons)


def test_settings_that_have_changed_are_refused_by_their_keys(audited, produce, monkeypatch):
    produce(audited.bootstrap, audited.topic, events(100))
    audited.learn(monkeypatch, 5)
    kept = audited.path.read_text()
    for before, after, sentence in (
        (
            "batch_size = 8",
            "batch_size = 9",
            "settings have changed: learner.batch_size was 8, and is 9; set them back",
        ),
        ("seed = 3", "seed = 8", "seed was 3, and is 8"),
        ("capacity = 200", "capacity = 300", "replay.capacity was 200, and is 300"),
        ("[3]", "[4]", r"under another \[schema\]"),
        ('build"', 'build"\nargs = {width = 8}', r"with other model.args \(width\)"),
        ("deterministic = true", "replicas = 2", "learner.replicas = 2 train together, and a rebuild is one process"),
    ):
        audited.path.write_text(kept)
        audited.rewrite(before, after)
        with pytest.raises(RebuildError, match=sentence):
            audited.rebuild(3)
    audited.path.write_text(kept)
    audited.rewrite('publish_every = "0.001ms"', 'publish_every = "1h"')
    assert audited.rebuild(3).equal, "no weights depend on it"


def test_a_changed_module_and_a_manifest_of_an_older_release_are_named(audited, produce, monkeypatch):
    produce(audited.bootstrap, audited.topic, events(100))
    audited.learn(monkeypatch, 8)
    module = audited.path.with_name("audited_model.py")
    module.write_text(module.read_text() + "# changed\n")

    assert audited.rebuild(4).reasons == [
        "the file of module audited_model is not the one that the version was made with"
    ]

    path = audited.versions.directory(5) / MANIFEST
    document = msgspec.json.decode(path.read_bytes())
    for name in ("format", "origin", "learned_from", "erasures"):
        del document[name]
    path.write_bytes(msgspec.json.encode(document))
    rebuilt = audited.rebuild(5)
    assert rebuilt.equal
    assert any("of a release that did not record its settings" in reason for reason in rebuilt.reasons)


def test_a_rebuild_that_is_stopped_leaves_nothing(audited, produce, monkeypatch, tmp_path):
    produce(audited.bootstrap, audited.topic, events(200))
    audited.learn(monkeypatch, 15)
    stop, scratch = threading.Event(), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    from anabranch.learner.extensions.rebuild.rebuild import Rebuilder

    reached = Rebuilder._is_reached

    def stop_at_5(self):
        if self.learner.loop.state.steps == 5:
            stop.set()
        return reached(self)

    monkeypatch.setattr(Rebuilder, "_is_reached", stop_at_5)
    kept: list[Path] = []
    done = rebuild_version(
        audited.spec, audited.versions, audited.checkpoints, 12, stop, lambda path, _: kept.append(path)
    )
    assert done is None
    assert kept == list(scratch.iterdir()) == []


def test_the_command_compares_and_writes_a_version(audited, produce, monkeypatch, tmp_path, capsys):
    produce(audited.bootstrap, audited.topic, events(200))
    audited.learn(monkeypatch, 12, (5,))
    command = ["versions", "rebuild", "9", "-c", str(audited.path)]
    manifest = audited.versions.manifest(9)

    assert cli.main(command) == Exit.SETTINGS
    assert "add --verify to compare" in capsys.readouterr().err
    assert cli.main([*command, "--verify", "--output", str(tmp_path / "out"), "--json"]) == Exit.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], document["rebuilt"]) == (True, manifest.files[WEIGHTS])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {MANIFEST, WEIGHTS}
    assert digest_of_file(tmp_path / "out" / WEIGHTS) == manifest.files[WEIGHTS]
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == Exit.SETTINGS
    assert "is not an empty folder" in capsys.readouterr().err

    name = f"{audited.topic}#0[0]"
    log = ErasureLog(audited.spec.state_dir / "erasures.log")
    log.append([ByRange(time=1.0, by=COMMAND, partition=name, first=0, last=60)])
    assert cli.main([*command, "--verify"]) == Exit.SETTINGS
    printed = capsys.readouterr().out
    assert "NOT equal, for the reasons above" in printed
    assert "tensors" in printed
