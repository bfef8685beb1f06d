"""Spans of the learner, as a collector gets them, with links to what they cause; the profile of a window of steps."""

import dataclasses
import json
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch

from anabranch.core.tracing.settings import TracingSettings
from anabranch.core.tracing.spans import tracing
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.loop.profiler import ProfilerWindow
from anabranch.learner.settings.learner import ProfileSettings
from anabranch.learner.stream.batches import Batches
from anabranch.learner.stream.round_robin import RoundRobin
from tests.learner.learner_bench import NAME, ROWS


def context(number):
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


def link(number):
    return f"{number + 1:032x}", f"{number + 1:016x}"


def with_contexts(poll):
    """Give the first event of each block the context of the block's number, and a held-out one the next."""

    def traced(timeout):
        if (block := poll(timeout)) is None:
            return None
        number = int(block.columns["offset"][0]) // ROWS
        return dataclasses.replace(block, contexts=[(0, context(10 * number)), (5, context(10 * number + 1))])

    return traced


def test_a_learner_traces_its_steps_versions_and_checkpoints(make_bench, collector, tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.core.tracing.provider._LONGEST_END", timedelta(minutes=1))
    bench = make_bench(3)
    bench.stream.poll = with_contexts(bench.stream.poll)  # type: ignore[method-assign]
    settings = TracingSettings(sample=0)
    left_out: Counter[str] = Counter()
    with tracing(settings, "learner", tmp_path, lambda why, n: left_out.update({why: n})):
        bench.run()
        bench.finish()
    steps = collector.named("train", 3)
    assert [each.links for each in steps] == [[link(10 * n), link(10 * n + 1)] for n in range(3)]
    assert steps[0].attributes == {
        "messaging.system": "kafka",
        "messaging.operation.name": "train",
        "messaging.operation.type": "process",
        "messaging.batch.message_count": ROWS - 1,
        "messaging.destination.name": NAME.topic,
        "anabranch.step": 0,
    }
    assert {(each.kind, each.parent) for each in steps} == {(5, "")}
    versions, gates = collector.named("publish"), collector.named("gate")
    assert versions[-1].attributes == {"anabranch.step": 3, "anabranch.version": len(versions)}
    assert [(each.parent, each.attributes) for each in gates] == [
        (version.id, {"anabranch.verdict": "inconclusive"}) for version in versions
    ]
    assert collector.named("checkpoint")[-1].attributes["anabranch.step"] == 3
    assert not left_out


def test_without_tracing_contexts_cost_nothing_and_change_nothing(make_bench, collector):
    bench = make_bench(2)
    bench.stream.poll = with_contexts(bench.stream.poll)  # type: ignore[method-assign]
    bench.run()
    bench.finish()
    assert bench.loop.state.steps == 2
    assert collector.spans == []


@pytest.mark.parametrize("size", [1, 7, ROWS - 1, 2 * ROWS])
@pytest.mark.parametrize("in_turns", [False, True])
def test_each_context_is_of_the_batch_that_has_its_event(make_bench, size, in_turns):
    stream: Any = make_bench(4).stream
    stream.poll = with_contexts(stream.poll)
    stream.partitions = [Partition(NAME, 0, 4 * ROWS)]
    batches = RoundRobin(stream, size, lambda _: 0) if in_turns else Batches(stream, size, timedelta(hours=1))
    stop, came = threading.Event(), {}
    stream.stop = stop
    while (batch := batches.next(stop)) is not None:
        offsets = {int(offset) for span in batch.spans for offset in span.columns["offset"]}
        for each in batch.contexts:
            came[each] = offsets
    block_of = {context(10 * n): n * ROWS for n in range(4)} | {context(10 * n + 1): n * ROWS + 5 for n in range(4)}
    assert all(block_of[each] in offsets for each, offsets in came.items())
    assert in_turns or set(came) == set(block_of)


def run(tracing, steps):
    for step in steps:
        tracing.step(step)
        torch.ones(8, 8).matmul(torch.ones(8, 8))
    tracing.close()


def test_one_window_is_written_and_no_more(tmp_path):
    run(ProfilerWindow(ProfileSettings(start=3, steps=4), tmp_path), range(20))
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "steps-3-7.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("aten::matmul") == 4


def test_a_window_has_whole_rounds(tmp_path):
    run(ProfilerWindow(ProfileSettings(start=3, steps=4), tmp_path), [1, 2, 9, 12, 17, 20])
    assert [trace.name for trace in (tmp_path / "traces").iterdir()] == ["steps-9-17.json"]


def test_a_window_that_is_over_or_cut_short_is_not_written(tmp_path):
    run(ProfilerWindow(ProfileSettings(start=3, steps=4), tmp_path), range(10, 20))
    run(ProfilerWindow(ProfileSettings(start=3, steps=4), tmp_path), range(5))
    run(ProfilerWindow(None, tmp_path), range(5))
    assert not (tmp_path / "traces").exists()


def test_a_disk_that_cannot_be_written_to_costs_the_trace_alone(tmp_path):
    (tmp_path / "traces").write_text("in the way")
    run(ProfilerWindow(ProfileSettings(start=0, steps=2), tmp_path), range(5))
    assert (tmp_path / "traces").is_file()
