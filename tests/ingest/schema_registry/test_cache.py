"""Where messages have the id of their schema, and writer schemas by id, also while the registry does not answer."""

import threading
import uuid
from contextlib import contextmanager
from datetime import timedelta

import pytest

from anabranch.core.backoff import Backoff
from anabranch.ingest.errors import MissingSchemaError
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.schema_registry.client import RegistryClient
from anabranch.ingest.schema_registry.message_ids import FIRST_MESSAGE, HEADER, SchemaIdError, locate
from anabranch.ingest.schema_registry.writer_schema import WriterSchema
from anabranch.ingest.settings.registry import RegistrySettings
from tests.support.waiting import PATIENCE_SECONDS


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


@contextmanager
def schemas_of(registry, clock, *, fallback=False):
    patience = timedelta(seconds=PATIENCE_SECONDS)
    settings = RegistrySettings(url=registry.url, subject="payments-value", timeout=patience, fallback=fallback)
    backoff = Backoff(timedelta(seconds=10), timedelta(seconds=10))
    schemas = WriterSchemas(settings, RegistryClient(settings), backoff=backoff, clock=clock)
    try:
        yield schemas
    finally:
        schemas.close()


def text_of(found):
    assert isinstance(found, WriterSchema)
    return found.text


@pytest.fixture
def no_lag(monkeypatch):
    """What a registry lacks twice, it lacks."""
    monkeypatch.setattr("anabranch.ingest.schema_registry.cache._LAGGING_SECONDS", 0.0)


def fetched(schemas):
    """Let the background thread finish."""
    schemas.fetch_if_due()
    schemas._thread.wait()


def test_a_schema_is_fetched_once(registry):
    number = registry.register("payments-value", "one")
    with schemas_of(registry, Clock()) as schemas:
        for _ in range(3):
            assert text_of(schemas.find([number])[number]) == "one"
    assert registry.paths() == [f"/schemas/ids/{number}"]


def test_known_ids_go_on_while_the_registry_is_away_and_unknown_ones_are_awaited(registry):
    known, unknown = registry.register("payments-value", "one"), registry.register("payments-value", "two")
    clock = Clock()
    with schemas_of(registry, clock) as schemas:
        schemas.find([known])
        registry.faults.away = True
        found = schemas.find([known, unknown])
        assert (text_of(found[known]), found[unknown]) == ("one", None)
        assert "cannot be reached" in str(schemas.problem)
        asked, answers = len(registry.requests), schemas.answers
        registry.faults.away = False
        # Not before the back-off is over.
        assert schemas.find([unknown])[unknown] is None
        fetched(schemas)
        assert (len(registry.requests), schemas.answers) == (asked, answers)
        clock.now += 11
        fetched(schemas)
        assert schemas.answers == answers + 1
        assert schemas.problem is None
        assert text_of(schemas.find([unknown])[unknown]) == "two"


def test_a_registry_that_is_away_delays_no_lookup(registry, monkeypatch):
    with schemas_of(registry, Clock()) as schemas:
        registry.faults.away = True
        assert schemas.find([1])[1] is None
        monkeypatch.setattr(schemas._thread, "wait", lambda seconds: pytest.fail("a lookup waits"))
        assert schemas.find([1, 2]) == {1: None, 2: None}
        monkeypatch.undo()


@pytest.mark.usefixtures("no_lag")
def test_an_id_that_does_not_exist_is_asked_for_again_only_later(registry):
    clock = Clock()
    with schemas_of(registry, clock) as schemas:
        assert schemas.find([1])[1] == f"the registry at {registry.url} has no schemas/ids/1"
        schemas.find([1])
        assert len(registry.requests) == 2
        registry.register("payments-value", "one")
        clock.now += 31
        assert text_of(schemas.find([1])[1]) == "one"


def test_an_id_that_another_server_of_the_registry_has_just_got_is_asked_for_again(registry, monkeypatch):
    answer = registry.answer

    def answer_of_a_replica(path):
        answered = answer(path)
        if not registry.schemas:
            registry.register("payments-value", "one")
        return answered

    monkeypatch.setattr(registry, "answer", answer_of_a_replica)
    with schemas_of(registry, Clock()) as schemas:
        assert text_of(schemas.find([1])[1]) == "one"


