"""The demo from end to end, as a user starts it."""

import contextlib
import json
import os
import signal

import psutil
import pytest
from kafka import KafkaAdminClient

from tests import forkserver
from tests.support.ports import first_free_port
from tests.support.waiting import slowness

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def demo(spawn, tmp_path):
    """Starts `anabranch demo` without a terminal, its temporary files in `tmp_path/tmp`, on a free port."""
    (tmp_path / "tmp").mkdir()

    def start(*arguments):
        own = () if "--port" in arguments else ("--port", str(first_free_port()))
        environment = {"TMPDIR": str(tmp_path / "tmp")}
        return spawn("-m", "anabranch", "demo", *arguments, *own, environment=environment, cwd=tmp_path)

    return start


def await_line(stream, *parts):
    """Read lines until one has all the parts."""
    said = []
    for line in stream:
        said.append(line)
        if all(part in line for part in parts):
            return line
    raise AssertionError(f"no line has {parts}; it said: {''.join(said)}")


def descendants(process):
    return forkserver.descendants(process)


def left_of(processes):
    _, alive = psutil.wait_procs(processes, timeout=30 * slowness())
    return [process.cmdline() for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_it_ends_by_itself_with_a_report_in_which_every_event_has_its_outcome(demo, tmp_path):
    process = demo("--events", "2000", "--headless", "--report", "report.json")
    _, said = process.communicate(timeout=240 * slowness())
    assert process.returncode == 0, said
    report = json.loads((tmp_path / "report.json").read_text())
    outcomes = ("trained", "stored_only", "held_out", "dead_lettered", "skipped")
    assert report["events_produced"] == 2000 == sum(report[f"events_{outcome}"] for outcome in outcomes)
    assert report["events_dead_lettered"] == 2
    assert report["events_held_out"] > 0
    assert (report["http_failures"], report["http_requests"] > 0) == (0, True)
    assert report["versions_published"] >= report["swaps"] > 1
    assert 0 < report["freshness_p50_seconds"] <= report["freshness_p99_seconds"] < report["seconds"]
    assert report["replay_rows"]["disk"] == report["events_trained"]
    assert report["accuracy_old_without_replay"] is not None
    assert list((tmp_path / "tmp").iterdir()) == []


def test_ctrl_c_leaves_no_process_no_file_and_no_topic_on_a_broker_of_one_s_own(demo, kafka, tmp_path):
    process = demo("--no-baseline", "--bootstrap", kafka.bootstrap)
    await_line(process.stderr, "the dashboard is at http://127.0.0.1:", "Ctrl-C")
    await_line(process.stderr, "try: curl -s http://127.0.0.1:")
    await_line(process.stderr, "version 1")
    children = descendants(process)
    assert len(children) >= 3
    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=60 * slowness())
    assert (process.returncode, out) == (0, ""), said
    assert "anabranch: stopping on SIGINT" in said
    assert "requests, 0 failed" in said.splitlines()[-1]
    assert left_of(children) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
        assert [topic for topic in admin.list_topics() if topic.startswith("anabranch-demo-")] == []


def test_a_killed_demo_leaves_no_process_and_the_next_one_removes_its_files(demo, free_port, tmp_path):
    process = demo("--no-baseline", "--headless")
    await_line(process.stderr, "events, class 0")
    children = descendants(process)
    assert len(children) >= 4
    process.kill()
    assert left_of(children) == []
    (left,) = (tmp_path / "tmp").iterdir()
    demo("--headless", "--bootstrap", f"127.0.0.1:{free_port()}").communicate(timeout=60 * slowness())
    assert not left.exists()


def test_an_unreachable_broker_of_one_s_own_is_exit_code_3(demo, free_port):
    port = free_port()
    process = demo("--headless", "--bootstrap", f"127.0.0.1:{port}")
    _, said = process.communicate(timeout=60 * slowness())
    assert process.returncode == 3
    assert said.splitlines()[-1] == f"anabranch: no Kafka broker can be reached at 127.0.0.1:{port}: Connection refused"


def test_a_taken_port_and_a_report_without_a_folder_are_exit_code_2(demo):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        for arguments, sentence in (
            (["--port", port], f"anabranch: --port {port} is taken"),
            (["--report", "none/r.json"], "anabranch: --report none/r.json: there is no folder none"),
        ):
            process = demo("--headless", *arguments)
            _, said = process.communicate(timeout=60 * slowness())
            assert (process.returncode, said.splitlines()[-1]) == (2, sentence)
