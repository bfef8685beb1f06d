"""How the counts of several serving processes become one."""

import json

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict

from anabranch.serving.reporting.report import AnswersReport, ServingReport
from anabranch.serving.reporting.worker_pool import PoolCollector, WorkerPool


def test_counts_are_added_up_while_another_worker_starts(tmp_path):
    """The client library makes a file, and then gives it a size: in between it is empty."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(str(tmp_path)))
    (tmp_path / "counter_1.db").touch()
    assert generate_latest(registry) == b""
    for number, count in ((0, 2.0), (1, 3.0)):
        counts = MmapedDict(str(tmp_path / f"counter_{number}.db"))  # type: ignore[no-untyped-call]
        counts.write_value(json.dumps(["hits", "hits_total", {}, "Hits"]), count, 0.0)  # type: ignore[no-untyped-call]
        counts.close()  # type: ignore[no-untyped-call]
    assert b"hits_total 5.0" in generate_latest(registry)


def test_answers_of_workers_are_added_up_and_their_counts_once(tmp_path):
    pool = WorkerPool(tmp_path, 2)
    for number, (partitions, rate, lag, p50) in enumerate([(2, 10.0, 5, 0.25), (1, 4.0, 2, None)]):
        stream = AnswersReport(
            topics=["in"],
            output="out",
            partitions=partitions,
            messages={"answered": 70},  # of both
            per_second=rate,
            lag=lag,
            p50_seconds=p50,
        )
        report = ServingReport(pid=number, started=0, time=1, address="http://127.0.0.1:1", ready=True, stream=stream)
        pool.write(number, report)
    joined = pool.joined(1, 0.0)
    assert joined is not None
    assert joined.stream == AnswersReport(
        topics=["in"], output="out", partitions=3, messages={"answered": 70}, per_second=14.0, lag=7, p50_seconds=0.25
    )
