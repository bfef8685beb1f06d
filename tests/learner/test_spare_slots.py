"""A learner whose steps are large loses no event for lack of a slot in the store."""

import threading
from datetime import timedelta

import pytest

from anabranch.ingest.events.block import Block, Coverage
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import LagPolicySettings, StreamSettings
from anabranch.ingest.transport.shared_ring import MOST_ROWS
from anabranch.learner.loop.stored_events import most_added
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.stream.batches import Batches

BATCH = 24


class Unlabelled:
    """A stream that has one event with a label in each block."""

    def __init__(self, schema):
        self.schema, self.next = schema, 0

    def poll(self, timeout):
        begin = self.next
        self.next += MOST_ROWS
        columns = fake_columns(self.schema, range(begin, self.next))
        columns["labelled"][1:] = False
        return Block(columns, (Coverage(0, begin, self.next),))

    def release(self, block):
        """Nothing is shared here."""


@pytest.mark.parametrize("kind", [{"unlabelled": "store"}, {"lag_policy": LagPolicySettings(action="store-only")}])
def test_a_batch_has_no_more_events_than_the_store_has_slots_for(schema, kind):
    settings = LearnerSettings(batch_size=BATCH, max_delay=timedelta(hours=1))
    most = most_added(settings, StreamSettings(topics=("events",), **kind), 1)
    batches = Batches(Unlabelled(schema), BATCH, settings.max_delay)
    for _ in range(5):
        batch = batches.next(threading.Event())
        assert batch is not None
        assert MOST_ROWS <= len(batch) + len(batch.stored_only["row"]) <= most
