"""A fleet of real processes behind a balancer is restarted, one server after the other, under load."""

import os
import shutil
import signal
import threading
from collections import Counter

import httpx
import pytest

from anabranch.learner.settings.storage import StorageSettings
from anabranch.runtime.lifecycle import Exit
from anabranch.serving.reporting.report import read_report
from tests import forkserver
from tests.serving.conftest import MODULE, PIPELINE
from tests.support.balancer import Balancer
from tests.support.object_versions import VersionUploader
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.process, pytest.mark.slow]

MORE = """
versions_from = "storage"
workers = {workers}
drain = "5s"
request_log = "none"
[storage]
url = "{url}"
"""
PAUSES = (0.02, 0.02, 6.0)
"""Of each client, between its requests: the last one's connection is idle through a whole drain, in which a balancer on
a slow machine has to notice that the server is not ready."""


class Process:
    """One server of the fleet."""

    def __init__(self, folder, models, port, url, workers):
        folder.mkdir()
        shutil.copy(models / f"{MODULE}.py", folder)
        self.config = folder / "pipeline.toml"
        self.config.write_text(
            PIPELINE.format(module=MODULE, factory="number", port=port) + MORE.format(url=url, workers=workers)
        )
        self.address = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self.start()

    def start(self):
        with self.log.open("a") as log:
            self.process = forkserver.start(
                ["-m", "anabranch.serving", "-c", str(self.config)], stderr=log, env={**os.environ}
            )

    @property
    def version(self):
        report = read_report(self.config.parent / "var")
        return report.version if report is not None and report.pid == self.process.pid else None

    def restart(self):
        """Stop the process as Kubernetes does, and start the next one."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_SECONDS) == Exit.DONE, self.log.read_text()
        self.start()


class Load:
    """Clients that keep their connections, as far as the servers let them."""

    def __init__(self, url, body):
        self.url, self.body = url, body
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=[pause]) for pause in PAUSES]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)

    def ask(self, pause):
        with httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS) as client:
            while not self.stop.wait(pause):
                try:
                    reply = client.post("/v2/models/tiny/infer", json=self.body)
                except httpx.TransportError as exc:
                    self.failures.append(repr(exc))
                    continue
                if reply.status_code == 200:
                    self.answers[reply.json()["model_version"]] += 1
                else:
                    self.failures.append(reply.text)


def test_a_rolling_restart_under_load_fails_no_request(tmp_path, models, deploy_in, body_of, eventually):
    learner = deploy_in("number", tmp_path / "learner")
    storage = StorageSettings(url=f"file://{tmp_path}/bucket")
    uploader = VersionUploader(storage.bucket, learner.versions)
    learner.publish(1)
    uploader.upload(1)
    servers = [
        Process(tmp_path / f"server-{number}", models, port, storage.url, workers=2 if number == 0 else 1)
        for number, port in enumerate(free_ports(3))
    ]
    try:
        with Balancer([server.address for server in servers], delay=0.5) as balancer:
            eventually(lambda: len(balancer.endpoints()) == 3, 120)
            with Load(balancer.url, body_of(1)) as load:
                for number, server in enumerate(servers, start=2):
                    learner.publish(number)
                    uploader.upload(number)
                    eventually(lambda: {each.version for each in servers} == {number}, 60)  # noqa: B023
                    server.restart()
                    eventually(lambda: len(balancer.endpoints()) < 3, 60)
                    eventually(lambda: len(balancer.endpoints()) == 3, 120)
        assert load.failures == []
        assert set(load.answers) == {"1", "2", "3", "4"}
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
