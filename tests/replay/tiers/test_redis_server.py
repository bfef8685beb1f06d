"""A store whose Redis stops, restarts empty, hangs, is full, or evicts keys."""

import contextlib
import logging
import socket
import threading

import pytest
import redis
import torch
from redis._parsers import _RESP2Parser

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.replay.tiers.redis_server import RedisServer
from anabranch.replay.tiers.redis_tier import RedisTier
from anabranch.testing.stores import FakeCheckpoints, add_now, sample_of
from tests.support.waiting import PATIENCE_SECONDS, wait_until

PARTITIONS = [TopicPartition("events", 0)]
CAPACITY = 2000
ROW_BYTES = 40


@pytest.fixture
def build(schema, tmp_path, mortal_redis):
    """`build(disk=False, contents=None, **redis)`: stores without a memory tier, whose rows are all read from Redis."""
    stores: list[Store] = []

    def make(*, disk=False, contents=None, first=False, **redis):
        settings = ReplaySettings.model_validate(
            {
                "capacity": CAPACITY,
                "device_bytes": 0,
                "redis": {"url": mortal_redis.url, "bytes": "2MB", **redis},
                **({"disk": {"bytes": "1MB"}} if disk else {}),
            }
        )
        cpu = torch.device("cpu")
        stores.append(build_store(settings, schema, cpu, 0, tmp_path, contents, keys="test:rank-0", first=first))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture(autouse=True)
def _lasting_probe(monkeypatch):
    """Tests count keys, the probe's among them, which on a busy machine must not have expired by then."""
    monkeypatch.setattr("anabranch.replay.tiers.redis_server._PROBE_LIFE_MS", 600_000)


@pytest.fixture
def unanswered(monkeypatch):
    """Commands that had no reply, but for those by which a server that is away is looked for in the background."""
    found: list[object] = []
    execute = redis.Redis.execute_command

    def execute_and_record(client, *arguments, **options):
        try:
            return execute(client, *arguments, **options)
        except (redis.ConnectionError, redis.TimeoutError):
            if threading.current_thread().name != "redis-keeper":
                found.append(arguments[0])
            raise

    monkeypatch.setattr(redis.Redis, "execute_command", execute_and_record)
    return found


def fill(store, schema, begin, end):
    for offset in range(begin, end, 100):
        add_now(store, fake_columns(schema, range(offset, offset + 100)), PARTITIONS)
        store._remove_lost()
    store.tiers.sync()


def sampled(store):
    """Sample everything, and return how many events came."""
    return len(sample_of(store, 0, len(store)))


def missed(store):
    return store.tiers.stats.missed["redis"]


def test_those_that_lost_one_server_do_not_come_back_at_the_same_moments(monkeypatch, free_port):
    waits: list[float] = []

    def closes_within(_, seconds):
        waits.append(seconds)
        return len(waits) % 10 == 0

    monkeypatch.setattr(RedisServer, "_closes_within", closes_within)
    for _ in range(2):
        with RedisServer(f"redis://127.0.0.1:{free_port()}", "anabranch:test:") as server:
            server.open(needed=False)
            server._keeper.join(PATIENCE_SECONDS)
    longest = [min(0.1 * 2**tries, 5.0) for tries in range(10)] * 2
    assert all(delay / 2 <= seconds <= delay for seconds, delay in zip(waits, longest, strict=True))
    assert all(one != other for one, other in zip(waits[:10], waits[10:], strict=True))


def test_above_a_disk_nothing_is_lost_when_it_stops_and_all_is_put_back_when_it_is_there_again(
    schema, build, mortal_redis, caplog, unanswered
):
    caplog.set_level(logging.INFO)
    store = build(disk=True)
    fill(store, schema, 0, 1500)
    assert sampled(store) == 1500 == store.tiers.stats.read["redis"]
    mortal_redis.stop()
    for _ in range(20):
        assert sampled(store) == len(store)
    fill(store, schema, 1500, 1800)
    assert len(unanswered) == 1, "it is waited for again and again"
    assert f"replay.redis: 127.0.0.1:{mortal_redis.port} does not answer" in str(store.tiers.problem)
    mortal_redis.start()
    wait_until(lambda: store.tiers.problem is None)
    assert "answers again" in caplog.text
    assert missed(store) == 0
    assert sampled(store) == len(store)
    store.tiers.sync()
    assert missed(store) == len(store) == mortal_redis.keys() - 1  # all but the probe
    read = store.tiers.stats.read["redis"]
    assert sampled(store) == len(store)
    assert store.tiers.stats.read["redis"] - read == len(store)
    assert store.lost == 0


