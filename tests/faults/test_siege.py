"""Attacks end neither serving nor the learner, and a polite client is always answered."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.siege import besiege

pytestmark = pytest.mark.any_broker


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_attacks_on_http_end_no_part_and_fail_no_request(kafka: Any, tmp_path: Path) -> None:
    besieged = besiege(tmp_path, kafka.bootstrap, quiet_seconds=1.0, seconds=5.0)
    assert besieged.ended == ()
    assert besieged.failures == ()
    assert besieged.requests > 0
    assert besieged.memory < 100_000_000
    assert besieged.log_bytes < 500_000
