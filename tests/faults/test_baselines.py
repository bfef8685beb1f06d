"""A deterministic run with kills ends as one without, also with most of the store on disk."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.baselines import MEMORY_BYTES, with_and_without_kills


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_do_not_change_the_weights_with_replay_from_disk(kafka: Any, tmp_path: Path) -> None:
    runs = with_and_without_kills(tmp_path, kafka.bootstrap, events=6400, kills=1, seed=0)
    assert runs.equal
    assert runs.kills == 1
    assert runs.tensors > 10
    assert runs.stored_bytes > 5 * MEMORY_BYTES