def test_the_name_of_a_server_that_became_a_replica_is_resolved_again_with_each_write(mortal_redis):
    """Its name may lead to the one that took over, and no connection of before does."""
    client = redis.Redis.from_url(mortal_redis.url)
    with RedisServer(mortal_redis.url, "test:") as server:
        server.open(needed=True)
        server.put(["1"], [memoryview(b"x")])
        connections = {server._client.client_id()}
        client.replicaof("127.0.0.1", 1)
        for _ in range(2):
            with pytest.raises(OSError, match="refuses rows: You can't write against a read only replica"):
                server.put(["1"], [memoryview(b"x")])
            connections.add(server._client.client_id())
        assert len(connections) == 3
        client.replicaof("NO", "ONE")
        server.put(["1"], [memoryview(b"x")])
        assert server.problem is None
    client.close()


@pytest.mark.parametrize("parser", ["hiredis", "python"])
def test_a_value_of_any_length_under_its_keys_is_not_read_whole(mortal_redis, caplog, parser):
    client = redis.Redis.from_url(mortal_redis.url)
    with RedisServer(mortal_redis.url, "test:") as server:
        if parser == "python":
            server._client.connection_pool.connection_kwargs["parser_class"] = _RESP2Parser
        server.open(needed=True)
        server.put(["row", "other"], [memoryview(bytes(100))] * 2)
        client.set("test:long", bytes(5_000_000))
        client.lpush("test:list", 1)
        for _ in range(2):
            values = server.get(["row", "long", "missing", "list", "other"], 100)
            assert [None if value is None else len(value) for value in values] == [100, 101, None, None, 100]
        assert "has values that are no rows" in str(server.problem)
        assert caplog.text.count("that are no rows") == 1
        server.put(["long"], [memoryview(bytes(100))])
        assert server.problem is None
        assert server.get(["row", "long"], 100) == [bytes(100)] * 2
    client.close()


