"""How a CUDA device scores versions: resident models, chunks, streams, time, arithmetic; a recorder stands for it."""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.device import host_staging
from anabranch.learner.errors import CopyMemoryError
from anabranch.learner.evaluate import chunks, scoring
from anabranch.learner.evaluate.chunks import Chunks
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import ResidentModels, Scorer
from anabranch.learner.model.device import Precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import GateSettings, VersionsSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.publisher import Publisher, Snapshot, VersionWriter
from tests.support import cuda_recorder
from tests.support.cuda_recorder import CudaRecorder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Weights = Mapping[str, Tensor]


@pytest.fixture
def cuda():
    with CudaRecorder() as recorder:
        yield recorder


@pytest.fixture
def loads(monkeypatch):
    """How many tensors each call of `load_state_dict` has copied."""
    found: list[int] = []
    load = nn.Module.load_state_dict

    def counted(module, state, *args, **options):
        found.append(len(state))
        return load(module, state, *args, **options)

    monkeypatch.setattr(nn.Module, "load_state_dict", counted)
    return found


def held_out(schema, events):
    holdout = HoldoutSet(schema, 10_000, 0)
    holdout.add(fake_columns(schema, range(events), label=[0, 1, 2]), [TopicPartition("events", 0)])
    return holdout.held.columns


def some_weights(seed):
    torch.manual_seed(seed)
    return dict(nn.Linear(3, 3).state_dict())


def make_scorer(schema, device=CUDA, **options):
    return Scorer(nn.Linear(3, 3).to(device), Classification(), schema, device, **options)


def test_scores_on_cuda_are_those_of_the_cpu(cuda, schema):
    columns, scorer, other = held_out(schema, 300), make_scorer(schema), None
    with_cpu = make_scorer(schema, CPU)
    for seed in range(4):
        other = some_weights(seed)
        assert np.array_equal(scorer.score(other, columns), with_cpu.score(other, columns))
    cuda.check()


def test_weights_that_are_on_the_device_are_not_copied_again(cuda, schema, loads):
    columns, scorer = held_out(schema, 10), make_scorer(schema)
    served, first, second = map(some_weights, range(3))
    scorer.score(served, columns)
    scorer.keep_on_device(served)
    for candidate in (first, second, first):
        del loads[:]
        for weights in (candidate, served, candidate, served):
            scorer.score(weights, columns)
        assert len(loads) == 1, "only the candidate has to be copied"
    cuda.check()


def test_weights_of_another_model_do_not_fit(cuda, schema):
    scorer, good = make_scorer(schema), some_weights(0)
    assert scorer.fits(good)
    assert not scorer.fits({"weight": good["weight"]})
    assert not scorer.fits(good | {"more": good["bias"]})
    assert not scorer.fits(good | {"bias": torch.zeros(4)})
    columns = held_out(schema, 10)
    assert np.array_equal(scorer.score(good, columns), make_scorer(schema, CPU).score(good, columns))


def test_large_weights_are_copied_in_chunks(cuda, schema, monkeypatch):
    for module in (scoring, host_staging):
        monkeypatch.setattr(module, "CHUNK_BYTES", 20)
    calls: list[int] = []
    scorer, columns = make_scorer(schema, before_chunk=lambda: calls.append(len(cuda.log))), held_out(schema, 10)
    weights, expected = some_weights(3), make_scorer(schema, CPU)
    assert np.array_equal(scorer.score(weights, columns), expected.score(weights, columns))
    assert len(calls) == 2 + 1 + 1, "two pieces of the weight, the bias, and the events"
    assert not scorer.fits(weights | {"weight": torch.zeros(4, 3)})
    assert not scorer.fits(weights | {"bias": torch.zeros(4)})
    cuda.check()


