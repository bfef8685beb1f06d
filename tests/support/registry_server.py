"""A Schema Registry for tests: a real HTTP server that speaks the API, and fails on demand.

Register schemas, then make confluent-kafka's serializers use it, or write messages by hand.
"""

import base64
import contextlib
import json
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.http_server import Handler, serving
from tests.support.waiting import PATIENCE_SECONDS


@dataclass
class Faults:
    """What is wrong with the server at the moment."""

    away: bool = False
    """Connections are closed without an answer."""
    seconds: float = 0.0
    """Delay of each answer."""
    status: int | None = None
    """Status of each answer, with an empty object."""
    redirect: str | None = None
    """Where each answer redirects to; the path is added."""
    body_bytes: int = 0
    """Length of each answer."""
    body: bytes | None = None
    """Content of each answer."""
    interim: bytes = b""
    """What is sent before each answer, without end: interim responses."""


@dataclass
class Registry:
    """What a registry holds, and what was asked of it."""

    url: str = ""
    faults: Faults = field(default_factory=Faults)
    credentials: tuple[str, str] | None = None
    """User and password that are asked for."""
    token: str | None = None
    """Bearer token that is asked for."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers of each request."""
    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    has_guids: bool = True
    """Whether schemas have GUIDs; older registries do not have that path."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by each request."""

    def register(self, subject, schema, kind="AVRO", references=None):
        """Add a version to a subject, and return its id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        number = len(self.schemas) + 1
        self.schemas[number] = {"schema": text, "guid": str(uuid.uuid4())}
        if kind != "AVRO":  # registries leave it out for Avro
            self.schemas[number]["schemaType"] = kind
        if references:
            self.schemas[number]["references"] = references
        self.subjects.setdefault(subject, []).append(number)
        return number

    def guid(self, number):
        """Return the GUID of a schema."""
        return str(self.schemas[number]["guid"])

    def paths(self):
        """Return the path of each request, without its query."""
        return [path.partition("?")[0] for path, _ in self.requests]

    def answer(self, path):
        """Return status and content for a path."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        match parts:
            case ["subjects"]:
                return 200, sorted(self.subjects)
            case ["schemas", "types"]:
                return 200, ["AVRO", "JSON", "PROTOBUF"]
            case ["schemas", "ids", number] if int(number) < 2**31:  # for others Jersey finds no such path
                schema = self.schemas.get(int(number))
                return (200, schema) if schema else (404, {"error_code": 40403, "message": "Schema not found"})
            case ["schemas", "guids", guid] if self.has_guids:
                found = [schema for schema in self.schemas.values() if schema["guid"] == guid]
                return (200, found[0]) if found else (404, {"error_code": 40403, "message": "Schema not found"})
            case ["subjects", subject, "versions", version]:
                numbers = self.subjects.get(subject)
                if numbers is None:
                    return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
                index = len(numbers) if version == "latest" else int(version)
                if not 1 <= index <= len(numbers):
                    return 404, {"error_code": 40402, "message": "Version not found."}
                number = numbers[index - 1]
                return 200, {"subject": subject, "version": index, "id": number, **self.schemas[number]}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def allows(self, header):
        """Return whether an Authorization header is the one that is asked for."""
        if self.credentials is not None:
            return header == f"Basic {base64.b64encode(':'.join(self.credentials).encode()).decode()}"
        return self.token is None or header == f"Bearer {self.token}"


@contextlib.contextmanager
def registry_server(certificate=None, port=0):
    """Run a registry on a free port of 127.0.0.1, with TLS where a certificate and its key are given."""
    registry = Registry()

    class Answering(Handler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a body would wait 40 ms until the head is acknowledged

        def do_GET(self):
            registry.requests.append((self.path, dict(self.headers)))
            registry.asked.set()
            faults = registry.faults
            if faults.away:
                self.close_connection = True
                return
            time.sleep(faults.seconds)
            with contextlib.suppress(OSError):  # until the client closes
                while faults.interim:
                    self.wfile.write(faults.interim)
                    time.sleep(0.001)
            if faults.redirect is not None:
                self.reply(b"", 307, Location=f"{faults.redirect}{self.path}")
                return
            status, answer = registry.answer(self.path)
            if not registry.allows(self.headers.get("Authorization")):
                status, answer = 401, {"error_code": 401, "message": "Unauthorized"}
            body = faults.body or b" " * faults.body_bytes + json.dumps(answer).encode()
            self.reply(body, faults.status or status, Content_Type="application/json")

        def do_POST(self):
            """Register a schema under a subject, as serializers do."""
            registry.requests.append((self.path, dict(self.headers)))
            posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            subject = unquote(urlsplit(self.path).path.split("/")[2])
            known = [n for n in registry.subjects.get(subject, []) if registry.schemas[n]["schema"] == posted["schema"]]
            number = (
                known[0] if known else registry.register(subject, posted["schema"], posted.get("schemaType", "AVRO"))
            )
            body = json.dumps({"id": number, "version": 1, "subject": subject, **registry.schemas[number]}).encode()
            self.reply(body, Content_Type="application/json")

    with serving(Answering, port, certificate) as registry.url:
        yield registry


@pytest.fixture
def registry(monkeypatch):
    """A Schema Registry on this host. It has one server, so it is asked at once again for an id that it lacks.

    Lookups wait long for it, as on a busy machine.
    """
    monkeypatch.setattr("anabranch.ingest.schema_registry.cache._AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("anabranch.ingest.schema_registry.cache._LONGEST_WAIT_SECONDS", PATIENCE_SECONDS)
    with registry_server() as running:
        yield running
