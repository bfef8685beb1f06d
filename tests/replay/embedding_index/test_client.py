"""The index process, real, as the learner's side sees it and as its command line starts it."""

import errno
import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from anabranch.core.backoff import Backoff
from anabranch.core.state_metrics import StateCollector, metrics_of
from anabranch.replay.embedding_index import client as neighbours
from anabranch.replay.embedding_index import process
from anabranch.replay.embedding_index.client import IndexStats, NeighbourClient
from anabranch.replay.embedding_index.protocol import NO_ID, IndexMessage, MessageType
from tests.support.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[3]
DIM = 4


@pytest.fixture
def make_index(monkeypatch):
    """`make_index(dim=DIM, capacity=100_000, **options)`, open, and reporting without a pause."""
    monkeypatch.setattr(neighbours, "_REPORT_SECONDS", 0.0)
    made: list[NeighbourClient] = []

    def make(dim=DIM, capacity=100_000, **options):
        made.append(NeighbourClient(dim, capacity, **options))
        made[-1].open()
        return made[-1]

    yield make
    for index in made:
        index.close()


@pytest.fixture
def index(make_index):
    return make_index()


def settled(index):
    """Return the statistics once all requests so far are done."""
    seen = index.reports
    # The first report may have been asked for before; one after the other is made after all else that is said.
    wait_until(lambda: index.stats() and index.reports >= seen + 2, "two reports")
    return wait_until(lambda: (s := index.stats()).waiting <= 1 and not s.process.renewing and s, "the index to settle")


def add(index, ids, x, step=0):
    taken = 0
    while taken < len(ids):
        taken += index.add(rows(ids[taken:]), x[taken:], step)


def rows(numbers):
    """Return ids of events in rows of these numbers."""
    return numbers << 32 | 5


def ask(index, queries, k, step=0):
    wait_until(lambda: index.query(step, queries, k), "a question to be taken")
    (answer,) = wait_until(index.answers, "an answer")
    assert answer.step == step
    return np.where(answer.ids == NO_ID, NO_ID, answer.ids >> 32)


def random(n, dim=DIM, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim), np.float32)


def clustered(n, dim, seed):
    centres = 3 * random(100, dim, 99)
    rng = np.random.default_rng(seed)
    return centres[rng.integers(100, size=n)] + rng.standard_normal((n, dim), np.float32)


def exact(queries, x, k):
    return np.argsort(((queries[:, None] - x[None]) ** 2).sum(axis=2), axis=1, kind="stable")[:, :k]


def test_the_nearest_come_first_and_missing_ones_have_no_id(index):
    ids = np.array([7, 3, 62])
    add(index, ids, np.array([[0, 0, 0, 3], [0, 0, 0, 1], [0, 0, 0, 2]], np.float32))
    settled(index)
    assert ask(index, np.zeros((1, DIM), np.float32), 4).tolist() == [[3, 62, 7, NO_ID]]


def test_an_empty_index_answers(index):
    assert ask(index, random(2), 3, step=5).tolist() == [[NO_ID] * 3] * 2


@st.composite
def histories(sample):
    ids = st.lists(st.integers(0, 12), min_size=1, max_size=12)
    history = []
    for _ in range(sample(st.integers(1, 8))):
        chosen = sample(ids)
        points = sample(st.lists(st.integers(-5, 5), min_size=len(chosen) * DIM, max_size=len(chosen) * DIM))
        what = sample(st.sampled_from(["add", "add", "remove"]))
        history.append((what, np.array(chosen), np.array(points, np.float32).reshape(-1, DIM)))
    return history


def test_a_small_index_is_exact_whatever_was_added_replaced_and_removed(index):
    query = np.zeros((1, DIM), np.float32)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(histories())
    def holds(history):
        known: dict[int, np.ndarray] = {}
        for what, ids, points in history:
            if what == "add":
                add(index, ids, points)
                known |= dict(zip(ids.tolist(), points, strict=True))
            else:
                index.remove(rows(ids))
                known = {each: point for each, point in known.items() if each not in ids}
        assert settled(index).process.rows == len(known)
        found = ask(index, query, 5)[0]
        found = found[found != NO_ID]
        assert len(set(found.tolist())) == len(found) == min(5, len(known))
        distances = [float((known[each] ** 2).sum()) for each in found.tolist()]
        assert distances == sorted(float((point**2).sum()) for point in known.values())[:5]
        index.remove(rows(np.arange(13)))

    holds()


