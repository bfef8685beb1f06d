"""A learner whose steps are large loses no event for lack of a slot in the store."""

import threading
from datetime import timedelta
from typing import Any

import pytest

from ingest.config import LagPolicySettings, StreamSettings
from ingest.events.block import Block, Coverage
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from ingest.transport.shared_ring import MOST_ROWS
from learner.config import LearnerSettings
from learner.resume import most_added
from learner.stream.batches import Batches

BATCH = 24


class Unlabelled:
    """A stream that has one event with a label in each block."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.next = schema, 0

    def poll(self, timeout: timedelta) -> Block:
        begin = self.next
        self.next += MOST_ROWS
        columns = fake_columns(self.schema, range(begin, self.next))
        columns["labelled"][1:] = False
        return Block(columns, (Coverage(0, begin, self.next),))

    def release(self, block: Block) -> None:
        """Nothing is shared here."""


@pytest.mark.parametrize("kind", [{"unlabelled": "store"}, {"lag_policy": LagPolicySettings(action="store-only")}])
def test_a_batch_has_no_more_events_than_the_store_has_slots_for(schema: Schema, kind: dict[str, Any]) -> None:
    settings = LearnerSettings(batch_size=BATCH, max_delay=timedelta(hours=1))
    most = most_added(settings, StreamSettings(topics=("events",), **kind), 1)
    batches = Batches(Unlabelled(schema), BATCH, settings.max_delay)
    for _ in range(5):
        batch = batches.next(threading.Event())
        assert batch is not None
        assert MOST_ROWS <= len(batch) + len(batch.stored_only["row"]) <= most
