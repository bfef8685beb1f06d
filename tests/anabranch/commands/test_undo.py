"""What `anabranch undo` plans, and what it refuses before anything is changed."""

import dataclasses
import shutil
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from anabranch.commands.undo.command import carry_out
from anabranch.commands.undo.plan import plan_undo
from anabranch.commands.undo.selection import Selection, select
from anabranch.config.loader import Config, load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import FakeClient, FakePartition
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.search.stream_search import StreamSearch
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.learner.checkpoints.format import FORMAT, Checkpoint, Checkpoints
from anabranch.learner.state_dir.undo_file import NAME, read_undo
from anabranch.learner.status.report import LearnerReport, PartitionReport, write_report
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.versions.format import RegistryState, Versions
from anabranch.serving.rollout.commands import promote, version_before
from tests.learner.extensions.undo.undo_bench import NAMES, UndoBench

COUNT = 600


class RetainingClient(FakeClient):
    """A broker that has removed the first offsets of its partitions."""

    def first_offsets(self, partitions, start, moment):
        return {name: self._of(name).end if start == "latest" else self._of(name).start for name in partitions}


@pytest.fixture
def broker(monkeypatch):
    """Has two partitions of COUNT offsets."""
    client = RetainingClient({name: FakePartition(end=COUNT) for name in NAMES})
    monkeypatch.setitem(CLIENTS, "kafka-python", lambda _: client)
    return client


@pytest.fixture
def pipeline(broker, write_pipeline):
    """A pipeline with an empty state directory."""
    config = load_config(write_pipeline("localhost:9", "payments", ""), {})
    config.state_dir.mkdir()
    return config


@pytest.fixture
def config(pipeline):
    """A pipeline with a checkpoint at offset 200 of each partition and one at the end, with a version for each."""
    config = pipeline
    features = {"x": {"dtype": "float32", "shape": [3]}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))
    for count in (200, COUNT):
        bench = UndoBench(config.state_dir, schema, count)
        bench.run()
        bench.finish()
        bench.close()
    return config


def plan(config, **options):
    return plan_undo(config, Selection(**options), lambda read, total: None)


def test_the_plan_names_the_tainted_versions_and_the_checkpoint_before(config):
    made = plan(config, offsets=["payments[0]@300..310", "payments[0]@311..320", "payments[1]@599..599"])
    assert {name: (each.firsts, each.lasts) for name, each in made.ranges.items()} == {
        "payments#0[0]": ([300], [320]),
        "payments#0[1]": ([599], [599]),
    }
    versions = Versions(config.state_dir / "versions")
    through = {each: versions.manifest(each).trained_through["payments:0"].offset for each in versions.numbers()}
    assert [each.version for each in made.tainted] == [each for each, offset in through.items() if offset >= 300]
    assert [each.requests for each in made.tainted] == [None]
    assert made.checkpoint == 1
    assert not (config.state_dir / NAME).exists()


def test_times_choose_messages_by_themselves_where_they_are_out_of_order():
    """An offset splits the stream elsewhere: of late messages it would take too many, or leave some out."""
    begin, minute = 1_700_000_000_000, 60_000
    times = [begin + n * minute + (3 * minute + 1 if n % 4 == 0 else 0) for n in range(60)]

    class Disordered(FakeClient):
        def first_offsets(self, partitions, start, moment):
            at = 0 if moment is None else moment.timestamp() * 1000
            found = next((offset for offset, time in enumerate(times) if time >= at), 60)
            return dict.fromkeys(partitions, 60 if start == "latest" and moment is None else found)

        def _messages(self, partition, limit):
            messages = super()._messages(partition, limit)
            return dataclasses.replace(messages, times_ms=[times[offset] for offset in messages.offsets])

    client = Disordered({TopicPartition("payments", 0): FakePartition(dict.fromkeys(range(60), b""), 60)})
    settings = StreamSettings.model_validate({"topics": ["payments"]}).resolved("p")
    since, until = (datetime.fromtimestamp((begin + at * minute) / 1000, UTC) for at in (20, 40))
    expected = [offset for offset, at in enumerate(times) if since.timestamp() <= at / 1000 < until.timestamp()]
    config = cast("Config", SimpleNamespace(pipeline=SimpleNamespace(stream=settings)))
    for producers in ((), ("trace=30",)):
        with StreamSearch(settings, client) as search:
            selection = Selection(producers=producers, since=since.isoformat(), until=until.isoformat())
            chosen, _ = select(config, selection, {}, lambda: search, lambda *_: None)
        (ranges,) = chosen.values()
        pairs = zip(ranges.firsts, ranges.lasts, strict=True)
        offsets = [offset for first, last in pairs for offset in range(first, last + 1)]
        assert offsets == ([30] if producers else expected)


