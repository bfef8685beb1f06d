"""The checkpointer and the background erasure with events that wait for labels."""

import errno
import os
from datetime import timedelta

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.checkpoints.background_erasure import BackgroundErasure
from anabranch.learner.checkpoints.checkpointer import CapturedState, Checkpointer
from anabranch.learner.settings.learner import CheckpointSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.replay.erasure.erased_events import ByRange
from anabranch.replay.erasure.erasure_log import ErasureLog
from tests.learner.extensions.late_labels.joins import (
    JoinBench,
    drain,
    events,
    labels,
    oldest_open,
    options,
    predictions,
)

DEADLINE = timedelta(seconds=30)
NAME = TopicPartition("events", 0)
LEDGER = [{"topic": "events", "partition": 0, "incarnation": 0, "history": 0}]


class Run(JoinBench):
    """A join whose checkpoints are written by a checkpointer."""

    def start(self):
        settings = CheckpointSettings(every=timedelta(hours=1), keep=2)
        metrics = LearnerMetrics(CollectorRegistry())
        self.checkpointer = Checkpointer(
            self.checkpoints, settings, metrics.checkpoint, metrics.checkpoint_stall, [self.part]
        )

    def capture_state(self):
        return CapturedState(1, {"model": {"w": torch.zeros(1)}}, {"ledger": LEDGER})

    def save(self):
        self.checkpointer.request()
        self.checkpointer.checkpoint(self.capture_state)
        self.checkpointer.wait(Deadline(DEADLINE))


@pytest.fixture
def make_run(tmp_path):
    def make(size=2**20):
        run = Run(tmp_path, options(bytes=size))
        run.start()
        return run

    return make


def add(run, begin, end):
    offsets = list(range(begin, end))
    run.join.add_events(events(offsets, offsets, [1000] * len(offsets)), predictions(offsets))


def label(run, begin, end):
    count = end - begin
    run.join.add_labels(labels(range(begin, end), [1] * count, [1000] * count))


def assert_the_second_links_segments_of(run, part):
    first, second = (set(run.checkpoints.manifest(number).files) for number in (1, 2))
    assert f"rank-0/segment-{part}-1.safetensors" in first & second
    assert f"rank-0/segment-{part}-2.safetensors" in second


def test_checkpoints_have_the_waiting_events_and_link_their_segments(make_run):
    run = make_run()
    add(run, 1, 101)
    run.save()
    add(run, 101, 104)
    label(run, 1, 3)
    run.save()
    assert_the_second_links_segments_of(run, "labels")
    run.restart()
    assert [row[0] for row in drain(run.join)] == [1, 2]
    label(run, 50, 104)
    assert [row[0] for row in drain(run.join)] == list(range(50, 104))


def test_kept_labels_are_written_once_and_match_after_restarts(make_run):
    run = make_run()
    label(run, 1, 1001)
    run.save()
    label(run, 1001, 1004)
    add(run, 1, 3)
    run.save()
    assert_the_second_links_segments_of(run, "kept")
    assert (run.checkpoints.path / "2" / "rank-0" / "labels.safetensors").stat().st_size < 4 * 1004
    run.restart()
    assert [row[0] for row in drain(run.join)] == [1, 2]
    label(run, 1, 3)  # duplicates, since the state of a label is restored
    assert run.join.counts.duplicate_labels == 2
    add(run, 990, 1004)
    assert [row[0] for row in drain(run.join)] == list(range(990, 1004))
    run.join.advance(10_000)  # all labels expire, and their numbers are used again
    run.start()
    run.checkpointer.number = 2
    label(run, 5000, 5010)
    run.save()
    run.restart()
    assert len(run.join.labels) == 10


def test_checkpoints_have_what_became_of_events_and_where_labels_are(tmp_path):
    bench = JoinBench(tmp_path, options(take_back=True))
    offsets = [1, 2, 3]
    bench.join.add_events(events(offsets, offsets, [1000] * 3), predictions(offsets), np.array([True, False, False]))
    bench.checkpoint()
    bench.join.advance(1101)
    assert bench.join.take(3) is not None
    bench.join.settle(np.array([True, True, True]), stored=np.array([False, True, False]))
    bench.join.add_labels(labels([1, 2, 7], [1, 1, 1], [1150] * 3, offset=40))
    bench.checkpoint()
    bench.restart()
    assert oldest_open(bench.join, 1) == {1: 40}
    ready = bench.join.take(3)
    assert ready is not None
    assert ready.columns["offset"].tolist() == [1, 2]
    assert (ready.early.tolist(), ready.stored.tolist()) == ([True, False], [False, True])
    bench.join.settle()
    assert oldest_open(bench.join, 1) == {1: 42}


