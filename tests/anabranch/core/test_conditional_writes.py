"""Objects that several processes replace, and the refusal of stores that do not compare before they replace."""

import hashlib
import re
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.failures import damage_is, decoded
from anabranch.core.object_store.bucket import Bucket, BucketAwayError, ReplacedError
from anabranch.core.object_store.conditional_writes import UnconditionalWritesError, check_conditional_writes
from anabranch.core.object_store.tagged_object import TaggedObject
from anabranch.learner.object_storage.opening import lease_storage
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.runtime.lifecycle import Exit, exit_code

URL = "s3://bucket/prefix"
REFUSED = "replaces objects without a comparison: it {}.*; use an object store with conditional writes, or two"


class S3Server:
    """As much of S3 as a learner uses, in memory, whose conditional writes are as a test says."""

    def __init__(self):
        self.ignores: set[str] = set()
        """Of `create`, `replace` and `absent`: conditions that are not evaluated."""
        self.refuses: int | None = None
        """Status of the answer to each write."""
        self.unmet = 412
        """Status where a condition is not met."""
        self.objects: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"s3": self}))
        self.options = {
            "endpoint": f"http://127.0.0.1:{self._server.server_port}",
            "aws_region": "us-east-1",
            "aws_access_key_id": "key-of-nobody",
            "aws_secret_access_key": "secret-of-nobody",
        }
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def put(self, path, content, if_match, if_none_match):
        if self.refuses is not None:
            return self.refuses
        there = self.objects.get(path)
        if if_none_match is not None and there is not None and "create" not in self.ignores:
            return self.unmet
        if if_match is not None and there is None and "absent" not in self.ignores:
            return 404
        if if_match is not None and there is not None and "replace" not in self.ignores and if_match != etag(there):
            return self.unmet
        self.objects[path] = content
        return 200


class _Handler(BaseHTTPRequestHandler):
    s3: S3Server
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path
        status = self.s3.put(path, content, self.headers["If-Match"], self.headers["If-None-Match"])
        self._answer(status, b"" if status in (200, 304) else f"<Error><Code>{status}</Code></Error>".encode(), content)

    def do_GET(self):
        url = urlsplit(self.path)
        if (prefix := parse_qs(url.query).get("prefix")) is not None:
            names = [each.removeprefix("/bucket/") for each in self.s3.objects]
            listed = "".join(
                f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><ETag>e</ETag>"
                f"<Size>1</Size></Contents>"
                for name in names
                if name.startswith(prefix[0])
            )
            self._answer(200, f"<ListBucketResult>{listed}</ListBucketResult>".encode())
        elif (content := self.s3.objects.get(url.path)) is not None:
            self._answer(200, content, content)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = re.findall("<Key>(.*?)</Key>", content)
        for name in names:
            self.s3.objects.pop(f"/bucket/{unquote(name)}", None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _answer(self, status, content, tagged=None):
        self.send_response(status)
        if tagged is not None:
            self.send_header("ETag", etag(tagged))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_): ...


def etag(content):
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


@pytest.fixture
def server():
    server = S3Server()
    yield server
    server.close()


def start(options, folder, url=URL):
    """Take the lease, as the start of a learner does."""
    settings = StorageSettings(url=url, options=options, lease=timedelta(seconds=4))
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation):
        pass


def test_a_store_that_compares_is_taken_and_nothing_of_the_check_stays(server, tmp_path):
    for bucket in (Bucket(f"file://{tmp_path}/bucket", {}), Bucket("memory://any", {}), Bucket(URL, server.options)):
        check_conditional_writes(bucket)
        assert bucket.sizes("doctor") == {}
    start(server.options, tmp_path)
    assert [*server.objects] == ["/bucket/prefix/head.json"]


@pytest.mark.parametrize(
    ("ignores", "fault"),
    [
        ({"create", "replace", "absent"}, "ignores If-None-Match and If-Match"),
        ({"create"}, "ignores If-None-Match"),
        ({"replace", "absent"}, "ignores If-Match"),
        ({"absent"}, "ignores If-Match for an object that is not there"),
    ],
)
def test_a_store_that_ignores_a_condition_is_refused(server, tmp_path, ignores, fault):
    server.ignores = ignores
    with pytest.raises(UnconditionalWritesError, match=REFUSED.format(fault)) as error:
        start(server.options, tmp_path)
    assert exit_code(error.value) == Exit.SETTINGS
    assert server.objects == {}


def test_a_store_that_answers_not_implemented_is_refused(server, tmp_path):
    server.refuses = 501
    with pytest.raises(UnconditionalWritesError, match=REFUSED.format("answers a conditional write with an error")):
        start(server.options, tmp_path)


def test_a_store_that_answers_not_modified_is_refused(server, tmp_path):
    server.unmet = 304
    with pytest.raises(UnconditionalWritesError, match=REFUSED.format("answers a conditional write with an error")):
        start(server.options, tmp_path)
    assert server.objects == {}


def test_an_outage_is_none_of_it(server, tmp_path):
    server.refuses = 500
    with pytest.raises(BucketAwayError) as error:
        start(server.options, tmp_path)
    assert exit_code(error.value) == Exit.DEPENDENCY


@pytest.mark.services
def test_an_s3_server_is_taken(s3, tmp_path):
    check_conditional_writes(Bucket(s3.url, s3.options))
    start(s3.options, tmp_path, s3.url)


class Number(msgspec.Struct, frozen=True):
    value: int = 0


@pytest.fixture
def bucket(tmp_path):
    return Bucket(f"file://{tmp_path}/bucket", {})


def number_in(bucket):
    def decode(content):
        with damage_is(SettingsError, "the number cannot be used"):
            return decoded(content, Number)

    return TaggedObject(bucket, "number.json", decode, Number(), SettingsError, 100)


def test_an_object_is_read_when_it_has_changed(bucket):
    one, other = number_in(bucket), number_in(bucket)
    assert not one.poll(), "there is none"
    other.replace(Number(1))
    assert (one.poll(), one.contents) == (True, Number(1))
    assert not one.poll()
    bucket.delete(["number.json"])
    assert (one.poll(), one.contents, one.tag) == (True, Number(), None)


def test_what_another_one_has_replaced_since_is_not_replaced(bucket):
    one, other = number_in(bucket), number_in(bucket)
    one.replace(Number(1))
    other.poll()
    one.replace(Number(2))
    with pytest.raises(ReplacedError):
        other.replace(Number(3))
    with pytest.raises(ReplacedError):
        number_in(bucket).replace(Number(4))
    other.poll()
    other.replace(Number(3))
    assert (one.poll(), one.contents) == (True, Number(3))


@pytest.mark.parametrize("content", [b"{", b'{"value": "x"}'])
def test_what_cannot_be_used_is_an_error_until_it_has_changed_and_leaves_what_was_read(bucket, content):
    one = number_in(bucket)
    one.replace(Number(1))
    bucket.write("number.json", content)
    for _ in range(2):
        with pytest.raises(SettingsError, match="the number cannot be used"):
            one.poll()
    assert one.contents == Number(1)
    bucket.write("number.json", b" " * 1000)
    with pytest.raises(SettingsError, match="has 1000 bytes, and at most 100 are read"):
        one.poll()
    bucket.write("number.json", b'{"value": 5}')
    assert (one.poll(), one.contents) == (True, Number(5))
