"""Redis with TLS and with a separate user: a real server, with a TLS proxy if it does not support TLS."""

import asyncio
import contextlib
import ssl
import threading

import numpy as np
import pytest

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.replay.tiers.redis_server import RedisServer
from anabranch.replay.tiers.redis_tier import RedisTier
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.services
PREFIX = "anabranch:test:rank-0:"


@pytest.fixture
def front(mortal_redis, certificate):
    """`front(client=None)`: a port that speaks TLS for the server, and asks for the certificate `client`."""
    with contextlib.ExitStack() as stack:

        def start(client=None):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate(30))
            if client is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(client)
            return stack.enter_context(_speaking_tls(context, mortal_redis.port))

        yield start


@contextlib.contextmanager
def _speaking_tls(context, behind):
    started, ports = threading.Event(), []
    loop, end = asyncio.new_event_loop(), asyncio.Event()

    async def copy(source, target):
        try:
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        finally:
            target.transport.abort()

    async def relay(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", behind)
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)
        for each in (back, writer):
            with contextlib.suppress(OSError):
                await each.wait_closed()

    async def serve():
        server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        await end.wait()
        server.close()
        # The clients have gone: what is under way ends by itself.
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    thread = threading.Thread(target=lambda: (loop.run_until_complete(serve()), loop.close()))
    thread.start()
    try:
        assert started.wait(PATIENCE_SECONDS)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


def use(url):
    """Write rows, read them back and remove them."""
    with RedisServer(url, PREFIX) as server:
        server.open(needed=True)
        tier, slots = RedisTier(server, "g", 40, 500), np.arange(500)
        rows = np.random.default_rng(0).integers(0, 256, (500, 40), np.uint8)
        tier.write(slots, slots.astype(np.uint64), rows)
        read, whole = tier.read(slots, slots.astype(np.uint64))
        assert whole.all()
        assert np.array_equal(read.numpy(), rows)
        tier.erase(slots)
        assert not tier.read(slots, slots.astype(np.uint64))[1].any()
        assert server.memory() == (0, "noeviction")
        assert server.problem is None


def test_rows_cross_tls_when_the_authority_is_named(front, certificate):
    port = front()
    authority, _ = certificate(30, "server-again")
    with pytest.raises(DependencyError, match=r"does not answer: .*certificate verify failed"):
        use(f"rediss://127.0.0.1:{port}/0")
    with pytest.raises(DependencyError, match=r"does not answer: .*certificate verify failed"):
        use(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority}")
    use(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.with_name('server.crt')}")


def test_a_server_may_ask_for_a_certificate_and_a_password(front, certificate, mortal_redis):
    mine, key = certificate(30, "mine")
    mortal_redis.stop()
    mortal_redis.start("--requirepass", "opensesame")
    at = f"127.0.0.1:{front(client=mine)}/0?ssl_ca_certs={mine.with_name('server.crt')}"
    use(f"rediss://:opensesame@{at}&ssl_certfile={mine}&ssl_keyfile={key}")
    with pytest.raises(DependencyError, match="does not answer"):
        use(f"rediss://:opensesame@{at}")
    with pytest.raises(SettingsError, match="refuses user or password of url"):
        use(f"rediss://{at}&ssl_certfile={mine}&ssl_keyfile={key}")


@pytest.mark.parametrize("files", ["ssl_ca_certs={nowhere}", "ssl_ca_certs={text}", "ssl_certfile={text}"])
def test_files_that_are_none_are_refused_before_anybody_is_asked(tmp_path, files):
    (tmp_path / "text").write_text("no certificate")
    named = files.format(nowhere=tmp_path / "nowhere", text=tmp_path / "text")
    with pytest.raises(
        SettingsError, match=rf"replay.redis.url names a file for TLS that cannot be used, of {named}: "
    ):
        RedisServer(f"rediss://127.0.0.1:1/0?{named}", PREFIX)


def test_a_user_needs_no_more_rights_than_the_docs_say(mortal_redis):
    rights = "+get +mget +set +mset +scan +unlink +info"
    mortal_redis.say(f"ACL SETUSER learner on >opensesame ~anabranch:test:* {rights}")
    at = f"127.0.0.1:{mortal_redis.port}/0"
    use(f"redis://learner:opensesame@{at}")
    with pytest.raises(SettingsError, match="refuses user or password of url"):
        use(f"redis://learner:sesame@{at}")
    mortal_redis.say("ACL SETUSER learner resetkeys ~theirs:*")
    with pytest.raises(SettingsError, match=r"cannot be used: .*permission"):
        use(f"redis://learner:opensesame@{at}")