class TestServersThatLag:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch):
        monkeypatch.setattr("anabranch.ingest.schema_registry.cache._AGAIN_SECONDS", 0.0)

    def test_an_id_is_asked_for_again_for_ten_seconds_while_its_messages_wait(self, registry):
        clock = Clock()
        with schemas_of(registry, clock) as schemas:
            assert schemas.find([1])[1] is None
            for _ in range(9):
                clock.now += 1
                fetched(schemas)
            assert schemas.answers == 0
            assert len(registry.requests) == 2 + 9
            registry.register("payments-value", "one")
            fetched(schemas)
            assert text_of(schemas.find([1])[1]) == "one"

    def test_an_id_that_no_server_has_after_that_is_given_up(self, registry):
        clock = Clock()
        with schemas_of(registry, clock) as schemas:
            assert schemas.find([1])[1] is None
            clock.now += 11
            fetched(schemas)
            assert schemas.answers == 1
            assert schemas.find([1])[1] == f"the registry at {registry.url} has no schemas/ids/1"

    def test_an_id_that_was_given_up_is_asked_for_as_long_the_second_time_and_once_again_after_that(self, registry):
        clock, missing = Clock(), f"the registry at {registry.url} has no schemas/ids/1"
        with schemas_of(registry, clock) as schemas:
            for _ in range(2):
                assert schemas.find([1])[1] is None
                clock.now += 9
                fetched(schemas)
                assert schemas.find([1])[1] is None
                clock.now += 2
                fetched(schemas)
                assert schemas.find([1])[1] == missing
                clock.now += 31
            asked = len(registry.requests)
            assert schemas.find([1])[1] == missing
            assert len(registry.requests) == asked + 2
            clock.now += 31
            registry.register("payments-value", "one")
            assert text_of(schemas.find([1])[1]) == "one"

    def test_after_three_that_were_given_up_others_are_asked_for_again_once(self, registry):
        clock = Clock()
        with schemas_of(registry, clock) as schemas:
            schemas.find([1, 2, 3])
            clock.now += 11
            fetched(schemas)
            assert schemas.find([4])[4] == f"the registry at {registry.url} has no schemas/ids/4"
            clock.now += 31
            assert schemas.find([5])[5] is None

    def test_an_id_that_is_asked_for_again_keeps_no_new_one_back(self, registry):
        with schemas_of(registry, Clock()) as schemas:
            assert schemas.find([99])[99] is None
            number = registry.register("payments-value", "one")
            assert text_of(schemas.find([number])[number]) == "one"
            assert schemas.answers == 1


@pytest.mark.usefixtures("no_lag")
def test_an_id_stays_unsure_when_its_round_ends(registry):
    clock = Clock()
    settings = RegistrySettings(url="http://registry", subject="payments-value", timeout="1s")
    client = SlowClient(settings, clock, 1)
    schemas = WriterSchemas(settings, client, clock=clock)
    schemas._wait_seconds = PATIENCE_SECONDS
    schemas.find([101, 102])
    assert schemas.answers == 0
    fetched(schemas)
    assert (client.asked, schemas.answers) == ([101, 101], 1)
    schemas.close()


def test_one_schema_that_cannot_be_fetched_keeps_no_other_back(registry):
    bad = registry.register("a", "a", references=[{"name": "b", "subject": "gone", "version": 1}])
    good = registry.register("payments-value", "one")
    with schemas_of(registry, Clock()) as schemas:
        found = schemas.find([bad, good])
        assert (found[bad], text_of(found[good])) == (None, "one")
        assert "lacks a schema that another one refers to" in str(schemas.problem)