def test_many_events_are_stored_in_lists_and_still_found(make_index):
    index, dim, n = make_index(dim=16, clusters=32), 16, 30_000
    x, queries = clustered(n, dim, 1), clustered(64, dim, 2)
    add(index, np.arange(n), x)
    stats = wait_until(lambda: (s := settled(index)).process.lists > 1 and s, "lists")
    assert stats.process.rows == n
    assert stats.process.trained_rows >= 20_000
    assert stats.process.bytes / n < 2 * dim + 8 + 120
    found, expected = ask(index, queries, 10), exact(queries, x, 10)
    assert np.mean([np.isin(w, f).mean() for w, f in zip(expected, found, strict=True)]) >= 0.9
    # One query of a request is judged, and one alone may find eight of ten.
    later = itertools.cycle(queries[:, None])
    wait_until(
        lambda: ask(index, next(later), 10).size and index.stats().process.recall >= 0.9, "a recall of many queries"
    )


def test_lists_erase_what_was_removed_and_know_what_was_replaced(make_index):
    index, dim, n = make_index(dim=8, clusters=16), 8, 24_000
    x = clustered(n, dim, 1)
    add(index, np.arange(n), x)
    wait_until(lambda: settled(index).process.lists > 1, "lists")
    index.remove(rows(np.arange(0, n, 2)))
    moved = x[1::2] + 100
    add(index, np.arange(1, n, 2), moved, step=3)
    stats = settled(index)
    assert stats.process.rows == n // 2
    assert stats.pending_removals == 0
    queries = np.concatenate([x[:32], moved[:32]])
    found = ask(index, queries, 5)
    assert (found % 2 == 1).all()
    assert found[32:, 0].tolist() == list(range(1, 65, 2))


def test_clusters_are_sent_once_there_are_enough_events_and_again_when_all_have_changed(make_index):
    index = make_index(clusters=8, capacity=10_000)
    assert index.clusters() is None
    x = random(400)
    add(index, np.arange(400), x)
    first = wait_until(lambda: index.clusters(), "clusters")
    assert first.centroids.shape == (8, DIM)
    assert np.abs(first.centroids).max() < 10
    assert set((first.ids >> 32).tolist()) <= set(range(400))
    assert set(first.assigned.tolist()) <= set(range(8))
    for _ in range(4):
        add(index, np.arange(400), x + 100, step=1)
    second = wait_until(
        lambda: (c := index.clusters()) and c.number > first.number and c.centroids.min() > 50 and c, "new ones"
    )
    assert second.centroids.shape == (8, DIM)


@pytest.mark.parametrize("value", [0.0, 3e4, 1e14, 1e-30])
def test_embeddings_that_are_all_the_same_can_be_had(make_index, value):
    index = make_index(clusters=4)
    add(index, np.arange(25_000), np.full((25_000, DIM), value, np.float32))
    wait_until(lambda: settled(index).process.trained_rows >= 20_000, "training")
    assert (ask(index, np.full((1, DIM), value, np.float32), 3) >= 0).all()


def test_malformed_embeddings_are_left_out_and_counted(index):
    x = random(5)
    x[0, 1], x[1, 0], x[2, 3] = np.nan, np.inf, -1e30
    add(index, np.array([0, 1, 2, 3, NO_ID]), x)
    stats = settled(index)
    assert (stats.process.rows, stats.malformed) == (1, 4)
    assert ask(index, x, 2).tolist() == [[NO_ID] * 2] * 3 + [[3, NO_ID]] * 2
    assert stats.restarts == 0