def test_a_reply_that_comes_byte_after_byte_is_given_up(monkeypatch):
    ended = threading.Event()

    def answer(connection):
        with contextlib.suppress(OSError), connection:
            while request := connection.recv(65536):
                if b"MGET" not in request:
                    connection.sendall(b"+OK\r\n" * request.count(b"*"))
                    continue
                connection.sendall(b"*1\r\n$1000000\r\n")
                while not ended.wait(0.01):
                    connection.sendall(b"x")

    def serve(listener):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    monkeypatch.setattr("anabranch.replay.tiers.redis_server._LONGEST_REPLY_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with RedisServer(f"redis://127.0.0.1:{listener.getsockname()[1]}/0?protocol=2", "test:") as server:
            server.open(needed=True)
            with pytest.raises(OSError, match="does not answer"):
                server.get(["row"], 1_000_000)
        ended.set()
        listener.close()


def test_a_row_that_is_longer_than_most_replies_is_read(mortal_redis):
    with RedisServer(mortal_redis.url, "test:") as server:
        server.open(needed=True)
        server.put(["row"], [memoryview(bytes(3_000_000))])
        assert server.get(["row"], 3_000_000) == [bytes(3_000_000)]
        assert server.problem is None


def test_above_a_disk_a_pause_costs_one_wait_and_no_event(schema, build, mortal_redis, unanswered):
    store = build(disk=True)
    fill(store, schema, 0, 1000)
    with mortal_redis.paused():
        for _ in range(30):
            assert sampled(store) == 1000
        assert store.tiers.problem is not None
    assert len(unanswered) == 1, "it is waited for again and again"
    wait_until(lambda: store.tiers.problem is None)
    read = store.tiers.stats.read["redis"]
    assert sampled(store) == 1000
    assert store.tiers.stats.read["redis"] > read
    assert store.lost == 0


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-random"])
def test_above_a_disk_a_full_one_costs_no_event(schema, build, mortal_redis, policy):
    store = build(disk=True)
    fill(store, schema, 0, 500)
    mortal_redis.bound(mortal_redis.used_bytes + 50_000, policy)
    fill(store, schema, 500, 2000)
    for _ in range(3):
        assert sampled(store) == len(store)
    store.tiers.sync()
    assert store.lost == 0
    assert missed(store) > 0
    if policy == "noeviction":
        assert "is full; raise its maxmemory, or lower replay.redis.bytes" in str(store.tiers.problem)
        mortal_redis.bound(0, policy)
        sampled(store)
        store.tiers.sync()
        assert store.tiers.problem is None
        assert sampled(store) == len(store) == mortal_redis.keys() - 1


def test_as_the_primary_tier_it_can_be_away_without_an_event_being_lost(schema, build, mortal_redis):
    store = build()
    fill(store, schema, 0, 1000)
    with mortal_redis.paused():
        assert sampled(store) == 0
        store._remove_lost()
    assert (len(store), store.lost) == (1000, 0)
    wait_until(lambda: store.tiers.problem is None)
    assert sampled(store) == 1000


def test_as_the_primary_tier_what_came_while_it_was_away_is_counted_as_lost(schema, build, mortal_redis):
    store = build()
    fill(store, schema, 0, 1000)
    mortal_redis.stop()
    fill(store, schema, 1000, 1500)
    store._remove_lost()
    assert (len(store), store.lost) == (1000, 500)


def test_as_the_primary_tier_it_is_filled_again_by_the_stream_after_it_came_back_empty(schema, build, mortal_redis):
    store = build()
    fill(store, schema, 0, 1500)
    mortal_redis.stop()
    mortal_redis.start()
    assert sampled(store) == 0
    wait_until(lambda: store.tiers.problem is None)
    sampled(store)
    store._remove_lost()
    assert (len(store), store.lost) == (0, 1500)
    fill(store, schema, 1500, 4000)
    assert sampled(store) == len(store) >= 900


def test_as_the_primary_tier_what_it_evicts_is_a_missing_event(schema, build, mortal_redis):
    store = build()
    fill(store, schema, 0, 500)
    mortal_redis.bound(mortal_redis.used_bytes + 50_000, "allkeys-random")
    fill(store, schema, 500, 2000)
    for _ in range(2):  # to answer takes memory too, for which more may have to go
        came = sampled(store)
        store._remove_lost()
        assert 0 < came == len(store) < 2000
        assert store.lost + len(store) == 2000


def test_as_the_primary_tier_a_full_one_turns_events_away(schema, build, mortal_redis):
    store = build()
    fill(store, schema, 0, 500)
    mortal_redis.bound(mortal_redis.used_bytes, "noeviction")
    fill(store, schema, 500, 1000)
    store._remove_lost()
    assert store.lost > 0
    assert len(store) + store.lost == 1000
    assert sampled(store) == len(store) >= 500


def test_a_store_that_is_closed_leaves_its_server(build):
    store = build()
    (redis,) = store.tiers.slow
    assert isinstance(redis, RedisTier)
    assert redis.server._keeper.is_alive()
    store.close()
    assert not redis.server._keeper.is_alive()


def test_a_restart_goes_on_with_what_it_has(schema, build, mortal_redis):
    store = build()
    fill(store, schema, 0, 1500)
    contents = FakeCheckpoints(store).checkpoint(1)
    again = build(contents=contents)
    assert sampled(again) == 1500
    mortal_redis.stop()
    mortal_redis.start()
    third = build(contents=contents)
    sampled(third)
    third._remove_lost()
    assert (len(third), third.lost) == (0, 1500)


def test_as_a_cache_it_is_warm_after_a_restart(schema, build, mortal_redis):
    store = build(disk=True)
    fill(store, schema, 0, 1500)
    contents = FakeCheckpoints(store).checkpoint(1)
    again = build(disk=True, contents=contents)
    assert sampled(again) == 1500 == again.tiers.stats.read["redis"] == again.tiers.rows(len(again))["redis"]


def test_one_that_a_checkpoint_was_copied_from_is_found_again_when_it_was_away(schema, build, mortal_redis):
    store = build()
    fill(store, schema, 0, 500)
    moved = build(disk=True, contents=FakeCheckpoints(store).checkpoint(1))
    assert sampled(moved) == 500
    mortal_redis.stop()
    assert sampled(moved) == 500
    assert moved.tiers.problem is not None
    mortal_redis.start()
    wait_until(lambda: moved.tiers.problem is None)


def test_what_no_checkpoint_can_name_is_swept_and_what_others_have_is_not(schema, build, mortal_redis):
    mortal_redis.say("SET anabranch:other:rank-0:x:1 theirs")
    mortal_redis.say("SET anabranch:test:rank-10:x:1 theirs")
    store = build(first=True)
    fill(store, schema, 0, 1500)
    contents = FakeCheckpoints(store).checkpoint(3)
    (redis,) = store.tiers.slow
    assert isinstance(redis, RedisTier)
    server = redis.server
    wait_until(lambda: not server._sweeps)
    moved = build(contents=contents, bytes="200kB")
    moved.tiers.sync()
    assert mortal_redis.keys() == 1500 + len(moved) + 4  # those two, the probe, and the list of checkpoints
    moved.begin_snapshot(4)
    moved.end_snapshot(3)
    assert sampled(moved) == len(moved)
    moved.begin_snapshot(5)
    moved.end_snapshot(5)
    wait_until(lambda: bool(mortal_redis.keys() == len(moved) + 3))
    assert sampled(moved) == len(moved) > 500
    build(first=True)
    wait_until(lambda: bool(mortal_redis.keys() <= 3))


def test_it_takes_no_more_memory_than_it_may(schema, mortal_redis):
    server = RedisServer(mortal_redis.url, "anabranch:a-pipeline-with-a-name:rank-0:")
    server.open(needed=True)
    for row_bytes in (40, 1000, 3144):
        mortal_redis.say("CONFIG SET maxmemory 0")
        tier = RedisTier(server, f"{row_bytes:016d}", row_bytes, 1 << 20)
        used, n = mortal_redis.used_bytes, 8000
        for begin in range(0, n, 1000):
            slots = torch.arange(begin, begin + 1000).numpy()
            tier.write(slots, slots.astype("u8"), torch.zeros((1000, row_bytes), dtype=torch.uint8).numpy())
        assert 0.6 < (mortal_redis.used_bytes - used) / (n * tier.slot_bytes) <= 1.05
    server.close()


def test_a_checkpoint_whose_rows_are_in_redis_needs_it(schema, build, mortal_redis, tmp_path):
    store = build()
    fill(store, schema, 0, 500)
    contents = FakeCheckpoints(store).checkpoint(1)
    with pytest.raises(SettingsError, match=r"contents of checkpoint 1 are in Redis, and replay.redis is not set"):
        build_store(ReplaySettings(), schema, torch.device("cpu"), 0, tmp_path, contents)
    mortal_redis.stop()
    with pytest.raises(DependencyError, match=r"replay.redis: 127.0.0.1:\d+ does not answer: .*; start it"):
        build(disk=True, contents=contents)


class TestStart:
    def test_a_server_that_is_away_is_needed_as_the_primary_tier_alone(self, schema, build, mortal_redis):
        mortal_redis.stop()
        with pytest.raises(DependencyError, match="does not answer"):
            build()
        store = build(disk=True)
        assert "does not answer" in str(store.tiers.problem)
        fill(store, schema, 0, 500)
        mortal_redis.start()
        wait_until(lambda: store.tiers.problem is None)
        assert sampled(store) == 500

    def test_a_password_is_required_and_never_shown(self, build, mortal_redis):
        mortal_redis.stop()
        mortal_redis.start("--requirepass", "opensesame")
        right = mortal_redis.url.replace("redis://", "redis://:opensesame@")
        build(url=right)
        for wrong in (mortal_redis.url, right.replace("opensesame", "sesame-open")):
            with pytest.raises(SettingsError, match="refuses user or password of url") as caught:
                build(url=wrong)
            assert "sesame" not in str(caught.value)
        assert "sesame" not in repr(ReplaySettings.model_validate({"redis": {"url": right, "bytes": "2MB"}}))

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("redis://localhost:port/0", "replay.redis.url cannot be used"),
            ("redis://127.0.0.1:{port}/99", "cannot be used: DB index is out of range"),
            (
                "redis://127.0.0.1:{port}/0?colour=red",
                "replay.redis.url has an option that the client does not support",
            ),
        ],
    )
    def test_a_url_that_cannot_work_is_refused(self, build, mortal_redis, url, said):
        with pytest.raises(SettingsError, match=said):
            build(disk=True, url=url.format(port=mortal_redis.port))

    @pytest.mark.parametrize(
        ("refuse", "stop", "said"),
        [
            ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "read only replica"),
            ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0", "NOREPLICAS"),
            ("BGSAVE", "CONFIG SET stop-writes-on-bgsave-error no", "MISCONF"),
        ],
    )
    def test_a_refusal_that_passes_ends_no_learner_for_good(self, schema, build, mortal_redis, refuse, stop, said):
        """Above a disk the store goes on without it; as the primary tier the start is tried again."""
        mortal_redis.stop()
        mortal_redis.start("--save", "3600 1")
        (mortal_redis.folder / "dump.rdb").mkdir()  # so that snapshots fail
        mortal_redis.say(refuse)
        if refuse == "BGSAVE":
            wait_until(lambda: b"rdb_last_bgsave_status:err" in mortal_redis.say("INFO persistence"))
        with pytest.raises(DependencyError, match=f"takes no rows for now: .*{said}.*; repair it"):
            build()
        store = build(disk=True)
        assert "refuses rows: " in str(store.tiers.problem)
        assert said in str(store.tiers.problem)
        fill(store, schema, 0, 500)
        assert sampled(store) == 500
        mortal_redis.say(stop)
        fill(store, schema, 500, 600)
        assert store.tiers.problem is None
        mortal_redis.say("CONFIG SET save ''")  # it would not end without a snapshot

    @pytest.mark.parametrize(
        ("answer", "passes"),
        [
            ("CLUSTERDOWN The cluster is down", True),
            ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", True),
            ("TRYAGAIN Multiple keys request during rehashing of slot", True),
            ("BUSY Redis is busy running a script.", True),
            ("MOVED 3999 127.0.0.1:6381", False),
            ("NOPERM this user has no permissions to run the 'set' command", False),
            ("ERR unknown command 'SET'", False),
        ],
    )
    def test_refusals_of_the_state_of_a_server_pass_and_those_of_settings_do_not(self, monkeypatch, answer, passes):
        server = RedisServer("redis://127.0.0.1:1/0", "test:")
        refusal = _RESP2Parser.parse_error(answer)

        def refuse():
            raise refusal

        monkeypatch.setattr(server, "_probe", refuse)
        with pytest.raises(DependencyError if passes else SettingsError):
            server.open(needed=True)
        if passes:
            with server:
                server.open(needed=False)
                assert "refuses rows" in str(server.problem)

    @pytest.mark.parametrize("disk", [True, False])
    def test_a_start_says_what_of_its_memory_does_not_fit(self, build, mortal_redis, caplog, disk):
        mortal_redis.bound(2_100_000, "allkeys-lru")
        build(disk=disk)
        assert "has 2 MB, and replay.redis.bytes is 2 MB" in caplog.text
        assert ("maxmemory-policy allkeys-lru, and holds what no other tier has" in caplog.text) is not disk

    def test_a_server_that_does_not_say_its_memory_refuses_no_rows(self, mortal_redis):
        mortal_redis.say("ACL SETUSER default -info")
        with RedisServer(mortal_redis.url, "test:") as server:
            server.open(needed=True)
            with pytest.raises(OSError, match=r"does not say how much memory it has: .*no permissions"):
                server.memory()
            assert server.problem is None
