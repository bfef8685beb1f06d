"""Topics that are not those that were read: another one of the name, or the same whose log lost its end."""

import pytest

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.fake import FakeClient, FakePartition
from anabranch.ingest.kafka.topic_recreation import Changed, compare, fingerprint

P0 = TopicPartition("events", 0)
NOTHING = Changed([], {}, [])


class Broker(FakeClient):
    """One partition with an id, of which what is committed may end before its log does."""

    def __init__(self, records, *, topic_id="one", committed=None):
        partition = FakePartition()
        for number in range(records):
            partition.append(b"%d" % number)
        super().__init__({P0: partition})
        self.ids = {"events": topic_id} if topic_id else {}
        self.committed_end = records if committed is None else committed

    def first_offsets(self, partitions, start, moment):
        return dict.fromkeys(partitions, self.committed_end if start == "latest" else 0)

    def replace(self, offset):
        self.topics[P0].messages[offset] = b"another"


def read_to(broker, topic_id="one"):
    """Return what is known of a partition that was read to its end."""
    broker.assign({P0: 0})
    (messages,) = broker.poll(None, 100)  # type: ignore[arg-type]
    return {P0: (PartitionFingerprint(topic_id, fingerprint(messages, -1)), messages.end)}


def test_an_unchanged_topic_is_not_reported():
    assert compare(Broker(12), read_to(Broker(10))) == NOTHING


@pytest.mark.parametrize("records", [8, 9])
def test_the_same_topic_that_is_shorter_lost_its_end_and_continues_there(records):
    assert compare(Broker(records), read_to(Broker(10))) == Changed([], {P0: records}, [])


def test_lost_offsets_may_have_had_no_record():
    before = Broker(10)
    before.topics[P0].skip(2)
    assert compare(Broker(10), read_to(before)) == Changed([], {P0: 10}, [])


def test_the_same_topic_that_has_grown_again_continues_after_the_last_record_that_was_read():
    broker = Broker(12)
    broker.replace(9)
    assert compare(broker, read_to(Broker(10))) == Changed([], {P0: 10}, [P0])


@pytest.mark.parametrize("ids", [("one", "two"), ("", None)], ids=["another id", "no ids"])
def test_a_topic_of_another_id_or_of_none_was_created_again(ids):
    assert compare(Broker(8, topic_id=ids[0]), read_to(Broker(10), ids[1] or None)).recreated == [P0]


def test_a_transaction_that_is_open_before_what_was_read_uncommitted_is_no_end_of_the_log():
    assert compare(Broker(15, committed=4), read_to(Broker(10))) == NOTHING


def test_a_record_that_cannot_be_read_back_is_no_evidence():
    broker = Broker(12)
    del broker.topics[P0].messages[9]
    assert compare(broker, read_to(Broker(10))) == NOTHING


def test_different_records_have_different_fingerprints():
    one, other = (fingerprint(Messages(P0, [3], [7], [key], [b"v"], [[]], 4), 0) for key in (b"", None))
    assert isinstance(one, Fingerprint)
    assert one != other
