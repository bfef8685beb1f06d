"""Kafka brokers for tests: one for the session, and others with SASL, SCRAM, TLS or a broker that can be killed."""

import contextlib
import gc
import logging
import os
import shlex
import signal
import socket
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from anabranch.core.errors import AnabranchError
from anabranch.runtime.embedded_broker import EmbeddedBroker
from tests.support.ports import first_free_port, free_ports
from tests.support.processes import skip_or_fail, start_bound
from tests.support.waiting import Patience

START = "ANABRANCH_TEST_KAFKA_START"
IMAGE = "apache/kafka:4.1.0"


@dataclass(frozen=True)
class SessionBroker:
    """A Kafka broker that does not create topics automatically."""

    bootstrap: str
    """`HOST:PORT` of a listener without authentication."""
    kind: str
    """`command`, `docker` or `embedded`."""


class GuardedBroker(NamedTuple):
    """A broker with one listener for SCRAM, one for TLS and one without authentication."""

    scram: str
    tls: str
    plain: str
    certificate: Path


@dataclass(frozen=True)
class SaslBroker:
    """A broker with one listener for SASL/PLAIN and one without authentication."""

    bootstrap: str
    plain: str
    user: str = "alice"
    password: str = "secret"
    stranger: str = "carol"
    """Has the same password, and no permissions."""


class RestartableBroker:
    """A broker that a test may kill, and start again on the same files."""

    def __init__(self, folder):
        self._folder = folder
        self._ports = free_ports(2)
        self._stack = contextlib.ExitStack()
        self.bootstrap = f"127.0.0.1:{self._ports[0]}"

    def start(self):
        """Start the broker, and wait until it answers."""
        self._process = self._stack.enter_context(_started(self._folder, self._ports[0], [], self.bootstrap))

    def stop_answering(self):
        """SIGSTOP the broker and its children."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def answer_again(self):
        """SIGCONT them."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self):
        """SIGKILL the broker and its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._stack.close()


@pytest.fixture(scope="session", autouse=True)
def _quiet_kafka():
    logging.getLogger("kafka").setLevel(logging.CRITICAL)


@pytest.fixture
def kafka(_session_kafka):
    """The broker of the session: started by START's command, else Apache Kafka in Docker, else the embedded broker.

    All topics are deleted after each test: the embedded broker writes its whole contents after each change.
    """
    yield _session_kafka
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=_session_kafka.bootstrap)) as admin:
        if topics := [topic for topic in admin.list_topics() if not topic.startswith("__")]:
            admin.delete_topics(topics)


@pytest.fixture(scope="session")
def _session_kafka():
    with contextlib.ExitStack() as stack:
        if os.environ.get(START):
            ports = free_ports(2)
            bootstrap = f"127.0.0.1:{ports[0]}"
            stack.enter_context(_started_in_new_folder(ports[0], [], bootstrap))
            yield SessionBroker(bootstrap, "command")
        elif _docker_answers():
            yield SessionBroker(stack.enter_context(_container()), "docker")
        else:
            broker = EmbeddedBroker()
            try:
                stack.enter_context(broker)
            except AnabranchError as exc:
                skip_or_fail(f"no Kafka broker: {START} is not set, no Docker engine answers, and {exc}")
            yield SessionBroker(broker.bootstrap, "embedded")


@pytest.fixture(scope="session")
def sasl_kafka():
    """A broker with SASL/PLAIN. Only START's broker supports it; without START the test is skipped, also in CI."""
    if not os.environ.get(START):
        pytest.skip(f"{START} is not set, and the other brokers have no SASL listener")
    sasl_port, controller_port, plain_port = free_ports(3)
    sasl, plain = f"127.0.0.1:{sasl_port}", f"127.0.0.1:{plain_port}"
    listeners = f"SASL_PLAINTEXT://{sasl},PLAINTEXT://{plain}"
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="secret" user_carol="secret";'
    properties = [
        f"listeners={listeners},CONTROLLER://127.0.0.1:{controller_port}",
        f"advertised.listeners={listeners}",
        "sasl.enabled.mechanisms=PLAIN",
        f"listener.name.sasl_plaintext.plain.sasl.jaas.config={login}",
        "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users=User:ANONYMOUS;User:alice",
    ]
    with _started_in_new_folder(sasl_port, properties, plain):
        yield SaslBroker(sasl, plain)