def test_an_undo_of_a_stream_that_is_gone_says_from_when_on_it_can(config, broker):
    for partition in broker.topics.values():
        partition.start = 250
    with pytest.raises(
        SettingsError, match=r"has payments#0\[\d\]@\d+\.\.249 no longer.*came after checkpoint 2, made"
    ):
        plan(config, offsets=["payments[0]@300..310"])
    for partition in broker.topics.values():
        partition.start = COUNT + 1
    with pytest.raises(SettingsError, match="no event that was learned can be undone now; nothing was changed"):
        plan(config, offsets=["payments[0]@300..310"])


def with_files(write_pipeline, passed, *counts, identity=True):
    """Return a pipeline with a history, and a checkpoint at each of these offsets, of which `passed` files are read."""
    columns = '\nidentity = {partition = "p", offset = "o"}' * identity
    path = write_pipeline("localhost:9", "payments", f'[stream.backfill]\nfiles = ["/files/*.parquet"]{columns}\n')
    config = load_config(path, {})
    shutil.rmtree(config.state_dir, ignore_errors=True)
    config.state_dir.mkdir()
    digest = Schema(config.pipeline.events).digest
    for number, count in enumerate(counts, 1):
        accounts = [PartitionLedger(name, 0) for name in (*NAMES, TopicPartition("history", 0, 0, 1))]
        for account, offset in zip(accounts, (count, count, passed), strict=True):
            account.position = Position(offset)
        state = {"ledger": [account.state() for account in accounts]}
        checkpoints = Checkpoints(config.state_dir / "checkpoints", digest, 1)
        checkpoints.write(number, Checkpoint(count, {}, state), float(count))
    read = PartitionReport(0, COUNT, COUNT, 0, 0, 0, 0, COUNT - 1, seen_through=COUNT - 1)
    partitions = dict.fromkeys(map(str, NAMES), read)
    report = LearnerReport(pid=1, generation=1, started=1.0, time=1.0, steps=1, partitions=partitions)
    write_report(config.state_dir, report)
    return config


def test_what_the_broker_has_no_longer_is_read_again_from_files_that_have_it(broker, write_pipeline):
    for partition in broker.topics.values():
        partition.start = 250
    config = with_files(write_pipeline, 0, 200, COUNT)
    assert plan(config, offsets=["payments[0]@300..310"]).checkpoint == 1
    with pytest.raises(SettingsError, match="name what to undo by --offsets"):
        plan(config, since="2026-07-03")
    config = with_files(write_pipeline, 1, 200, COUNT)
    with pytest.raises(SettingsError, match=r"has payments#0\[\d\]@200\.\.249 no longer"):
        plan(config, offsets=["payments[0]@300..310"])


def test_what_was_learned_and_is_not_searched_for_a_selection_is_said(broker, write_pipeline):
    """The broker has removed a part of the topics, and files never were in them."""
    parts = ["payments#0[0]@0..249", "payments#0[1]@0..249", "the files of [stream.backfill]"]
    config = with_files(write_pipeline, 9, 400, COUNT, identity=False)
    for partition in broker.topics.values():
        partition.start, partition.messages = 250, dict.fromkeys(range(250, COUNT), b"")
    made = plan(config, producers=["trace=500"])
    assert made.ranges.keys() == {"payments#0[0]", "payments#0[1]"}
    assert made.document()["unsearched"] == parts
    assert any(f"no longer or never had them: {', '.join(parts)};" in each for each in made.sentences())
    with pytest.raises(SettingsError, match=r"is of that selection.*: payments#0\[0\]@0\.\.249, .* files of"):
        plan(config, producers=["trace=none"])
    assert plan(config, offsets=["payments[0]@500..510"]).unsearched == []


def test_an_undo_for_which_a_history_would_be_learned_again_is_refused(broker, write_pipeline):
    config = with_files(write_pipeline, 9, 400, COUNT, identity=False)
    with pytest.raises(SettingsError, match=r"every checkpoint .* the history of \[stream.backfill\] would be learned"):
        plan(config, offsets=["payments[0]@300..310"])
    assert plan(config, offsets=["payments[0]@500..510"]).checkpoint == 1


