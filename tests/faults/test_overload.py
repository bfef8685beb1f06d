"""A stream that is ten times too fast does not raise the memory, and each event is counted, trained or not."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults.overload import KEPT, flooded
from tests.support.kafka import START


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_events_that_arrive_too_fast_stay_in_the_broker(kafka: Any, tmp_path: Path) -> None:
    all_kept = bool(os.environ.get(START))
    memory = flooded(tmp_path, kafka.bootstrap, seconds=10.0, pause=0.1, kept=None if all_kept else KEPT)
    assert memory.sent > 1.5 * memory.learned
    assert memory.exact
    # It goes up and down by 12 MB; a reader without bounds would hold some 50,000 messages of 0.5 kB and more.
    assert memory.curve[-1] - memory.curve[1] < 30e6
    # Events that a reader without bounds would have read before the broker deletes them.
    assert all_kept or memory.removed > 0
