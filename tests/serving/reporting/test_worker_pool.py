"""How the counts of several serving processes become one."""

import json

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict

from anabranch.serving.reporting.worker_pool import PoolCollector


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
