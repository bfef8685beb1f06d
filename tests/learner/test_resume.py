"""A learner that restores a checkpoint continues as the original, bit for bit."""

import threading
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.shutdown import Deadline
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.backfill.files import FileMark
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.assembly import learn
from anabranch.learner.checkpoints.format import RANK, Checkpoint, Checkpoints
from anabranch.learner.errors import CheckpointError
from anabranch.learner.loop.resume import ResumePoint, check_stream
from anabranch.learner.object_storage.opening import holder_of, lease_storage, record_mode
from anabranch.learner.settings.learner import DeviceSharingSettings, LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.learner.strategies.der import DarkReplayPlus
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.train.setup import TrainingSetup
from anabranch.replay.erasure.erasure_log import ErasureLog
from anabranch.replay.settings import ReplaySettings
from anabranch.testing.stores import add_now, sample_of
from tests.learner.learner_bench import CPU, NAME, ROWS, TIERS, each_tier
from tests.learner.learner_spec import learner_spec
from tests.support.strategies import small_strategy
from tests.support.waiting import PATIENCE

POLICIES = {
    **{sampling: {"sampling": sampling} for sampling in ("class-balanced", "recent", "loss")},
    **{f"{admission} kept": {"admission": admission} for admission in ("class-balanced", "recent")},
}


@pytest.mark.parametrize(
    ("replay", "policies"),
    [
        *(pytest.param(tiers, {}, id=name) for name, tiers in TIERS.items()),
        *(
            pytest.param(TIERS["disk with a small cache"], policies, id=f"{name}, disk with a small cache")
            for name, policies in POLICIES.items()
        ),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make_bench, replay, policies):
    """Weights, running statistics, optimizer, dropout's generator, samples, holdout set, ledger and windows."""
    replay = {**replay, **policies}
    uninterrupted = make_bench(60, replay=policies)
    uninterrupted.run()
    interrupted = make_bench(25, replay=replay)
    interrupted.run()
    interrupted.finish()
    interrupted.close()
    resumed = make_bench(60, replay=replay)
    resumed.resume()
    assert resumed.loop.state.steps == 25
    resumed.run()
    for name, value in uninterrupted.trainer.snapshot().items():
        assert torch.equal(resumed.trainer.snapshot()[name], value), name
    for name, value in uninterrupted.trainer.tensors()["optimizer"].items():
        assert torch.equal(resumed.trainer.tensors()["optimizer"][name], value), name
    assert resumed.loop.ledger.state() == uninterrupted.loop.ledger.state()
    assert resumed.loop.monitor.prequential.state() == uninterrupted.loop.monitor.prequential.state()
    assert (resumed.loop.state.rows_new, resumed.loop.state.rows_replay) == (
        uninterrupted.loop.state.rows_new,
        uninterrupted.loop.state.rows_replay,
    )
    assert all(
        (resumed.holdout.held.columns[name] == column).all()
        for name, column in uninterrupted.holdout.held.columns.items()
    )


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"er", "progressive"}))
@pytest.mark.slow
def test_a_resumed_run_of_any_strategy_equals_the_uninterrupted_one_bit_for_bit(make_bench, name):
    def make():
        return small_strategy(name, **({"every": 7} if name in {"ewc", "lwf"} else {}))

    uninterrupted = make_bench(40, strategy=make())
    uninterrupted.run()
    interrupted = make_bench(17, strategy=make())
    interrupted.run()
    interrupted.finish()
    interrupted.close()
    resumed = make_bench(40, strategy=make())
    resumed.resume()
    resumed.run()
    for part, tensors in uninterrupted.trainer.tensors().items():
        assert tensors.keys() == resumed.trainer.tensors()[part].keys()
        for key, value in tensors.items():
            assert torch.equal(resumed.trainer.tensors()[part][key], value), (part, key)
    assert resumed.trainer.state() == uninterrupted.trainer.state()
    assert resumed.loop.monitor.prequential.state() == uninterrupted.loop.monitor.prequential.state()


