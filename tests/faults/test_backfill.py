"""Events that history and topic both have are trained on once, also when the learner is killed at the switch."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.backfill import killed_while_backfilling


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_of_the_history_and_of_the_topic_is_trained_once(kafka: Any, tmp_path: Path) -> None:
    done = killed_while_backfilling(tmp_path, kafka.bootstrap, rows=12_000, kills=3, seed=15)
    assert (done.kills, done.lost, done.twice, done.other) == (3, 0, 0, 0)
    assert done.exact
    assert done.before > 0, "no kill came before the switch"
