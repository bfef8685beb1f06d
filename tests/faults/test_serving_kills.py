"""Kills of the learner do not affect clients of serving."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.serving_kills import asked_while_the_learner_is_killed

pytestmark = pytest.mark.any_broker


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_request_fails_while_the_learner_is_killed(kafka: Any, tmp_path: Path) -> None:
    asked = asked_while_the_learner_is_killed(tmp_path, kafka.bootstrap, kills=2, seed=0)
    assert asked.kills == 2
    assert asked.failures == []
    assert asked.requests > 0
