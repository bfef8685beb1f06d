"""Wrong labels are undone though the learner is killed meanwhile: nothing is left of them."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.undo import undone_while_killed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_undone_labels_leave_no_trace_though_the_learner_is_killed(kafka: Any, tmp_path: Path) -> None:
    done = undone_while_killed(tmp_path, kafka.bootstrap, events=2000, batch=10, kills=1, seed=3)
    assert done.kills == 1
    assert done.tainted
    assert done.listed == done.failed == done.tainted
    assert (done.differ, done.wrong_answers) == ([], [])
    assert done.tensors > 5
    assert done.answers > 0