def test_embeddings_of_another_model_are_refused(index):
    with pytest.raises(ValueError, match=r"embeddings are \[3, 5\], not \[3, 4\]"):
        index.add(np.arange(3), random(3, 5), 0)
    with pytest.raises(ValueError, match=r"queries are \[3, 5\], not \[3, 4\]"):
        index.query(0, random(3, 5), 2)
    with pytest.raises(ValueError, match="do not fit into a batch of 512"):
        index.query(0, random(513), 2)


def test_there_are_never_more_events_than_the_capacity(make_index):
    index = make_index(capacity=100)
    add(index, np.arange(150), random(150))
    add(index, np.arange(50), random(50))
    stats = settled(index)
    assert (stats.process.rows, stats.full) == (100, 50)
    index.remove(rows(np.arange(100)))
    add(index, np.arange(100, 150), random(50))
    assert settled(index).process.rows == 50


def test_the_oldest_embeddings_are_returned_once_until_they_are_updated(make_index):
    index = make_index(stale_after=10)
    add(index, np.array([1, 2]), random(2), step=5)
    add(index, np.array([3]), random(1), step=0)
    add(index, np.array([4]), random(1), step=20)
    stats = settled(index)
    assert (stats.process.age_max, stats.process.age_mean, stats.process.stale) == (20, 12.5, 3)
    named = []
    wait_until(lambda: named.extend((index.stale(2) >> 32).tolist()) or len(named) == 3, "three names")
    assert named[0] == 3
    assert set(named) == {1, 2, 3}
    add(index, np.array([3]), random(1), step=21)
    add(index, np.array([4]), random(1), step=30)
    again = []
    wait_until(lambda: again.extend((index.stale(2) >> 32).tolist()) or len(again) == 2, "two names")
    assert set(again) == {1, 2}


def test_an_index_that_hangs_declines_excess_requests(index):
    wait_until(lambda: index.stats() and index.reports, "its start")
    os.kill(index.pid, signal.SIGSTOP)
    x, asked = random(512), 0
    taken = sum(index.add(rows(np.arange(i, i + 512)), x, 0) for i in range(0, 200 * 512, 512))
    for step in range(10):
        asked += index.query(step, x[:8], 3)
    assert index.stats().waiting <= 64
    for i in range(200):
        index.remove(rows(np.arange(1000 * i, 1000 * i + 1000)))
    stats = index.stats()
    assert taken + stats.declined["add"] == 200 * 512
    assert 0 < asked == 10 - stats.declined["ask"] < 10
    assert stats.declined["remove"] > 0
    os.kill(index.pid, signal.SIGCONT)
    wait_until(lambda: index.stats().waiting <= 1, "it to catch up")
    assert [answer.step for answer in index.answers()] == list(range(asked))
    add(index, np.array([10**6]), np.zeros((1, DIM), np.float32))
    settled(index)
    assert ask(index, np.zeros((1, DIM), np.float32), 1)[0, 0] >= 0
    assert index.stats().restarts == 0


def test_an_index_that_dies_is_restarted_and_filled_again(index):
    x = random(20)
    x[3, 0] = np.nan
    add(index, np.arange(20), x)
    assert settled(index).process.rows == 19
    first = index.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: index.stats().restarts == 1, "its death to be noticed")
    assert index.generation == 1
    assert "died" in index.problem
    wait_until(lambda: index.stats() and index.pid != first and index.problem is None, "another one")
    assert ask(index, x[:1], 1).tolist() == [[NO_ID]]
    add(index, np.arange(20), x)
    assert settled(index).malformed == 2
    assert ask(index, x[:1], 1).tolist() == [[0]]
    assert not psutil.pid_exists(first)


def test_an_index_that_hangs_is_taken_for_dead(index, monkeypatch):
    settled(index)
    first = index.pid
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: index.stats() and index._report_requested, "a question that has no answer")
    assert index.stats().restarts == 0
    monkeypatch.setattr(neighbours, "_SILENT_SECONDS", 0.0)
    wait_until(lambda: index.stats().restarts == 1, "its silence to be noticed")
    assert "did not answer" in index.problem
    monkeypatch.undo()
    wait_until(lambda: index.stats() and index.pid != first and index.problem is None, "another one")
    assert not psutil.pid_exists(first)


