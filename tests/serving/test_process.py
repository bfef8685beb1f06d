"""`python -m anabranch.serving` as a process: what it loads, how it ends, and with which exit code."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from anabranch.config.loader import load_config
from anabranch.core.net import listen
from anabranch.ingest.events.schema import Schema
from anabranch.runtime.lifecycle import Exit
from anabranch.serving.reporting.report import read_report
from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def start(*arguments):
    return forkserver.start(
        ["-m", "anabranch.serving", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def daemon(path, eventually, *arguments):
    process = start("-c", str(path), *arguments)
    try:
        report = eventually(lambda: process.poll() is not None or read_report(path.parent / "var"), 60)
        assert process.poll() is None, process.communicate()
        yield process, report.address
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def test_import_serving_app_loads_neither_kafka_nor_redis_nor_faiss():
    unwanted = {"kafka", "confluent_kafka", "redis", "faiss"}
    code = f"import sys, anabranch.serving.http.app; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("max_bach = 3", r'unknown key serving.max_bach; the nearest known key is "max_batch"'),
        ('host = "0.0.0.0"', r"tokens.read is required because host \"0.0.0.0\" is not loopback"),
        ("max_held_bytes = 2000", r"max_held_bytes"),
        ('timeout = "0s"', r"must be longer than 0s"),
        ('device = "cpu"\nprecision = "fp16"', r'serving.precision = "fp16" needs a CUDA device'),
    ],
)
def test_bad_settings_are_one_sentence_and_exit_2(pipeline, more, sentence):
    process = start("-c", str(pipeline(more=more)))
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == Exit.SETTINGS
    assert re.search(sentence, errors), errors
    assert len(errors.strip().splitlines()) == 1


def test_a_missing_file_is_exit_2(tmp_path):
    process = start("-c", str(tmp_path / "none.toml"))
    assert "does not exist" in process.communicate(timeout=PATIENCE_SECONDS)[1]
    assert process.returncode == Exit.SETTINGS


def test_a_taken_port_is_one_sentence_that_names_the_key_and_exit_2(pipeline):
    with listen("serving.port", "serving.host", "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        process = start("-c", str(pipeline(port)))
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == Exit.SETTINGS
    assert f"serving.port = {port} is taken" in errors
    assert len(errors.strip().splitlines()) == 1


def test_the_next_server_of_a_supervisor_waits_for_the_port_of_a_killed_one(pipeline, eventually):
    """After a supervisor was killed, the next one starts before the server of the first has ended."""
    with listen("serving.port", "serving.host", "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        process = start("-c", str(pipeline(port)), "--supervised")
        waits = process.stderr.readline()
    assert f"serving.port = {port} is taken on 127.0.0.1, perhaps by a process that is about to end" in waits
    assert f"serving tiny on http://127.0.0.1:{port}" in process.stderr.readline()
    process.communicate(timeout=PATIENCE_SECONDS)  # the end of stdin stops it
    assert process.returncode == Exit.DONE


def test_sigterm_finishes_and_exits_0(pipeline, eventually, numbers, body_of):
    path = pipeline()
    config = load_config(path)
    schema = Schema(config.pipeline.events)
    numbers.publish(1, schema=schema.digest)
    with daemon(path, eventually) as (process, address):
        body = body_of(1, parameters={"min_trained_through": "events:0=10"})
        response = httpx.post(f"{address}/v2/models/tiny/infer", json=body)
        assert response.json()["model_version"] == "1"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == Exit.DONE
        assert f"serving tiny on {address}/v2/models/tiny" in errors
        assert "Traceback" not in errors
    with pytest.raises(httpx.ConnectError):
        httpx.get(address + "/v2/health/live")


def test_a_supervised_process_ends_with_its_parent(pipeline, eventually):
    with daemon(pipeline(), eventually, "--supervised") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_SECONDS) == Exit.DONE
