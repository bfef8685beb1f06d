"""The brokers of tests/support/kafka.py and the forked processes behave as the other tests assume."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest
from kafka import KafkaConsumer
from kafka.errors import KafkaError

from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS


def test_messages_of_a_topic_are_read_in_order(kafka, make_topic, produce, consume_all):
    topic = make_topic(partitions=2)
    minute_ago = int(time.time() * 1000) - 60_000  # an older one could fall to the broker's retention while this runs
    assert produce(kafka.bootstrap, topic, [b"a", None, {"x": 1}], partition=1, key=b"k") == [0, 1, 2]
    assert produce(kafka.bootstrap, topic, [b"b"], headers=[("h", b"v")], timestamp_ms=minute_ago) == [0]
    records = consume_all(kafka.bootstrap, topic, at_least=4)
    assert [(r.partition, r.offset, r.value) for r in records] == [
        (0, 0, b"b"),
        (1, 0, b"a"),
        (1, 1, None),
        (1, 2, b'{"x": 1}'),
    ]
    assert [(name, bytes(value)) for name, value in records[0].headers] == [("h", b"v")]
    assert (records[0].timestamp, records[1].key) == (minute_ago, b"k")


def test_each_topic_is_new_and_has_a_dead_letter_topic(kafka, make_topic, consume_all):
    topics = [make_topic(), make_topic()]
    assert topics[0] != topics[1]
    for topic in topics:
        assert consume_all(kafka.bootstrap, topic) == []
        assert consume_all(kafka.bootstrap, f"{topic}.dead") == []


def test_a_sasl_listener_refuses_a_wrong_password(sasl_kafka, create_topic, produce):
    def topics(password):
        options = {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_plain_username": sasl_kafka.user,
            "sasl_plain_password": password,
        }
        with contextlib.closing(
            KafkaConsumer(bootstrap_servers=sasl_kafka.bootstrap, bootstrap_timeout_ms=3000, **options)
        ) as consumer:
            return consumer.topics()

    create_topic(sasl_kafka.plain, "seen")
    produce(sasl_kafka.plain, "seen", [b"x"])
    assert "seen" in topics(sasl_kafka.password)
    with pytest.raises(KafkaError):
        topics("wrong")


def test_a_free_port_is_none_that_another_part_of_the_test_has_been_given(free_port):
    ports = {free_port() for _ in range(200)}
    assert len(ports) == 200
    assert 1024 <= min(ports) <= max(ports) <= 65535


@pytest.mark.process
@pytest.mark.skipif(not forkserver._forks(), reason="test processes are not forked here")
def test_a_forked_process_leaves_what_it_inherits_out_of_its_garbage_collections():
    code = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    with forkserver.start(["-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.communicate(timeout=PATIENCE_SECONDS)[0] == "True True\n"


WORK = """
import atexit, sys, threading
atexit.register(print, "end")
threading.Thread(target=print, args=["work"]).start()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('so')", 1, "so\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_process_ends_with_its_code_after_its_threads_and_what_it_has_registered(end, code, error):
    done = forkserver.run(["-c", WORK + end], env=dict(os.environ))
    assert (done.returncode, done.stdout) == (code, "work\nend\n")
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)


@pytest.mark.process
def test_a_script_passes_signals_and_the_exit_code_on(tmp_path):
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print(sys.argv, flush=True)"
    program = tmp_path / "program"
    program.write_text(forkserver.script("-c", f"{code}; signal.pause()"))
    program.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen([program, "one", "two"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "['-c', 'one', 'two']\n"
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 3