@pytest.mark.slow
def test_a_resumed_run_has_the_replay_ratio_and_drift_of_the_uninterrupted_one(make_bench, monkeypatch):
    """So are the learning rate and the replay ratio that a drift has raised."""
    monkeypatch.setattr("anabranch.learner.evaluate.replay_ratio._SURE", 0)
    drifts_at = 40 * ROWS  # from then on the model forgets the old labels
    learner = {
        "replay_ratio": "auto",
        "old_weight": 1.0,
        "optimizer": {"lr": 0.02},
        "drift": {"actions": ["raise-lr", "raise-replay"], "delta": 0.999, "steps": 20},
    }
    uninterrupted = make_bench(110, learner=learner)
    uninterrupted.stream.drifts_at = drifts_at
    uninterrupted.run()
    interrupted = make_bench(60, replay=TIERS["disk with a small cache"], learner=learner)
    interrupted.stream.drifts_at = drifts_at
    interrupted.run()
    interrupted.finish()
    interrupted.close()
    resumed = make_bench(110, replay=TIERS["disk with a small cache"], learner=learner)
    resumed.resume()
    assert resumed.loop.state.steps == 60
    resumed.stream.drifts_at = drifts_at
    resumed.run()
    assert uninterrupted.loop.state.rows_replay > 0, "nothing is replayed in either run"
    assert resumed.loop.state.rows_replay == uninterrupted.loop.state.rows_replay
    assert resumed.loop.monitor.ratio.state() == uninterrupted.loop.monitor.ratio.state()
    assert resumed.loop.monitor.drift.state() == uninterrupted.loop.monitor.drift.state()
    for name, value in uninterrupted.trainer.snapshot().items():
        assert torch.equal(resumed.trainer.snapshot()[name], value), name


def test_the_progress_of_a_checkpoint_without_a_version_is_published_after_a_crash(make_bench):
    soon = Deadline(PATIENCE)
    bench = make_bench(25)
    bench.run()
    bench.checkpointer.checkpoint_last(bench.loop.state.capture, soon)
    bench.publisher._background.wait(soon)
    assert bench.versions.manifest(1).step < 25
    bench.close()
    resumed = make_bench(25)
    resumed.resume()
    resumed.run()
    resumed.finish()
    manifest = resumed.versions.manifest(2)
    assert (manifest.step, manifest.trained_through["events:0"].offset) == (25, 25 * ROWS - 1)
    resumed.close()
    again = make_bench(25)
    again.resume()
    again.run()
    again.finish()
    assert again.versions.numbers() == [1, 2]


@pytest.mark.slow
def test_a_restart_with_few_free_slots_writes_checkpoints_before_its_first_step(make_bench, schema):
    """As after a crash before a checkpoint that would have freed slots was written."""
    replay = {"capacity": 3000, "disk": {"bytes": "177kB"}}
    bench = make_bench(120, replay=replay)
    bench.run()
    bench.finish()
    far = 10**6
    while bench.store.slots.free >= 5:
        add_now(bench.store, fake_columns(schema, range(far, far + 5)), [NAME])
        far += 5
    bench.finish()
    bench.close()
    resumed = make_bench(130, replay=replay)
    resumed.resume()
    assert resumed.store.slots.free < ROWS / 4
    resumed.run()
    assert resumed.store.lost == 0


