"""What the loop does for late labels in each step, without a join."""

from dataclasses import replace

import torch

from anabranch.ingest.kafka.fake import fake_columns
from tests.learner.learner_bench import ROWS

BLOCKS = 6


def run(bench, monkeypatch, begin):
    monkeypatch.setattr(bench.loop, "_before_round", [lambda batch, _partitions: begin(batch)])
    bench.run()
    bench.close()


def test_events_that_begin_to_wait_are_predicted_once_there_is_memory_again(make_bench, monkeypatch):
    bench, begun = make_bench(BLOCKS), [0]

    def short_once(batch):
        begun[0] += 1
        if begun[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return batch

    run(bench, monkeypatch, short_once)
    assert begun == [BLOCKS + 1]
    assert bench.loop.state.rows_new == BLOCKS * (ROWS - 1)


def test_held_out_events_get_the_label_that_came_later(make_bench, monkeypatch, schema):
    bench = make_bench(BLOCKS)
    late = fake_columns(schema, [5, ROWS + 5], label=[0])
    run(bench, monkeypatch, lambda batch: replace(batch, relabelled=late if bench.loop.state.steps == 2 else {}))
    assert bench.holdout.held.columns["offset"].tolist() == [block * ROWS + 5 for block in range(BLOCKS)]
    assert bench.holdout.held.columns["label"].tolist() == [0, 0, 1, 1, 1, 1]
