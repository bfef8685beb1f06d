"""Each allocation of a publish and of a checkpoint runs out of memory: nothing ends, and the next one is written."""

from datetime import timedelta

import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.checkpoints.checkpointer import CapturedState, Checkpointer
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import CheckpointSettings, GateSettings, VersionsSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.publisher import Publisher, Snapshot, VersionWriter
from tests.learner.device.test_host_staging import CUDA, make_trainer, step
from tests.support.cuda_recorder import CudaRecorder

SOON = timedelta(seconds=60)


class FailingDevice(CudaRecorder):
    """Raises out of memory at one operation that allocates, on the device or page-locked on the host."""

    def __init__(self, **options):
        super().__init__(**options)
        self.allocations = 0
        self.fails_at = 0

    def operate(self, func, args, kwargs):
        if not any(returned.alias_info for returned in func._schema.returns) and func._schema.returns:
            self.allocations += 1
            if self.allocations == self.fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().operate(func, args, kwargs)

    def fail_at(self, number):
        self.allocations, self.fails_at = 0, number


@pytest.fixture(params=[80 << 30, 0], ids=["with room for clones", "without room"])
def device(request):
    with FailingDevice(memory=request.param) as recorder:
        yield recorder


def each_allocation(device, work):
    """Yield after each run of `work`, of which the n-th fails at its n-th allocation, until none is left."""
    number = 0
    while not number or device.allocations >= device.fails_at:
        number += 1
        device.fail_at(number)
        work()
        found, device.fails_at = device.allocations, 0
        yield number
        device.allocations, device.fails_at = found, number
    assert number > 5, "few allocations were seen"


@pytest.mark.slow
def test_a_publish(device, tmp_path, schema):
    trainer = make_trainer(schema, CUDA, layers=1)
    scorer = Scorer(trainer.model, Classification(), schema, CUDA)
    versions, reference = Versions(tmp_path / "versions"), reference_to(ModelSettings(factory="m:build"))
    gate = QualityGate(versions, GateSettings.model_validate({"min_rows": 10}), scorer, reference)
    verdicts = LearnerMetrics(CollectorRegistry()).gate_verdicts
    publisher = Publisher(VersionWriter(versions, reference, schema, 1), gate, VersionsSettings(), verdicts)
    holdout, steps = HoldoutSet(schema, 60, 0), 0

    def publish():
        nonlocal steps
        steps += 1
        scorer._chunks.limit(64)  # an earlier run has made it smaller
        columns = fake_columns(schema, range(50 * steps, 50 * steps + 50), label=[0, 1, 2])
        holdout.add(columns, [TopicPartition("events", 0)])
        publisher.publish_last(
            (steps, ()),
            lambda: Snapshot(
                steps, trainer.snapshot(), {"events:0": PartitionProgress(1)}, holdout.held, None, RecordTimes()
            ),
            Deadline(SOON),
        )
        publisher.watch(holdout)
        publisher._background.wait()

    for number in each_allocation(device, publish):
        publish()
        assert publisher.problem is None, number
        assert versions.manifest(max(versions.numbers())).step == steps, number
    device.check()


@pytest.mark.slow
def test_a_checkpoint(device, tmp_path, schema):
    trainer = make_trainer(schema, CUDA, "ewc", layers=1)
    step(trainer, schema)
    checkpoints = Checkpoints(tmp_path / "checkpoints", "schema", 1)
    metrics, settings = LearnerMetrics(CollectorRegistry()), CheckpointSettings()
    checkpointer = Checkpointer(checkpoints, settings, metrics.checkpoint, metrics.checkpoint_stall)

    def checkpoint():
        checkpointer.request()
        checkpointer.checkpoint(lambda: CapturedState(1, trainer.tensors(), {}))
        checkpointer.wait(Deadline(SOON))

    for number in each_allocation(device, checkpoint):
        checkpoint()
        assert checkpointer.problem is None, number
        assert checkpointer.number == max(checkpoints.numbers()), number
        step(trainer, schema)
    device.check()
