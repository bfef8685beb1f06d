"""A log of forgotten events that has become long is written anew by the learner at work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingest.errors import DependencyError
from learner.forgetting import Forgetting
from replay.forgotten import ByKey
from replay.forgotten_file import Applied
from replay.forgotten_log import ForgottenLog


class Cuts:
    """No cuts, in a thread that does at once what it is given."""

    busy = False

    def run(self, work: Callable[[], object]) -> bool:
        work()
        return True


def test_a_learner_at_work_compacts_a_long_log_and_tries_again_when_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = ForgottenLog(tmp_path / "forgotten.log")
    records = [ByKey(time=0.0, by=f"e#0[0]@{n}", key_hash=f"{n:016x}", up_to={"e#0[0]": n}) for n in range(1, 9000)]
    written.append(records)
    written.append(Applied(time=0.0, through=written.count, store=0, guard=0))
    assert written.is_long
    cuts: Any = Cuts()
    forgetting = Forgetting(written, cuts, tmp_path, None, cuts, cuts)
    before = written.path.stat().st_size

    def away(_log: ForgottenLog) -> None:
        raise DependencyError("forgotten.log cannot be read: Stale file handle")

    monkeypatch.setattr("learner.forgetting._RETRY_SECONDS", 0.0)
    monkeypatch.setattr("learner.forgetting._EVERY_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ForgottenLog, "compact", away)
        for _ in range(5):
            forgetting.look_if_due()
    assert written.path.stat().st_size == before
    for _ in range(5):
        forgetting.look_if_due()
    assert written.path.stat().st_size < before / 2
    assert not written.is_long
    fresh = ForgottenLog(written.path)
    fresh.refresh()
    assert (fresh.count, fresh.through) == (written.count, written.through)