def test_many_schemas_that_cannot_be_fetched_keep_no_other_back_either(registry, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.schema_registry.cache._MOST_AWAITED", 3)
    gone = [{"name": "b", "subject": "gone", "version": 1}]
    bad = [registry.register("a", f"{number}", references=gone) for number in range(9)]
    good = registry.register("payments-value", "one")
    with schemas_of(registry, Clock()) as schemas:
        for _ in range(4):
            found = schemas.find([*bad, good])
            schemas._thread.wait()
            schemas._retry_at = 0.0
        fetched(schemas)
        found = schemas.find([*bad, good])
        assert text_of(found[good]) == "one"
        assert [found[number] for number in bad] == [None] * 9


class TestTheNewestOfTheSubject:
    def test_is_asked_for_again_after_a_minute_and_the_former_one_is_used_meanwhile(self, registry):
        registry.register("payments-value", "one")
        clock = Clock()
        with schemas_of(registry, clock) as schemas:
            assert text_of(schemas.find([None])[None]) == "one"
            registry.register("payments-value", "two")
            assert text_of(schemas.find([None])[None]) == "one"
            clock.now += 61
            registry.faults.away = True
            assert text_of(schemas.find([None])[None]) == "one"
            fetched(schemas)
            registry.faults.away = False
            clock.now += 11
            fetched(schemas)
            assert text_of(schemas.find([None])[None]) == "two"

    def test_of_a_subject_that_does_not_exist_is_waited_for_with_a_fallback_alone(self, registry):
        with schemas_of(registry, Clock()) as schemas:
            assert schemas.find([None]) == {None: None}
            assert (schemas.problem, schemas.has_subject) == (None, False)
        with schemas_of(registry, Clock(), fallback=True) as schemas:
            assert schemas.find([None]) == {None: None}
            sentence = "has no subjects/payments-value/versions/latest: check stream.registry.subject"
            assert sentence in str(schemas.problem)


@pytest.mark.usefixtures("no_lag")
def test_ids_that_do_not_exist_fill_no_memory(registry, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.schema_registry.cache._MOST_MISSING", 10)
    with schemas_of(registry, Clock()) as schemas:
        schemas.find(range(100, 125))
        fetched(schemas)
        assert len(schemas._missing) <= 10
        assert not schemas._awaited


class SlowClient(RegistryClient):
    """Has no schemas, and takes seconds for each second answer."""

    def __init__(self, settings, clock, seconds):
        super().__init__(settings)
        self.asked: list[int | str] = []
        self._clock, self._wait = clock, seconds

    def schema(self, schema_id):
        self._clock.now += self._wait * (int(schema_id) % 2)
        self.asked.append(schema_id)
        raise MissingSchemaError(f"no {schema_id}")


@pytest.mark.parametrize(("timeout", "seconds", "in_a_round"), [("5s", 2, 6), ("3s", 2, 4), ("60s", 40, 2)])
def test_many_ids_that_do_not_exist_are_asked_for_in_rounds_and_messages_go_on_after_each(timeout, seconds, in_a_round):
    clock = Clock()
    settings = RegistrySettings(url="http://registry", subject="payments-value", timeout=timeout, fallback=True)
    client = SlowClient(settings, clock, seconds)
    schemas = WriterSchemas(settings, client, clock=clock)
    schemas._wait_seconds = PATIENCE_SECONDS
    ids = list(range(100, 130))
    for round_ in range(1, 4):
        found = schemas.find(ids)
        done = round_ * in_a_round
        assert client.asked == list(range(100, 100 + done))
        assert schemas.answers == round_
        assert [schema_id for schema_id in ids if found[schema_id] is not None] == ids[:in_a_round]
        ids = ids[in_a_round:]
    schemas.close()


def test_a_lookup_waits_two_seconds_at_most(registry, monkeypatch):
    may, answer = threading.Event(), registry.answer
    monkeypatch.setattr(registry, "answer", lambda path: (may.wait(PATIENCE_SECONDS), answer(path))[1])
    with schemas_of(registry, Clock()) as schemas:
        schemas._wait_seconds = 0.05
        number = registry.register("payments-value", "one")
        assert schemas.find([number])[number] is None
        assert schemas.problem is None
        may.set()
        fetched(schemas)
        assert text_of(schemas.find([number])[number]) == "one"


def test_a_bug_in_reading_one_answer_keeps_no_other_schema_back(registry, monkeypatch, caplog):
    good = registry.register("payments-value", "one")
    with schemas_of(registry, Clock()) as schemas:
        schema = schemas._client.schema
        monkeypatch.setattr(schemas._client, "schema", lambda number: schema(number) if number == good else 1 // 0)
        assert schemas.find([7])[7] is None
        assert schemas.problem == (
            "a bug in reading the schema 7 of the registry: ZeroDivisionError: integer division or modulo by zero"
        )
        schemas.find([good])
        schemas._thread.wait()
        schemas._retry_at = 0.0
        fetched(schemas)
        assert text_of(schemas.find([good])[good]) == "one"
        assert caplog.messages[0] == "a bug in reading the schema 7"


def test_the_schemas_that_are_kept_are_bounded_in_bytes_and_those_in_use_stay(registry, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.schema_registry.cache._MOST_BYTES", 250)
    used = registry.register("payments-value", "u" * 100)
    others = [registry.register("payments-value", f"{number}" * 50) for number in range(10, 20)]
    with schemas_of(registry, Clock()) as schemas:
        for number in others:
            assert text_of(schemas.find([used])[used]) == "u" * 100
            assert text_of(schemas.find([number])[number])
        assert schemas._schemas._bytes <= 250
    assert registry.paths().count(f"/schemas/ids/{used}") == 1


def test_a_schema_that_is_too_long_rejects_its_messages_and_waits_for_nothing(registry):
    registry.register("payments-value", "x" * 4_000_000)
    with schemas_of(registry, Clock()) as schemas:
        assert "answers with more than 4000000 bytes" in str(schemas.find([1])[1])
        assert schemas.problem is None


class TestIdsThatNoRegistryHas:
    """Messages whose first bytes are no ids, or are those of an attacker: each has another id."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        monkeypatch.setattr("anabranch.ingest.schema_registry.cache._LAGGING_SECONDS", 0.0)
        monkeypatch.setattr("anabranch.ingest.schema_registry.cache._MANY_MISSING", 5)
        monkeypatch.setattr("anabranch.ingest.schema_registry.cache._MOST_IN_A_ROW", 20)

    def decided(self, schemas, ids):
        """Request ids until each is decided, and return the reasons."""
        reasons: dict[object, str] = {}
        left: list[int] = list(ids)
        while left:
            found = schemas.find(left)
            reasons |= {schema_id: why for schema_id, why in found.items() if isinstance(why, str)}
            left = [schema_id for schema_id in left if found[schema_id] is None]
        return reasons

    def test_are_rejected_with_few_requests_once_many_in_a_row_were_missing(self, registry):
        clock = Clock()
        with schemas_of(registry, clock) as schemas:
            self.decided(schemas, range(1000, 1020))
            asked = len(registry.requests)
            assert asked <= 20 + 5 + 5
            reasons = self.decided(schemas, range(2000, 6000))
            assert len(registry.requests) == asked + 1
            assert len(reasons) == 4000
            assert " schemas that it was asked for, and is asked for few others" in reasons[5999]
            clock.now += 0.2
            self.decided(schemas, range(6000, 7000))
            assert len(registry.requests) == asked + 2

    def test_end_with_the_first_id_that_it_has(self, registry):
        clock = Clock()
        with schemas_of(registry, clock) as schemas:
            self.decided(schemas, range(1000, 1030))
            clock.now += 0.2
            number = registry.register("payments-value", "one")
            assert text_of(schemas.find([number])[number]) == "one"
            other = registry.register("payments-value", "two")
            assert text_of(schemas.find([other])[other]) == "two"


GUID = uuid.UUID("6d3bd7ad-7a5c-4a71-9ad2-7c1b93a4a1a7")
NUMBER = b"\0\0\0\x02\x01"


@pytest.mark.parametrize(
    ("value", "headers", "expected"),
    [
        (NUMBER + b"abc", [], (513, 5)),
        (b"\x01" + GUID.bytes + b"abc", [], (str(GUID), 17)),
        (b"abc", [("trace", b"x"), (HEADER, b"\x01" + GUID.bytes)], (str(GUID), 0)),
        (b"abc", [(HEADER, NUMBER)], (513, 0)),
        (NUMBER + b"abc", [(HEADER, b"\0\0\0\0\x07")], (7, 0)),
        (NUMBER + b"abc", [("__key_schema_id", b"\0\0\0\0\x07")], (513, 5)),
        (b'{"x": 1}', [], (None, 0)),
        (b"", [], (None, 0)),
    ],
)
def test_an_id_is_a_number_or_a_guid_in_the_value_or_in_a_header(value, headers, expected):
    located = locate(value, headers, has_indexes=False)
    assert (located.id, located.begin) == expected
    assert located.indexes == FIRST_MESSAGE


@pytest.mark.parametrize(
    ("written", "indexes"),
    [(b"\0", (0,)), (b"\x02\x02", (1,)), (b"\x04\x02\x06", (1, 3)), (b"\x02\xac\x02", (150,)), (b"\x02\0", (0,))],
)
def test_message_indexes_follow_the_id(written, indexes):
    assert locate(NUMBER + written + b"abc", [], has_indexes=True) == (513, indexes, 5 + len(written))
    assert locate(b"abc", [(HEADER, NUMBER + written)], has_indexes=True) == (513, indexes, 0)


@pytest.mark.parametrize(
    ("value", "headers", "sentence"),
    [
        (b"\0\0\0", [], "the id of its schema has 3 of 5 bytes"),
        (b"\x01" + GUID.bytes[:9], [], "the id of its schema has 10 of 17 bytes"),
        (b"abc", [(HEADER, b"\x01" + GUID.bytes[:-1])], "the id of its schema has 16 of 17 bytes"),
        (b"abc", [(HEADER, b"\x07")], f"the header {HEADER} does not begin with a byte 0 or 1"),
        (b"abc", [(HEADER, b"")], f"the header {HEADER} does not begin with a byte 0 or 1"),
        (b"\0\xde\xad\xbe\xef\0", [], "the id of its schema is 3735928559, and no registry has ids above 2147483647"),
        (NUMBER, [], "the message indexes after the id of its schema are not complete"),
        (NUMBER + b"\x04\x02", [], "the message indexes after the id of its schema are not complete"),
        (NUMBER + b"\xff" * 9, [], "the message indexes after the id of its schema are not complete"),
        (NUMBER + b"\x01", [], "-1 message indexes follow the id of its schema"),
        (NUMBER + b"\xfe\xff\xff\xff\x0f", [], "2147483647 message indexes follow the id of its schema"),
    ],
)
def test_an_id_that_is_not_complete_is_named(value, headers, sentence):
    with pytest.raises(SchemaIdError, match=sentence):
        locate(value, headers, has_indexes=True)
