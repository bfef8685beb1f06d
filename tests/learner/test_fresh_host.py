"""A learner on a host that has only the checkpoints continues as the original, bit for bit."""

import shutil

import numpy as np
import pytest
import torch

from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.hold_out import held_out
from anabranch.ingest.events.identity import partition_base
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.checkpoints.format import ROWS, Checkpoints
from anabranch.learner.object_storage.head import HEAD, decode_head
from anabranch.learner.settings.learner import GateSettings
from anabranch.replay.tiers.disk_files import read_header
from tests.learner.learner_bench import TIERS
from tests.pipelines import LINEAR, adds_up, events, write_pipeline
from tests.support.ports import first_free_port
from tests.support.s3 import S3Prefix
from tests.support.waiting import TAKES_MINUTES

DISK = TIERS["disk with a small cache"]


@pytest.mark.slow
@pytest.mark.parametrize("policies", [{}, {"sampling": "loss", "admission": "class-balanced"}], ids=["even", "by loss"])
def test_a_learner_on_a_fresh_host_equals_the_uninterrupted_one_bit_for_bit(make_bench, tmp_path, policies):
    """Weights, optimizer, samples and ledger, over two fresh hosts, one after a checkpoint that has only changes."""
    replay = {**DISK, **policies}
    uninterrupted = make_bench(45, replay=policies)
    uninterrupted.run()
    for blocks in (20, 30):
        bench = make_bench(blocks, replay=replay, complete=True)
        if bench.found is not None:
            bench.resume()
        bench.run(bench.checkpointer.request)
        bench.finish()
        bench.close()
        files = bench.checkpoints.manifest(bench.checkpoints.numbers()[-1]).files
        assert [name for name in files if ROWS in name]
        (file,) = (tmp_path / "replay").rglob("*.rows")
        own = [number for number in bench.checkpoints.numbers() if bench.found is None or number > bench.found[0]]
        assert [number for number, _ in read_header(file).intact] == own, "those that may be restored, and no others"
        shutil.rmtree(tmp_path / "replay")
    resumed = make_bench(45, replay=replay, complete=True)
    resumed.resume()
    assert resumed.loop.state.steps == 30
    resumed.run()
    for name, value in uninterrupted.trainer.snapshot().items():
        assert torch.equal(resumed.trainer.snapshot()[name], value), name
    for name, value in uninterrupted.trainer.tensors()["optimizer"].items():
        assert torch.equal(resumed.trainer.tensors()["optimizer"][name], value), name
    assert resumed.loop.ledger.state() == uninterrupted.loop.ledger.state()
    assert resumed.loop.state.rows_replay == uninterrupted.loop.state.rows_replay
    assert resumed.store.lost == 0


BATCH, GATE = 8, GateSettings(holdout_fraction=0.1, holdout_rows=100)
REST = f"""
batch_size = {BATCH}
deterministic = true
replay_ratio = 2.0
[checkpoints]
every = "200ms"
[versions]
publish_every = "1s"
[gate]
holdout_fraction = {GATE.holdout_fraction}
holdout_rows = {GATE.holdout_rows}
[replay]
capacity = 1000
device_bytes = "8kB"
disk = {{bytes = "1MB"}}
"""


def trained_in_full_batches(topic, count):
    """Return how many of the first events of a topic a deterministic learner trains on; the name decides the others."""
    none_N = np.zeros(count, np.uint64)
    columns = {"offset": np.arange(count), "row": none_N, "key_hash": none_N, "group_hash": none_N}
    base_N = np.full(count, partition_base(TopicPartition(topic, 0)), np.uint64)
    return (count - int(held_out(GATE.hold_out(StreamSecret.fixed(0)), columns, base_N).sum())) // BATCH * BATCH


@pytest.mark.any_broker
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["folder", pytest.param("s3", marks=TAKES_MINUTES)])
def test_a_learner_whose_host_is_lost_equals_one_that_was_never_killed(
    server, kafka, make_topic, produce, start, request, tmp_path
):
    """SIGKILL, and nothing is left but the pipeline file and the object store: weights bit for bit, each event once."""
    topic, count = make_topic(), 6000
    produce(kafka.bootstrap, topic, events(count))

    def pipeline_in(name, more):
        (folder := tmp_path / name).mkdir()
        status = f"127.0.0.1:{first_free_port()}"
        return write_pipeline(folder, kafka.bootstrap, topic, REST + more, model=LINEAR, status=status)

    prefix = request.getfixturevalue("s3") if server == "s3" else S3Prefix(f"file://{tmp_path}/bucket", {})
    bucket, storage = prefix.bucket, f'[storage]\nlease = "4s"\n{prefix.toml}'
    learner = start(lost := pipeline_in("lost", storage))
    number = learner.wait_for(lambda each: each.steps > 150 and (each.checkpoint or 0) > 1).checkpoint or 0
    # No later one comes where all was learned before this process went on.
    learner.until(lambda: max(decode_head(bucket, bucket.read(HEAD)).checkpoints, default=0) >= number)
    learner.kill()
    shutil.rmtree(lost.parent)
    weights, outcomes, trained = [], [], trained_in_full_batches(topic, count)
    for config in (pipeline_in("fresh", storage), pipeline_in("never killed", "")):
        learner = start(config)
        report = learner.wait_for(lambda each: each.outcomes["trained"] == trained)
        assert learner.stop() == 0
        outcomes.append(report.outcomes)
        assert adds_up(report)
        assert report.replay_lost == 0
        assert report.replay_rows["disk"] >= 1000
        checkpoints = Checkpoints(learner.state_dir / "checkpoints", "", 1)
        weights.append(checkpoints.part(max(checkpoints.numbers()), "model"))
        said = learner.log.read_text()
        assert ("events are restored from checkpoint" in said) == (config.parent.name == "fresh")
    assert outcomes[0] == outcomes[1]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name
