"""Neighbours of a batch in a store of embeddings: the fraction of the true ones that is found, and the cost of a step.

The index is filled. Then steps of 20 ms of arithmetic on one core each add 64 new events, remove as many, update the
embeddings of 64 others, and request the 10 nearest neighbours of a batch of 64. The figures:

    similar_recall_at_10     found by the index / found by numpy among all, for queries of the same distribution
    similar_stall_fraction   time spent in the index's methods / time of the steps; they wait for nothing. On a machine
                             that is busy with other things this holds their time too, the CPU fraction does not
    index_cpu_fraction       CPU time of the process / time of the steps: from 1 on it cannot keep pace
    faiss_bytes_per_event    memory that the index says it takes; and by how much its process has grown
"""

import os
import time
from pathlib import Path

import numpy as np

from anabranch.replay.embedding_index.client import NeighbourClient

BATCH, K, STEP_SECONDS = 64, 10, 0.02
_PART = 512
_FAR = 1e4
"""The coordinates of events that were removed, far from all others."""


def factors(n: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """Return rectified sums of 16 factors of falling weight, distributed as those of a network."""
    fixed = np.random.default_rng(9)
    load, noise = fixed.standard_normal((16, dim), np.float32), fixed.standard_normal((dim, dim), np.float32)
    weight = np.arange(1, 17, dtype=np.float32) ** np.float32(-0.7)
    signal = (rng.standard_normal((n, 16), np.float32) * weight) @ load
    spread = np.float32(0.3 / np.sqrt(dim))
    return np.maximum(signal + spread * (rng.standard_normal((n, dim), np.float32) @ noise), 0)


def measure(rows: int, dim: int, seconds: float) -> dict[str, float]:
    """Fill an index, take steps for `seconds` while it runs, and return the figures."""
    rng = np.random.default_rng(0)
    embedding = factors(rows, dim, rng)
    index = NeighbourClient(dim, rows + rows // 32, batch=_PART)
    index.open()
    try:
        _settle(index)
        empty = _resident_bytes(index)
        begin = time.perf_counter()
        _fill(index, embedding)
        filled = time.perf_counter() - begin
        _settle(index)
        settled = time.perf_counter() - begin
        busy = _cpu_seconds(index)
        calls, answer_seconds, answered = _steps(index, embedding, seconds, rng)
        _settle(index)
        busy = _cpu_seconds(index) - busy
        recall = _recall(index, embedding, factors(BATCH, dim, rng))
        stats = index.stats()
        return {
            "rows": stats.process.rows,
            "lists": stats.process.lists,
            "probes": stats.process.probes,
            "similar_recall_at_10": recall,
            "similar_recall_published": stats.process.recall,
            "similar_stall_fraction": float(calls[:, 0].mean() / STEP_SECONDS),
            "similar_stall_cpu_fraction": float(calls[:, 1].mean() / STEP_SECONDS),
            "similar_stall_p99_seconds": float(np.quantile(calls[:, 0], 0.99)),
            "index_cpu_fraction": busy / (len(calls) * STEP_SECONDS),
            "similar_answer_mean_seconds": float(np.mean(answer_seconds)) if answer_seconds else float("nan"),
            "similar_answer_p99_seconds": float(np.quantile(answer_seconds, 0.99)) if answer_seconds else float("nan"),
            "similar_answered_fraction": answered,
            "similar_declined_rows": stats.declined["add"],
            "faiss_bytes_per_event": stats.process.bytes / stats.process.rows,
            "faiss_resident_bytes_per_event": (_resident_bytes(index) - empty) / stats.process.rows,
            "fill_seconds": filled,
            "settled_seconds": settled,
        }
    finally:
        index.close()


def _fill(index: NeighbourClient, embedding: np.ndarray) -> None:
    ids, taken = np.arange(len(embedding)), 0
    while taken < len(ids):
        more = index.add(ids[taken : taken + _PART] << 32, embedding[taken : taken + _PART], 0)
        taken += more
        if not more:
            time.sleep(0.001)


def _settle(index: NeighbourClient) -> None:
    """Wait until a report that was made after everything else says that nothing is under way."""
    quiet = 0
    while quiet < 2:
        before = index.reports
        while index.reports == before:
            index.answers()
            time.sleep(0.01)
        stats = index.stats()
        quiet = quiet + 1 if stats.waiting <= 1 and not stats.process.renewing else 0


def _steps(
    index: NeighbourClient, embedding: np.ndarray, seconds: float, rng: np.random.Generator
) -> tuple[np.ndarray, list[float], float]:
    """Take steps, and return the time and CPU time that each spent in calls, the delays of answers, the part answered.

    Row i of `embedding` is kept as that of row i: those that are removed come back with others.
    """
    work = rng.random((128, 128), np.float32)
    news, asked_for = (factors(8192, embedding.shape[1], rng) for _ in range(2))
    calls, delays, asked = [], [], {}
    for step in range(1, int(seconds / STEP_SECONDS) + 1):
        begin = time.perf_counter()
        chosen = rng.choice(len(embedding), 2 * BATCH, replace=False)
        out, again = chosen[:BATCH], chosen[BATCH:]
        first = BATCH * step % (len(news) - BATCH)
        new = news[first : first + BATCH]
        queries, renewed = asked_for[first : first + BATCH], embedding[again]
        before, cpu = time.perf_counter(), time.thread_time()
        index.remove(out << 32)
        taken = index.add(out << 32, new, step)
        index.add(again << 32, renewed, step)
        if index.query(step, queries, K):
            asked[step] = before
        answers = index.answers()
        index.stale(BATCH)
        index.clusters()
        now = time.perf_counter()
        calls.append((now - before, time.thread_time() - cpu))
        embedding[out[:taken]], embedding[out[taken:]] = new[:taken], _FAR
        delays += [now - asked[answer.step] for answer in answers]
        while time.perf_counter() < begin + STEP_SECONDS:
            np.sqrt(work, out=work)
    return np.array(calls), delays, len(delays) / len(calls)


def _recall(index: NeighbourClient, embedding: np.ndarray, queries: np.ndarray) -> float:
    index.query(-1, queries, K)
    answers: list[np.ndarray] = []
    while not answers:
        time.sleep(0.001)
        answers = [answer.ids for answer in index.answers() if answer.step == -1]
    distance = np.empty((len(queries), len(embedding)), np.float32)
    for begin in range(0, len(embedding), 65536):
        part = embedding[begin : begin + 65536]
        distance[:, begin : begin + len(part)] = (part**2).sum(axis=1) - 2 * queries @ part.T
    exact = np.argpartition(distance, K, axis=1)[:, :K]
    return float(np.mean([np.isin(right, ids >> 32).mean() for right, ids in zip(exact, answers[0], strict=True)]))


def _cpu_seconds(index: NeighbourClient) -> float:
    """CPU time of the process; NaN where there is no /proc."""
    path = Path(f"/proc/{index.pid}/stat")
    if not path.exists():
        return float("nan")
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(index: NeighbourClient) -> float:
    """Memory of the process; NaN where there is no /proc."""
    path = Path(f"/proc/{index.pid}/statm")
    return int(path.read_text().split()[1]) * 4096.0 if path.exists() else float("nan")