def test_an_index_that_answers_other_things_first_does_not_hang(index, monkeypatch):
    settled(index)
    os.kill(index.pid, signal.SIGSTOP)
    wait_until(lambda: index.stats() and index._report_requested, "a question that has no answer")
    with monkeypatch.context() as patch:
        patch.setattr(neighbours, "_SILENT_SECONDS", 0.01)
        patch.setattr(index._process, "replies", lambda: [IndexMessage(kind=MessageType.REMOVE)])
        wait_until(lambda: index.stats() and time.monotonic() - index._report_at > 0.1, "a long wait")
    assert index.stats().restarts == 0
    os.kill(index.pid, signal.SIGCONT)
    settled(index)


def test_an_index_that_cannot_be_started_is_tried_again_and_leaves_nothing_open(index, monkeypatch):
    settled(index)
    gc.collect()  # the sockets that tests before this one have left
    me, tries = psutil.Process(), []
    monkeypatch.setattr(index, "_backoff", Backoff(timedelta(0), timedelta(0)))

    def fail(*_arguments, **_options):
        tries.append(me.num_fds())
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.replay.embedding_index.client.subprocess.Popen", fail)
        os.kill(index.pid, signal.SIGKILL)
        wait_until(lambda: index.stats() and len(tries) > 3, "some tries")
        assert "cannot be started: Cannot allocate memory" in index.problem
        assert len(set(tries)) == 1
        assert index.stats().restarts == 1
    wait_until(lambda: index.stats() and index.problem is None and index.pid, "another one")


def test_nothing_is_left_behind_by_close_nor_by_deaths(make_index):
    gc.collect()  # the sockets that tests before this one have left
    me = psutil.Process()
    descriptors, children = me.num_fds(), me.children()
    index = make_index()
    for deaths in (1, 2):
        wait_until(lambda: index.stats() and index.problem is None and index.reports, "its start")
        os.kill(index.pid, signal.SIGKILL)
        wait_until(lambda deaths=deaths: index.stats().restarts == deaths, "its death to be noticed")
    index.close()
    index.close()
    assert index.add(np.arange(2), random(2), 0) == 0
    assert not index.query(0, random(2), 1)
    assert index.answers() == []
    assert (me.num_fds(), me.children()) == (descriptors, children)


@pytest.mark.process
def test_the_process_ends_when_the_learner_is_killed():
    code = (
        "import os, signal; from anabranch.replay.embedding_index.client import NeighbourClient;"
        "index = NeighbourClient(4, 100); index.open();"
        "print(index.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    # A pipe that the child holds as well ends only with it.
    learner = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=PATIENCE_SECONDS)
    assert learner.returncode == -signal.SIGKILL
    pid = int(learner.stdout)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")


def test_metrics_report_the_index_and_count_across_restarts(index):
    registry = CollectorRegistry()
    metrics = StateCollector(registry, metrics_of(IndexStats))
    add(index, np.arange(3), np.array([[1, 1, 1, 1], [2, 2, 2, 2], [np.nan] * 4], np.float32), step=4)
    metrics.update(settled(index))
    assert registry.get_sample_value("anabranch_replay_index_rows") == 2
    os.kill(index.pid, signal.SIGKILL)
    wait_until(lambda: index.stats().restarts == 1, "its death to be noticed")
    metrics.update(index.stats())
    left_out = registry.get_sample_value("anabranch_replay_index_left_out_rows_total", {"reason": "malformed"})
    assert left_out == 1
    assert registry.get_sample_value("anabranch_replay_index_restarts_total") == 1


def test_without_faiss_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(neighbours.SettingsError, match=r"pip install 'anabranch\[index\]'"):
        NeighbourClient(DIM, 100).open()


def test_the_index_process_logs_as_the_learner_does(monkeypatch):
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    monkeypatch.setattr(logging.root, "handlers", logging.root.handlers[:])
    monkeypatch.setattr(sys, "argv", ["", "--connection", "0", "--settings", "{", "--log-level", "error"])
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process.os, "nice", lambda _: None)
    with pytest.raises(ValueError, match="truncated"):
        process.main()
    assert logging.root.level == logging.ERROR