def test_a_checkpoint_of_another_model_is_refused(make_bench):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    other = make_bench(4, model=lambda: nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        other.resume()


def test_a_new_learning_rate_applies_after_a_restart(make_bench):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    resumed = make_bench(4)
    for group in resumed.trainer.update.optimizer.param_groups:
        group["lr"] = 0.5
    resumed.resume()
    assert [group["lr"] for group in resumed.trainer.update.optimizer.param_groups] == [0.5]


def test_a_checkpoint_of_a_strategy_with_other_columns_is_refused(make_bench, schema, tmp_path):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    bench.close()
    (tmp_path / "refused_model.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(3, 3)\n")
    deployment = _deployment(tmp_path, schema, strategy="der")
    sentence = r'"der" requires an output of shape \[3\] with each stored event, and checkpoint 1 has no output of the'
    with pytest.raises(SettingsError, match=sentence):
        learn(deployment, threading.Event())


@pytest.mark.process
def test_a_learner_that_is_stopped_while_it_fetches_its_state_ends_in_order(make_bench, schema, tmp_path, monkeypatch):
    deployment, stop = _stored_deployment(tmp_path, schema), threading.Event()
    download = Bucket.download

    def stopping(self, path, to):
        stop.set()
        download(self, path, to)

    monkeypatch.setattr(Bucket, "download", stopping)
    learn(deployment, stop)
    assert stop.is_set()
    assert not list((tmp_path / "b" / "checkpoints").iterdir())
    assert b'"released":true' in Bucket(f"file://{tmp_path}/bucket", {}).read("head.json")


def test_without_storage_a_learner_does_not_begin_where_mode_only_has_ended(schema, tmp_path):
    deployment = _stored_deployment(tmp_path, schema)
    record_mode(deployment.state_dir, "s3://bucket/prefix")
    with pytest.raises(SettingsError, match=r'is in s3://bucket/prefix, by storage\.mode = "only", and there is no'):
        learn(deployment.with_changes(storage=None), threading.Event())


def _stored_deployment(folder, schema):
    """Return a learner without state, and leave a checkpoint of another host in its object store."""
    (folder / "refused_model.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(3, 3)\n")
    storage, other, state_dir = StorageSettings(url=f"file://{folder}/bucket"), folder / "a", folder / "b"
    with lock_state_directory(other) as generation, lease_storage(storage, other, generation) as held:
        stored = Checkpoints(other, schema.digest, generation, held.checkpoints)
        stored.write(1, Checkpoint(1, {"model": {"w": torch.ones(9)}}, {}), 1.0)
    state_dir.mkdir()
    holder_of(state_dir)
    return _deployment(folder, schema, strategy="er").with_changes(state_dir=state_dir, storage=storage)


def test_a_strategy_restores_the_checkpoint_of_another_without_its_state(make_bench, caplog):
    interrupted = make_bench(17, strategy=STRATEGIES["ewc"]())
    interrupted.run()
    interrupted.finish()
    interrupted.close()
    resumed = make_bench(20, strategy=STRATEGIES["lwf"]())
    with caplog.at_level("INFO"):
        resumed.resume()
    assert "made under the strategy ElasticWeights: Distillation starts without state" in caplog.text
    resumed.run()
    assert resumed.loop.state.steps == 20


class RecordingStrategy(DarkReplayPlus):
    """DER++ that records the output of the model for each new event, by its features."""

    def __init__(self):
        super().__init__()
        self.outputs: dict[tuple[float, ...], list[float]] = {}

    def after_step(self, new, output_B):
        self.outputs |= {
            tuple(x.tolist()): output.tolist() for x, output in zip(new.features["x"], output_B, strict=True)
        }


@each_tier
def test_the_store_keeps_the_output_of_the_model_for_an_event_when_it_was_new(make_bench, replay):
    """Also after a restart. Events without a label have no output."""
    strategy = RecordingStrategy()
    interrupted = make_bench(8, replay=replay, strategy=strategy)
    interrupted.stream.unlabelled = {2, 6}
    interrupted.run()
    interrupted.finish()
    interrupted.close()
    resumed = make_bench(14, replay=replay, strategy=strategy)
    resumed.resume()
    resumed.run()
    sample = sample_of(resumed.store, 0, len(resumed.store))
    known = 0
    for x, output, labelled in zip(
        *(sample.columns[name] for name in ("feature.x", "output", "labelled")), strict=True
    ):
        assert bool(output.isnan().all()) != bool(labelled)
        assert not labelled or output.tolist() == strategy.outputs[tuple(x.tolist())]
        known += int(labelled)
    assert len(resumed.store) > known > 200


def test_checkpoints_that_were_moved_away_are_restored_once_they_are_back(make_bench, schema, tmp_path):
    disk = TIERS["disk with a small cache"]
    bench = make_bench(12, replay=disk)
    bench.run()
    bench.finish()
    held = _held(bench.store)
    bench.close()
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.before")
    for _ in range(2):  # two starts without a checkpoint
        _open_without_checkpoint(tmp_path, schema, disk).close()
    files = sorted(path.name for path in (tmp_path / "replay" / RANK).iterdir())
    assert files == ["1.rows.before", "2.rows"]
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.second")
    (tmp_path / "checkpoints.before").rename(tmp_path / "checkpoints")
    again = make_bench(14, replay=disk)
    again.resume()
    assert _held(again.store) == held
    assert again.store.lost == 0
    again.run()
    again.finish()
    assert again.loop.state.steps == 14


def _deployment(path, schema, strategy, replay=None):
    options = {"strategy": strategy, "batch_size": ROWS - 1, "max_delay": "1ms"}
    return learner_spec(
        path,
        schema.settings,
        ModelSettings(factory="refused_model:build"),
        learner=LearnerSettings.model_validate(options),
        replay=ReplaySettings.model_validate({"capacity": 300, **(replay or {})}),
        device_sharing=DeviceSharingSettings(policy="exclusive"),
    )


def _open_without_checkpoint(path, schema, replay):
    """Open the store as a learner without a checkpoint does."""
    checkpoints, written = Checkpoints(path / "checkpoints", schema.digest, 1), ErasureLog(path / "erasures.log")
    parts = SimpleNamespace(strategy=STRATEGIES["er"](), schema=schema, device=CPU, kept_outputs={}, embedding=None)
    resumed = ResumePoint.newest(checkpoints, written)
    store = resumed.store(
        _deployment(path, schema, "er", replay), cast("TrainingSetup", parts), 1, StreamSecret.fixed(0)
    )
    assert resumed.first
    assert store is not None
    checkpoints.path.mkdir(exist_ok=True)
    return store


def _held(store):
    """Return the rows of the events held, by offset."""
    entries = store.event_table.copy()
    rows, valid = store.tiers.primary.read(
        entries["slot"].astype(np.int64), store.event_table.identity(entries["slot"])
    )
    assert valid.all()
    return dict(zip(entries["offset"].tolist(), map(bytes, rows.numpy()), strict=True))


def test_a_restart_after_a_crash_before_the_first_step_has_the_first_start_positions(make_bench):
    bench = make_bench(4)
    bench.stream.partitions = [Partition(NAME, 7 * ROWS, 9 * ROWS)]
    bench.loop.begin(bench.stop, [])
    bench.close()
    again = make_bench(4)
    again.stream.partitions = [Partition(NAME, 9 * ROWS, 9 * ROWS)]  # the offsets of stream.start by then
    assert again.found is not None
    assert again.found[1].begins
    again.loop.restore(again.found[1])
    assert {name: position.offset for name, position in again.loop.ledger.positions.items()} == {NAME: 7 * ROWS}
    again.loop.begin(again.stop, [])
    assert again.checkpoints.numbers() == [1]
    again.stream.next = 7
    again.stream.blocks = 9
    again.run()
    again.finish()
    assert again.checkpoints.numbers() == [1, 2]
    assert again.loop.ledger.positions[NAME].offset == 9 * ROWS


@pytest.mark.parametrize(("identity", "rows"), [(False, 100), (True, 1)])
def test_the_history_may_be_removed_from_the_settings_once_it_is_read(identity, rows):
    def checkpoint(*positions):
        accounts = [PartitionLedger(TopicPartition("history", file, 0, 1), 0) for file in range(len(positions))]
        for account, offset in zip(accounts, positions, strict=True):
            account.position = Position(offset)
            account.mark = PartitionFingerprint(FileMark("a", 9, "tag", 100, identity=identity).encoded())
        events = PartitionLedger(TopicPartition("events", 0), 0)
        events.end = 1000
        return 7, SimpleNamespace(state={"ledger": [each.state() for each in (*accounts, events)]})

    without = StreamSettings.model_validate({"topics": ["events"]})
    check_stream(without, None)
    check_stream(without, checkpoint())
    check_stream(without, checkpoint(rows, rows))
    sentence = "checkpoint 7 has 1 of 2 files of the history that are not read to their end, and there is no"
    with pytest.raises(SettingsError, match=sentence):
        check_stream(without, checkpoint(rows, rows - 1))
    files = {"files": ["/x/*.parquet"]}
    check_stream(StreamSettings.model_validate({"topics": ["events"], "backfill": files}), checkpoint(0, 0))
