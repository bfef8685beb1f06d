"""A learner and a server that share nothing but an object store."""

import contextlib

import httpx
import pytest

from anabranch.serving.reporting.report import read_report
from tests.pipelines import LINEAR, Part, events, total, write_pipeline
from tests.support.waiting import PATIENCE_SECONDS

REST = """
batch_size = 8
[versions]
publish_every = "100ms"
[gate]
holdout_fraction = 0.1
holdout_rows = 100
[replay]
capacity = 10000
[serving]
port = 0
[storage]
url = "file://{folder}/bucket"
mode = "{mode}"
"""

pytestmark = [pytest.mark.any_broker, pytest.mark.process]


@pytest.mark.parametrize("mode", ["mirror", "only"])
def test_what_was_written_is_read_at_a_server_on_another_host(
    kafka, make_topic, produce, start, free_port, tmp_path, mode
):
    topic, rest = make_topic(), REST.format(folder=tmp_path, mode=mode)
    configs = []
    for host in ("learner", "server"):
        (tmp_path / host).mkdir()
        status = f"127.0.0.1:{free_port()}"
        configs.append(write_pipeline(tmp_path / host, kafka.bootstrap, topic, rest, model=LINEAR, status=status))
    learner = start(configs[0])
    server = Part("serving", configs[1], ANABRANCH__SERVING__VERSIONS_FROM="storage")
    with contextlib.closing(server):
        produce(kafka.bootstrap, topic, events(200))
        learner.wait_for(lambda report: total(report) == 200)

        def ready():
            report = read_report(server.state_dir)
            return report if report is not None and report.ready else None

        report = server.until(ready)
        body = {
            "inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 0.0, 0.0]}],
            "parameters": {"min_trained_through": f"{topic}:0=190", "timeout_ms": 30_000},
        }
        reply = httpx.post(
            f"{report.address}/v2/models/{name_of(configs[1])}/infer", json=body, timeout=PATIENCE_SECONDS
        )
        assert reply.status_code == 200, reply.text
        assert server.until(ready).server is not None
        learner.wait_for(lambda each: list(each.servers) == [report.server] and None not in each.servers.values())
        assert learner.stop() == 0
        assert httpx.get(f"{report.address}/v2/health/ready").status_code == 200
        assert server.stop() == 0


def name_of(config):
    return config.read_text().split('name = "')[1].partition('"')[0]
