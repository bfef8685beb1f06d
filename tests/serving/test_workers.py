"""`serving.workers`: several processes behind one port, which answer as one."""

import os
import signal
import ssl
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from anabranch.commands.versions.rollout import apply_command
from anabranch.config.loader import load_config
from anabranch.learner.versions.format import RegistryState
from anabranch.runtime.lifecycle import Exit
from anabranch.serving.reporting.report import STOPPED, ShadowReport, read_report
from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
TLS = 'tls = {cert = "server.crt", key = "server.key"}\n'
PATIENT = """
from datetime import timedelta
from anabranch.runtime import serving_workers
from anabranch.runtime.daemon import exit_at_once
from anabranch.serving.__main__ import main
serving_workers.UNTIL_GONE = timedelta(minutes=5)
exit_at_once(main())
"""
"""Serves, and waits for a port that another one has for longer than a worker takes to end on a busy machine."""
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the workers in /proc"),
]


class Server:
    """A server of two workers, and clients that open a connection for each request."""

    def __init__(self, path, trust, environment, program):
        self.trust = trust
        self.state_dir = path.parent / "var"
        self.log = path.parent / "log"
        with self.log.open("a") as log:
            self.process = forkserver.start(
                [*program, "-c", str(path)],
                cwd=ROOT,
                env={**os.environ, **environment},
                stderr=log,
                start_new_session=True,
            )

    @property
    def report(self):
        report = read_report(self.state_dir)
        assert report is not None
        return report

    @property
    def workers(self):
        """The pids of the processes that answer."""
        return {child.process.pid for child in forkserver.children(self.process)}

    def serves(self, version):
        """Whether both workers do."""
        report = read_report(self.state_dir)
        assert self.process.poll() is None, self.log.read_text()
        return (
            report is not None and report.pid == self.process.pid and (report.workers, report.version) == (2, version)
        )

    def ask(self, body):
        return httpx.post(
            f"{self.report.address}/v2/models/tiny/infer", json=body, timeout=PATIENCE_SECONDS, verify=self.trust
        )

    def order(self, number, action):
        return httpx.post(f"{self.report.address}/api/versions/{number}:{action}", timeout=PATIENCE_SECONDS)

    def count(self, name):
        lines = httpx.get(
            f"{self.report.address}/metrics", timeout=PATIENCE_SECONDS, verify=self.trust
        ).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture
def start_workers(pipeline):
    """Start a server of two workers: `with start_workers(factory="number", port=0, **environment) as server`.

    `more` are lines of `[serving]`, `trust` is what its clients verify its certificate by, `program` what Python runs.
    """

    @contextmanager
    def start(factory="number", port=0, more="", trust=True, program=("-m", "anabranch.serving"), **environment):
        server = Server(pipeline(port, f"workers = 2\n{more}", factory), trust, environment, program)
        try:
            yield server
        except BaseException as exc:
            exc.add_note(server.log.read_text())
            raise
        finally:
            server.process.terminate()
            try:
                server.process.wait(PATIENCE_SECONDS)
            finally:
                server.process.kill()
                server.process.wait()

    return start


def connections(address):
    """Count the server's ends of the connections that there are to it."""
    port = f":{httpx.URL(address).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] == "01" for row in rows)


