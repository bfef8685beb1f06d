"""No event is lost or trained twice: each event has its own weight, which counts."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.kills import killed_again_and_again


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_is_trained_once_whenever_the_learner_is_killed(kafka: Any, tmp_path: Path) -> None:
    account = killed_again_and_again(
        tmp_path, kafka.bootstrap, events=12_000, kills=2, checkpoint_every="300ms", seed=2
    )
    assert (account.kills, account.lost, account.twice, account.other) == (2, 0, 0, 0)
    assert account.exact
    assert account.early < 2, "no kill came after a step"
