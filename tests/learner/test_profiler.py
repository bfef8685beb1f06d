"""The trace of a window of steps."""

import json

import torch

from anabranch.learner.loop.profiler import ProfilerWindow
from anabranch.learner.settings.learner import ProfileSettings


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