@pytest.mark.slow
def test_all_workers_follow_versions_and_rollout_commands_and_count_as_one(start_workers, numbers, body_of, eventually):
    with start_workers() as server, ThreadPoolExecutor(8) as clients:

        def answers(count=40, **members):
            replies = list(clients.map(lambda _: server.ask(body_of(1, **members)), range(count)))
            assert {reply.status_code for reply in replies} == {200}, [reply.text for reply in replies]
            for reply in replies:
                assert reply.json()["outputs"][0]["data"] == [float(reply.json()["model_version"])]
            return Counter(reply.json()["model_version"] for reply in replies)

        numbers.publish(1)
        eventually(lambda: server.serves(1), 60)
        assert answers() == {"1": 40}

        # A client that has read its own write reads no older answer, whichever process it comes to.
        own = body_of(1, parameters={"min_trained_through": "events:0=20"})
        early = [clients.submit(server.ask, own) for _ in range(8)]
        eventually(lambda: connections(server.report.address) >= 8)
        numbers.publish(2)
        assert {reply.result(PATIENCE_SECONDS).json()["model_version"] for reply in early} == {"2"}
        assert answers(parameters=own["parameters"]) == {"2": 40}

        # A rollout command is answered when all workers have applied it.
        assert server.order(1, "pin").json()["serving"] == 1
        assert answers() == {"1": 40}
        assert server.order(2, "promote").status_code == 409
        assert server.order(1, "unpin").status_code == 200
        eventually(lambda: server.serves(2))
        numbers.publish(3)
        eventually(lambda: server.serves(3))
        rolled_back = server.order(2, "rollback").json()
        assert (rolled_back["serving"], rolled_back["rolled_back"]) == (2, [3])
        assert answers() == {"2": 40}
        state = numbers.versions.state()
        assert state == RegistryState(serving=2, previous=3, rolled_back=[3], promoted=2, recent=state.recent)
        assert state.recent[-1] == 2

        # What all do alike is counted once, requests wherever they were answered.
        assert server.count("anabranch_serving_requests_total") == 40 * 4 + 8
        assert server.count("anabranch_serving_request_duration_seconds_count") == 40 * 4 + 8
        assert server.count("anabranch_serving_version") == 2
        # A swap is counted after the requests that wait for it go on.
        eventually(lambda: server.count('anabranch_serving_swaps_total{outcome="swapped"}') == 4)
        eventually(lambda: server.report.requests == {"200": 40 * 4 + 8})
        status = httpx.get(f"{server.report.address}/api/status").json()
        assert (status["serving"]["workers"], status["serving"]["pid"]) == (2, server.process.pid)
        assert status["serving"]["requests"] == {"200": 40 * 4 + 8}
    assert (server.report.ready, server.report.problems) == (False, [STOPPED])
    assert server.process.returncode == Exit.DONE


@pytest.mark.slow
def test_a_killed_worker_loses_only_its_current_requests_and_is_restarted(start_workers, numbers, body_of, eventually):
    numbers.publish(1)
    with start_workers() as server:
        eventually(lambda: server.serves(1), 60)
        stop, answered, failed = threading.Event(), Counter[int](), Counter[int]()

        def ask(client):
            while not stop.wait(0.01):
                try:
                    reply = server.ask(body_of(1))
                except httpx.TransportError:
                    failed[client] += 1
                else:
                    assert reply.status_code == 200, reply.text
                    answered[client] += 1

        with ThreadPoolExecutor(4) as clients:
            done = [clients.submit(ask, client) for client in range(4)]
            first, second = sorted(server.workers)
            eventually(lambda: answered.total() > 100)
            os.kill(first, signal.SIGKILL)
            eventually(lambda: server.report.problems)  # until the next one serves
            eventually(lambda: server.workers > {second})
            eventually(lambda: server.serves(1), 60)
            so_far = answered.total()
            eventually(lambda: answered.total() > so_far + 100)
            stop.set()
            for client in done:
                client.result()
        # A client has one request under way at a time, so the kill can cost each one.
        assert all(count == 1 for count in failed.values())
        # What the dead one had answered still counts.
        assert server.count("anabranch_serving_requests_total") >= answered.total()
        assert second in server.workers
        eventually(lambda: not server.report.problems)  # such as that a worker hangs, for a moment


def test_requests_in_flight_are_answered_when_it_stops(start_workers, deploy, body_of, eventually, tmp_path):
    deploy("held").publish(1)
    with (
        ThreadPoolExecutor(9) as clients,
        start_workers(factory="held", ANABRANCH__SERVING__TIMEOUT="60s") as server,
    ):
        eventually(lambda: server.serves(1), 60)
        address = server.report.address
        (tmp_path / "hold").touch()
        asked = [clients.submit(server.ask, body_of(1)) for _ in range(8)]
        late = clients.submit(server.ask, body_of(1, parameters={"min_trained_through": "events:0=99"}))
        eventually(lambda: connections(address) == 9)
        server.process.terminate()
        assert late.result(PATIENCE_SECONDS).status_code == 503
        (tmp_path / "hold").unlink()
        assert [reply.result(PATIENCE_SECONDS).status_code for reply in asked] == [200] * 8
        assert server.process.wait(PATIENCE_SECONDS) == Exit.DONE
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/v2/health/live")