def test_labels_of_a_damaged_segment_alone_are_lost(make_run):
    run = make_run()
    label(run, 1, 101)
    run.save()
    label(run, 101, 104)
    run.save()
    for number in (1, 2):
        path = run.checkpoints.path / str(number) / "rank-0" / "segment-kept-1.safetensors"
        path.unlink()
        path.write_bytes(b"torn")
    run.restart()
    assert len(run.join.labels) == 3
    run.start()
    run.save()
    run.restart()
    add(run, 1, 104)
    assert [row[0] for row in drain(run.join)] == [101, 102, 103]


def test_after_a_checkpoint_that_was_not_written_the_next_has_all_events(make_run, monkeypatch):
    run = make_run()
    add(run, 1, 101)
    run.save()

    def fails(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run.checkpoints, "write", fails)
        add(run, 101, 104)
        run.save()
    assert "could not be written" in str(run.checkpointer.problem)
    label(run, 1, 51)
    drain(run.join)
    run.save()
    assert "rank-0/segment-labels-3.safetensors" in run.checkpoints.manifest(3).files
    assert "rank-0/segment-labels-1.safetensors" not in run.checkpoints.manifest(3).files
    run.restart()
    label(run, 51, 104)
    assert [row[0] for row in drain(run.join)] == list(range(51, 104))


def test_a_checkpoint_starts_early_when_slots_wait_for_it(make_run):
    run = make_run(2**14)
    add(run, 1, 91)
    run.save()
    assert not run.checkpointer.is_due()
    label(run, 1, 91)
    drain(run.join)
    add(run, 91, 105)
    assert run.checkpointer.is_due()
    for _ in range(3):
        run.checkpointer.checkpoint(run.capture_state)
        run.checkpointer.wait(Deadline(DEADLINE))
    assert not run.checkpointer.is_due()


def test_a_background_erasure_overwrites_what_no_checkpoint_refers_to(make_run, tmp_path):
    run = make_run()
    add(run, 1, 11)
    label(run, 3, 6)
    drain(run.join)  # the rows of these are left in the file
    run.save()
    log = ErasureLog(tmp_path / "erasures.log")
    log.refresh()
    erasure = BackgroundErasure(log, run.checkpoints, run.checkpointer)
    log.append([ByRange(time=0.0, by="command", partition=partition_name(NAME), first=3, last=4)])
    run.join.erase(lambda columns: log.erased.covers(np.array([0], np.uint64), columns))
    erasure.finish(1, Deadline(DEADLINE))
    assert (erasure.through, erasure.problem) == (1, None)
    content = (run.folder / run.join.payload.tier.file.name).read_bytes()
    left = [offset for offset in range(1, 11) if events([offset], [1], [0])["feature.x"].tobytes() in content]
    assert left == [1, 2, 6, 7, 8, 9, 10]
    run.restart()
    label(run, 6, 11)
    assert [row[0] for row in drain(run.join)] == [6, 7, 8, 9, 10]


def test_a_checkpoint_that_begins_during_an_erasure_loses_no_event(make_run, tmp_path):
    run = make_run()
    add(run, 1, 11)
    run.save()
    log = ErasureLog(tmp_path / "erasures.log")
    log.refresh()
    erasure = BackgroundErasure(log, run.checkpoints, run.checkpointer)
    log.append([ByRange(time=0.0, by="command", partition=partition_name(NAME), first=3, last=4)])
    run.join.erase(lambda columns: log.erased.covers(np.array([0], np.uint64), columns))
    erasure.advance(1)  # the checkpoints are rewritten, and the slots that they name are found
    run.checkpointer.wait(Deadline(DEADLINE))
    add(run, 11, 31)
    run.save()
    label(run, 5, 31)
    drain(run.join)
    erasure.finish(1, Deadline(DEADLINE))
    assert (erasure.through, erasure.problem) == (1, None)
    run.restart()
    label(run, 1, 31)
    assert [row[0] for row in drain(run.join)] == [1, 2, *range(5, 31)]
    assert run.join.counts.damaged == 0


def test_a_checkpoint_that_fails_while_slots_wait_for_it_is_not_tried_again_at_once(make_run, monkeypatch):
    run = make_run(2**14)
    add(run, 1, 91)
    run.save()
    label(run, 1, 91)
    drain(run.join)
    add(run, 91, 110)
    assert run.checkpointer.is_due()

    def fails(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(type(run.checkpoints), "write", fails)
        run.save()
    assert "could not be written" in str(run.checkpointer.problem)
    assert run.join.payload.needs_checkpoint
    assert not run.checkpointer.is_due()
    run.save()
    assert run.checkpointer.problem is None
    assert run.checkpointer.is_due()