def test_at_most_two_models_are_on_the_device_and_one_where_a_second_does_not_fit(cuda, schema, monkeypatch):
    columns, scorer, one = held_out(schema, 10), make_scorer(schema), 4 * 12
    assert scorer.device_bytes == one
    for seed in range(4):
        scorer.score(some_weights(seed), columns)
    assert scorer.device_bytes == 2 * one
    narrow, expected = make_scorer(schema), make_scorer(schema, CPU)

    def fail(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("anabranch.learner.evaluate.scoring.copy_sharing_base", fail)
    for seed in range(4):
        weights = some_weights(seed)
        assert np.array_equal(narrow.score(weights, columns), expected.score(weights, columns))
    assert narrow.device_bytes == one


def test_no_chunk_starts_before_a_request_is_answered(cuda, schema):
    launched: list[int] = []
    scorer = make_scorer(schema, before_chunk=lambda: launched.append(len(cuda.log)))
    scorer.score(some_weights(0), held_out(schema, 200))
    first, *others = launched
    # Called once before the weights are copied, and once before each chunk, of 64, 128 and 8 events.
    assert len(launched) == 4
    operations = [after - before for before, after in zip([first, *others], [*others, len(cuda.log)], strict=True)]
    assert all(operations)


def test_a_chunk_that_takes_long_makes_the_next_one_smaller(cuda, schema, monkeypatch):
    """The device takes 1 ms an event: 64, then 32 ... until a chunk takes no more than 10 ms."""
    sizes: list[int] = []
    monkeypatch.setattr(cuda_recorder.FakeEvent, "elapsed_time", lambda *_: float(sizes[-1]))

    class Sized(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    scorer = Scorer(Sized(3, 3).to(CUDA), Classification(), schema, CUDA)
    sizes.append(0)
    scorer.score(some_weights(0), held_out(schema, 150))
    assert sizes[1:] == [64, 32, 16, *[8] * 4, 6]


def test_small_chunks_grow_while_the_device_is_quick(cuda):
    found = Chunks(CUDA)
    for _ in range(20):
        with found.timed(found.rows):
            pass
    assert found.rows == chunks._MOST_ROWS
    found.limit(48)
    for _ in range(3):
        with found.timed(found.rows):
            pass
    assert found.rows == 48, "more did not fit into memory"


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_after_a_shortage_chunks_grow_again_and_more_slowly_after_each_that_follows(cuda, monkeypatch, device):
    monkeypatch.setattr(chunks, "_FITS", 10)
    monkeypatch.setattr(chunks, "_FIRST_ROWS", chunks._MOST_ROWS)
    found = Chunks(device)

    def until(rows):
        """Return how many chunks fit before they have `rows` events."""
        count = 0
        while found.rows < rows:
            count += 1
            with found.timed(found.rows):
                pass
        return count

    for rows in (512, 256, 128):
        found.limit(rows)
    assert until(256) == 10
    found.limit(128)
    assert until(256) == 20
    assert until(chunks._MOST_ROWS) == 40


def test_the_time_of_scoring_is_that_of_its_kernels(cuda, monkeypatch):
    monkeypatch.setattr(cuda_recorder.FakeEvent, "elapsed_time", lambda *_: 250.0)
    monkeypatch.setattr("anabranch.learner.evaluate.chunks.time.thread_time", lambda: 1 / 0)
    found = Chunks(CUDA)
    for _ in range(3):
        with found.timed():
            pass
    assert found.seconds() == 0.75


def test_on_a_cpu_it_is_that_of_the_core(monkeypatch):
    monkeypatch.setattr("anabranch.learner.evaluate.chunks.time.thread_time", lambda: 7.0)
    assert Chunks(CPU).seconds() == 7


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", None)])
def test_scores_are_computed_in_the_arithmetic_of_training(schema, name, dtype):
    seen: list[torch.dtype] = []

    class Task(Classification):
        def score(self, output_B, label_B):
            seen.append(output_B.dtype)
            return super().score(output_B, label_B)

    inside: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(3, 3))
    scorer = Scorer(model, Task(), schema, CPU, Precision(name, dtype))
    scorer._models._resident[0][0].get_submodule("0").register_forward_hook(lambda *args: inside.append(args[2].dtype))
    scorer.score(model.state_dict(), held_out(schema, 10))
    assert inside == [dtype or torch.float32]
    assert seen == [torch.float32]


class Bench:
    """A publisher whose scorer is on a CUDA device, and whose holdout set grows."""

    def __init__(self, path, schema):
        self.model = nn.Linear(3, 3).to(CUDA)
        self.scorer = Scorer(self.model, Classification(), schema, CUDA)
        self.versions, self.schema, self.step = Versions(path), schema, 0
        self.holdout = HoldoutSet(schema, 400, 0)
        reference = reference_to(ModelSettings(factory="m:build"))
        settings = GateSettings.model_validate({"min_rows": 100})
        self.gate = QualityGate(self.versions, settings, self.scorer, reference)
        metrics = LearnerMetrics(CollectorRegistry())
        writer = VersionWriter(self.versions, reference, schema, 1)
        self.publisher = Publisher(writer, self.gate, VersionsSettings(), metrics.gate_verdicts)

    def publish(self, weights):
        self.step += 1
        self.holdout.add(
            fake_columns(self.schema, range(200 * self.step, 200 * self.step + 200), label=[0, 1, 2]),
            [TopicPartition("events", 0)],
        )
        snapshot = Snapshot(
            self.step, weights, {"events:0": PartitionProgress(self.step)}, self.holdout.held, None, RecordTimes()
        )
        self.publisher.publish_last((self.step, ()), lambda: snapshot, Deadline(timedelta(seconds=60)))


def test_a_version_copies_no_weights_twice_and_its_own_alone_where_the_served_one_is_the_best(
    cuda, tmp_path, schema, monkeypatch
):
    loaded: list[Weights] = []
    load = ResidentModels._load
    monkeypatch.setattr(ResidentModels, "_load", lambda models, *args: (loaded.append(args[1]), load(models, *args))[1])
    bench, counts = Bench(tmp_path / "versions", schema), list[tuple[int, str | None]]()
    good, bad = some_weights(0), {"weight": torch.zeros(3, 3), "bias": torch.full((3,), torch.nan)}
    for weights in (good, good, good, bad, bad, good):
        del loaded[:]
        bench.publish({name: tensor.clone() for name, tensor in weights.items()})
        assert len({id(each) for each in loaded}) == len(loaded), "weights were copied, replaced, and copied again"
        counts.append((len(loaded), bench.publisher.verdict))
    first, second, *others = counts
    assert [first, second] == [(1, "inconclusive"), (1, "pass")]
    # From now on the first version is the best one: it is compared too, on the events that have come since.
    assert [verdict for _, verdict in others] == ["pass", "fail", "fail", "pass"]
    assert max(count for count, _ in others) <= 3
    cuda.check()


def test_nothing_of_a_version_stays_on_the_device_but_in_the_two_models(cuda, tmp_path, schema):
    bench = Bench(tmp_path / "versions", schema)
    copied = {name: tensor.to(CUDA) for name, tensor in some_weights(0).items()}
    bench.publish(copied)
    copied.clear()
    bench.publish({name: tensor.to(CUDA) for name, tensor in some_weights(1).items()})
    cuda.check()
    assert cuda.live_bytes == 3 * 48, "the model and two copies of it"


@pytest.mark.parametrize("where", ["take", "score"])
def test_a_version_for_which_there_is_no_memory_is_skipped_and_the_next_one_published(
    tmp_path, schema, where, monkeypatch
):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with CudaRecorder():
        bench = Bench(tmp_path / "versions", schema)
        with monkeypatch.context() as patch:
            if where == "take":
                patch.setattr(HoldoutSet, "held", property(lambda _: (_ for _ in ()).throw(CopyMemoryError(error))))
                patch.setattr(Bench, "publish", _publish_lazily)
            else:
                patch.setattr(Scorer, "score_and_find", lambda *_: (_ for _ in ()).throw(error))
            bench.publish(some_weights(0))
        assert bench.publisher.problem is not None
        assert "no version could be made, for lack of memory: CUDA out of memory" in bench.publisher.problem
        assert bench.versions.numbers() == []
        bench.publish(some_weights(0))
        assert bench.publisher.problem is None
        assert bench.versions.numbers() == [1]


def _publish_lazily(bench, weights):
    take: Callable[[], Any] = lambda: SimpleNamespace(weights=weights, holdout=bench.holdout.held)  # noqa: E731
    bench.publisher.publish_last((1, ()), take, Deadline(timedelta(seconds=60)))


def test_a_watch_without_memory_is_left_out(tmp_path, schema, monkeypatch, cuda):
    bench = Bench(tmp_path / "versions", schema)
    error = RuntimeError("CUDA error: out of memory")
    monkeypatch.setattr(QualityGate, "monitor", lambda *_: (_ for _ in ()).throw(error))
    bench.publisher.watch(bench.holdout)
    bench.publisher._background.wait()
    bench.publisher._background.raise_bug()
    assert bench.publisher.problem is not None
    assert "not monitored now" in bench.publisher.problem


def test_scoring_waits_for_its_own_stream_alone(cuda, schema):
    scorer, before = make_scorer(schema), len(cuda.log)
    scorer.score(some_weights(0), held_out(schema, 100))
    used = Counter(entry.stream for entry in cuda.log[before:] if entry.kind in {"op", "copy"})
    assert torch.cuda.default_stream() not in used
    assert len(used) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
def test_a_gpu_scores_as_a_cpu_does(schema, name, dtype):
    columns = held_out(schema, 3000)
    scorer, expected = make_scorer(schema, precision=Precision(name, dtype)), make_scorer(schema, CPU)
    for seed in range(4):
        weights = some_weights(seed)
        assert abs(scorer.score(weights, columns).mean() - expected.score(weights, columns).mean()) < 0.02
    assert scorer.seconds() > 0