@pytest.fixture(scope="session")
def token_kafka():
    """A broker whose listener takes tokens with the scope kafka, signed or not. Only START's broker supports it."""
    if not os.environ.get(START):
        pytest.skip(f"{START} is not set, and the other brokers have no listener for tokens")
    sasl_port, controller_port, plain_port = free_ports(3)
    sasl, plain = f"127.0.0.1:{sasl_port}", f"127.0.0.1:{plain_port}"
    listeners = f"SASL_PLAINTEXT://{sasl},PLAINTEXT://{plain}"
    listener, theirs = "listener.name.sasl_plaintext.oauthbearer", "org.apache.kafka.common.security.oauthbearer"
    handler = f"{theirs}.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler"
    scope = 'unsecuredLoginStringClaim_sub="broker" unsecuredValidatorRequiredScope="kafka"'
    properties = [
        f"listeners={listeners},CONTROLLER://127.0.0.1:{controller_port}",
        f"advertised.listeners={listeners}",
        "sasl.enabled.mechanisms=OAUTHBEARER",
        f"{listener}.sasl.jaas.config={theirs}.OAuthBearerLoginModule required {scope};",
        f"{listener}.sasl.server.callback.handler.class={handler}",
        "connections.max.reauth.ms=3600000",  # a connection ends with its token, unless it has got a new one
    ]
    with _started_in_new_folder(sasl_port, properties, plain):
        yield SaslBroker(sasl, plain)


@pytest.fixture
def guarded_kafka(certificate, tmp_path):
    """A broker with SCRAM and TLS. Only START's broker supports them; without START the test is skipped, also in CI."""
    if not os.environ.get(START):
        pytest.skip(f"{START} is not set, and the other brokers have neither SCRAM nor TLS")
    cert, key = certificate(days=3)
    (tmp_path / "store.pem").write_text(key.read_text() + cert.read_text())
    ports = free_ports(4)
    addresses = [f"127.0.0.1:{ports[i]}" for i in (0, 2, 3)]
    listeners = "SASL_PLAINTEXT://{},SSL://{},PLAINTEXT://{}".format(*addresses)
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    protocols = ("SASL_PLAINTEXT:SASL_PLAINTEXT", "SSL:SSL", "PLAINTEXT:PLAINTEXT", "CONTROLLER:PLAINTEXT")
    properties = [
        f"listeners={listeners},CONTROLLER://127.0.0.1:{ports[1]}",
        f"advertised.listeners={listeners}",
        f"listener.security.protocol.map={','.join(protocols)}",
        "sasl.enabled.mechanisms=SCRAM-SHA-256,SCRAM-SHA-512",
        f"listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config={login}",
        f"listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config={login}",
        "ssl.keystore.type=PEM",
        f"ssl.keystore.location={tmp_path / 'store.pem'}",
    ]
    with _started_in_new_folder(ports[0], properties, addresses[2]):
        yield GuardedBroker(addresses[0], addresses[1], addresses[2], cert)


@pytest.fixture
def mortal_kafka():
    """A broker that can be killed. It requires START; without START the test is skipped, also in CI."""
    if not os.environ.get(START):
        pytest.skip(f"{START} is not set, and the other brokers cannot be killed")
    with tempfile.TemporaryDirectory(prefix="anabranch-kafka-", ignore_cleanup_errors=True) as folder:
        broker = RestartableBroker(Path(folder))
        broker.start()
        try:
            yield broker
        finally:
            broker.kill()


@contextlib.contextmanager
def _started_in_new_folder(port, properties, bootstrap):
    """Run START's command in a temporary folder, which is removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-kafka-", ignore_cleanup_errors=True) as folder,
        _started(Path(folder), port, properties, bootstrap),
    ):
        yield


@contextlib.contextmanager
def _started(folder, port, properties, bootstrap):
    """Run START's command in a new session, and kill all of that session afterwards."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    process = start_bound(
        [*shlex.split(os.environ[START]), str(port), f"{folder}/data", *properties], log, new_session=True
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


def _wait_until_it_answers(bootstrap, process, log):
    host, _, port = bootstrap.rpartition(":")
    deadline = Patience()
    while True:
        # A plain connection first, since the client's own attempts back off.
        with contextlib.suppress(OSError, KafkaError):
            socket.create_connection((host, int(port)), timeout=1).close()
            with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
                admin.list_topics()
                return
        if not deadline.lasts() or (process is not None and process.poll() is not None):
            output = log.read_text(errors="replace")[-2000:] if log else ""
            pytest.fail(f"the Kafka broker does not answer on {bootstrap}; its log ends with: {output}")
        time.sleep(0.1)


def _docker_answers():
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
def _container():
    from testcontainers.core.container import DockerContainer

    port = first_free_port()
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