@pytest.mark.slow
def test_after_a_kill_of_the_listening_process_another_one_gets_the_port(
    start_workers, numbers, eventually, tmp_path_factory
):
    temporary = tmp_path_factory.mktemp("tmp")
    numbers.publish(1)
    with start_workers(TMPDIR=str(temporary)) as first:
        eventually(lambda: first.serves(1), 60)
        (left,) = temporary.iterdir()
        port = httpx.URL(first.report.address).port
        slow = min(first.workers)
        os.kill(slow, signal.SIGSTOP)
        first.process.kill()
        with start_workers(port=port, program=("-c", PATIENT), TMPDIR=str(temporary)) as second:
            eventually(lambda: f"serving.port = {port} is taken" in second.log.read_text(), 60)
            os.kill(slow, signal.SIGCONT)
            eventually(lambda: second.serves(1), 60)
            assert not left.exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_each_worker_speaks_tls_and_applies_rollout_commands_over_it(
    start_workers, numbers, body_of, eventually, certificate
):
    cert, _ = certificate(2, issued=True)
    trust = ssl.create_default_context(cafile=str(cert))
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    numbers.publish(1)
    with start_workers(more=TLS, trust=trust) as server, ThreadPoolExecutor(8) as clients:

        def answers():
            replies = list(clients.map(lambda _: server.ask(body_of(1)), range(16)))
            return {int(reply.json()["model_version"]) for reply in replies}

        eventually(lambda: server.serves(1), 60)
        assert server.report.address.startswith("https://")
        first, second = sorted(server.workers)
        for stopped in (first, second):  # the other one answers all
            os.kill(stopped, signal.SIGSTOP)
            try:
                assert answers() == {1}
            finally:
                os.kill(stopped, signal.SIGCONT)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.report.address.replace("https", "http"), timeout=PATIENCE_SECONDS)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.report.address, timeout=PATIENCE_SECONDS)
        numbers.publish(2)
        eventually(lambda: server.serves(2))
        assert apply_command(load_config(server.state_dir.parent / "pipeline.toml"), "pin", 1).running
        assert answers() == {1}
        os.kill(first, signal.SIGKILL)
        eventually(lambda: server.workers > {second})
        eventually(lambda: server.serves(1), 60)
        os.kill(second, signal.SIGSTOP)
        try:
            assert answers() == {1}
        finally:
            os.kill(second, signal.SIGCONT)


@pytest.mark.slow
def test_the_shadows_of_all_workers_are_reported_as_one(start_workers, numbers, body_of, eventually):
    numbers.publish(1)
    numbers.publish(5, verdict="fail")
    with start_workers(more="shadow = 1.0\n") as server, ThreadPoolExecutor(4) as clients:

        def rows():
            return float(server.count("anabranch_serving_shadow_rows_total"))

        def ask(requests):
            replies = list(clients.map(lambda _: server.ask(body_of(3)), range(requests)))
            assert {reply.json()["model_version"] for reply in replies} == {"1"}

        eventually(lambda: server.serves(1), 60)
        # Requests are counted from then on, in each worker; the report has a shadow as soon as one of them has.
        eventually(lambda: server.log.read_text().count("in the shadow") == 2)
        first, second = sorted(server.workers)
        for stopped, asked in ((first, 10), (second, 20)):
            os.kill(stopped, signal.SIGSTOP)
            try:
                ask(10)
                eventually(lambda asked=asked: rows() == 3 * asked)
            finally:
                os.kill(stopped, signal.SIGCONT)
        compared = server.count('anabranch_serving_shadow_rows_total{outcome="compared"}')
        assert compared > 0
        # It is counted after the rows.
        eventually(lambda: server.count("anabranch_serving_shadow_disagreement_total") == 4 * compared)
        eventually(lambda: server.report.shadow == ShadowReport(version=5, rows=compared, disagreement=4.0))

        # The rows that a dead worker compared stay counted, and its replacement has a shadow too.
        os.kill(first, signal.SIGKILL)
        eventually(lambda: server.workers > {second})
        eventually(lambda: server.serves(1), 60)
        assert server.count('anabranch_serving_shadow_rows_total{outcome="compared"}') == compared
        os.kill(second, signal.SIGSTOP)
        try:
            eventually(lambda: ask(1) or rows() > 60)
        finally:
            os.kill(second, signal.SIGCONT)
        # A candidate that is older than what is served is none any more, for any worker.
        numbers.publish(6)
        eventually(lambda: server.serves(6) and server.report.shadow is None)


def test_a_certificate_that_cannot_be_read_ends_it_with_2(start_workers):
    with start_workers(more=TLS) as server:
        assert server.process.wait(PATIENCE_SECONDS) == Exit.SETTINGS
    (said,) = server.log.read_text().splitlines()  # no worker was started for it
    assert said.endswith("server.crt cannot be used: No such file or directory")


def test_a_model_that_cannot_be_built_ends_it_with_2(start_workers):
    with start_workers(factory="broken") as server:
        assert server.process.wait(PATIENCE_SECONDS) == Exit.SETTINGS
    assert "the factory fails" in server.log.read_text()
