"""Several workers of one host, one of which follows the object store for all."""

import signal

import httpx
import pytest

from anabranch.learner.object_storage.fleet import read_servers
from anabranch.learner.settings.storage import StorageSettings
from anabranch.runtime.lifecycle import Exit
from anabranch.serving.reporting.report import read_report
from tests import forkserver
from tests.support.object_versions import VersionUploader
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_one_worker_follows_for_all_and_any_takes_commands(pipeline, numbers, body_of, eventually, tmp_path):
    storage = StorageSettings(url=f"file://{tmp_path}/bucket")
    learner = VersionUploader(storage.bucket, numbers.versions)  # its directory is not the server's
    more = f'workers = 2\nversions_from = "storage"\n[storage]\nurl = "{storage.url}"\n'
    path = pipeline(more=more)
    path.write_text(path.read_text().replace('name = "tiny"', 'name = "tiny"\nstate_dir = "host"', 1))
    numbers.publish(1)
    learner.upload(1)
    process = forkserver.start(["-m", "anabranch.serving", "-c", str(path)])
    try:

        def serves(number):
            assert process.poll() is None
            report = read_report(tmp_path / "host")
            return report if report is not None and (report.workers, report.version) == (2, number) else None

        address = eventually(lambda: serves(1), 120).address
        numbers.publish(2)
        learner.upload(2)
        report = eventually(lambda: serves(2), 60)
        (server,) = eventually(lambda: [each for each in read_servers(storage.bucket) if each.version == 2], 30)
        assert report.server == server.id
        for number in (1, 2):
            for _ in range(4):  # each by another connection, which any worker accepts
                reply = httpx.post(f"{address}/api/versions/{number}:promote", timeout=PATIENCE_SECONDS)
                assert (reply.status_code, reply.json()["serving"]) == (200, number)
        answers = {
            httpx.post(f"{address}/v2/models/tiny/infer", json=body_of(1)).json()["model_version"] for _ in range(9)
        }
        assert answers == {"2"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == Exit.DONE
        assert read_servers(storage.bucket) == []
    finally:
        process.kill()
        process.wait()