def test_a_tainted_version_that_is_pinned_has_to_be_unpinned_first(config):
    versions = Versions(config.state_dir / "versions")
    versions.write_state(RegistryState(serving=max(versions.numbers()), pinned=max(versions.numbers())))
    with pytest.raises(SettingsError, match="is pinned, and has seen events"):
        plan(config, offsets=["payments[0]@300..310"])


@pytest.mark.parametrize("chosen", [False, True], ids=["served", "replaced"])
def test_no_rollback_returns_to_a_tainted_version(config, chosen):
    versions = Versions(config.state_dir / "versions")
    clean, *_, tainted = versions.numbers()
    before = RegistryState(serving=tainted)
    if chosen:  # a person has replaced it already
        before = promote(before, clean, versions.numbers())
    versions.write_state(before)
    carry_out(config, dataclasses.replace(plan(config, offsets=["payments[0]@300..310"]), clean=clean), timedelta())
    after = msgspec.structs.replace(versions.state(), serving=clean)
    assert tainted in after.rolled_back
    assert version_before(after, versions.numbers(), [clean]) is None


def test_an_undo_counts_those_before_to_which_no_learner_has_returned_yet(config):
    """The newest version and checkpoint have not seen what the second is for, and are tainted by the first."""
    first = plan(config, offsets=["payments[0]@300..310"])
    carry_out(config, first, timedelta())
    second = plan(config, offsets=["payments[1]@700..710"])
    assert second.tainted == []
    assert (second.clean, second.checkpoint) == (first.clean, 1)
    carry_out(config, second, timedelta())
    assert [each.number for each in read_undo(config.state_dir)] == [1, 2]


def test_a_checkpoint_of_another_release_is_named(config):
    manifest = config.state_dir / "checkpoints" / "2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 11'))
    with pytest.raises(SettingsError, match=rf"checkpoint 2 .* is of format 11, and this release reads {FORMAT}"):
        plan(config, offsets=["payments[0]@300..310"])


def test_nothing_is_recorded_once_the_learner_has_deleted_the_checkpoint_of_the_plan(config):
    made = plan(config, offsets=["payments[0]@300..310"])
    shutil.rmtree(config.state_dir / "checkpoints" / "1")
    with pytest.raises(SettingsError, match="nothing was changed: run the command again"):
        carry_out(config, made, timedelta())
    assert not (config.state_dir / NAME).exists()
    again = plan(config, offsets=["payments[0]@300..310"])
    assert again.checkpoint == 0
    assert carry_out(config, again, timedelta()).number == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "name what to undo by"),
        ({"offsets": ["payments[0]@1"], "since": "2026-07-03"}, "name what to undo by"),
        ({"until": "2026-07-03"}, "--until needs --since"),
        ({"keys": ["a"]}, r"--key needs \[schema.key\]"),
        ({"producers": ["build"]}, "is not of the form NAME=VALUE"),
        ({"since": "yesterday", "until": "2026-07-03"}, "is not a time"),
        ({"since": "2026-07-04", "until": "2026-07-03"}, "is after --until"),
        ({"offsets": ["payments@1"]}, "is not of the form"),
        ({"producers": ["trace=none"]}, "no event in the topics is of that selection"),
    ],
)
def test_a_selection_that_cannot_be_meant_is_refused(pipeline, options, said):
    with pytest.raises(SettingsError, match=said):
        plan(pipeline, **options)


def test_the_broker_is_asked_in_the_thread_that_ctrl_c_ends_and_only_once_the_selection_is_valid(
    config, broker, monkeypatch
):
    threads: list[threading.Thread] = []
    monkeypatch.setattr(broker, "open", lambda: threads.append(threading.current_thread()))
    with pytest.raises(SettingsError, match="is not of the form"):
        plan(config, offsets=["payments@1"])
    assert not threads
    plan(config, offsets=["payments[0]@300..310"])
    assert threads == [threading.current_thread()]


def test_events_of_files_and_topics_are_undone_by_offsets_alone(broker, write_pipeline):
    assert broker.topics
    config = with_files(write_pipeline, 9, 400, COUNT)
    with pytest.raises(SettingsError, match="name what to undo by --offsets"):
        plan(config, since="2026-07-03")
    plan(config, offsets=["payments[0]@500..510"])


def test_an_object_store_is_refused(broker, write_pipeline):
    path = write_pipeline("localhost:9", "payments", '[storage]\nurl = "s3://bucket/prefix"\n')
    with pytest.raises(SettingsError, match=r"undo does not go with \[storage\]"):
        plan(load_config(path, {}), offsets=["payments[0]@300..310"])
