"""What the loop does for late labels in each step, without a join."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.evaluation.prequential import Scored
from learner.stream.batch import Batch
from learner.training.step_result import StepResult
from tests.learner.learner_bench import ROWS, LearnerBench

BLOCKS = 6
MakeBench = Callable[..., LearnerBench]


class NoLabels:
    """Late labels, none of which come; `begin` changes each batch."""

    full, most_rows = False, 100

    def __init__(self, begin: Callable[[Batch], Batch]) -> None:
        self._begin = begin

    def begin(self, batch: Batch, _partitions: object) -> Batch:
        return self._begin(batch)

    def scored(self, batch: Batch, result: StepResult) -> Scored:
        return Scored(len(batch), result.score, result.loss_new)

    def nothing(self, *_: object, **__: object) -> None:
        """There is no label."""

    advance = take = settle = search = nothing


def run(bench: LearnerBench, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Batch], Batch]) -> None:
    monkeypatch.setattr(bench.loop, "_late", NoLabels(begin))
    monkeypatch.setattr(bench.stream, "ends_time", None, raising=False)
    bench.run()
    bench.close()


def test_events_that_begin_to_wait_are_predicted_once_there_is_memory_again(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, begun = make_bench(BLOCKS), [0]

    def short_once(batch: Batch) -> Batch:
        begun[0] += 1
        if begun[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return batch

    run(bench, monkeypatch, short_once)
    assert begun == [BLOCKS + 1]
    assert bench.loop.state.rows_new == BLOCKS * (ROWS - 1)


def test_held_out_events_get_the_label_that_came_later(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, schema: Schema
) -> None:
    bench = make_bench(BLOCKS)
    late = fake_columns(schema, [5, ROWS + 5], label=[0])
    run(bench, monkeypatch, lambda batch: replace(batch, relabelled=late if bench.loop.state.steps == 2 else {}))
    assert bench.holdout.held.columns["offset"].tolist() == [block * ROWS + 5 for block in range(BLOCKS)]
    assert bench.holdout.held.columns["label"].tolist() == [0, 0, 1, 1, 1, 1]
