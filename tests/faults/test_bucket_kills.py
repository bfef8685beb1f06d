"""No event is lost or trained twice when the learner, its host or its object store is killed."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.bucket_kills import killed_with_its_store


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_is_trained_once_when_the_store_and_then_the_host_is_lost(kafka: Any, tmp_path: Path) -> None:
    done = killed_with_its_store(tmp_path / "pipeline", kafka.bootstrap, events=6000, kills=2, seed=5)
    assert (done.kills, done.store, done.hosts) == (2, 1, 1)
    assert (done.torn, done.lost, done.twice) == ([], 0, 0)
    assert done.exact
