"""Versions that are rebuilt: bit for bit where that is promised, and else with how far they are, and why."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.learner.rebuilding.conftest import Audited, events

pytestmark = [pytest.mark.any_broker, pytest.mark.process]


@pytest.mark.timeout(300)
def test_versions_are_rebuilt_bit_for_bit_from_the_checkpoint_before_them(
    audited: Audited, produce: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two partitions of unlike length; the learner is stopped and started between."""
    for partition, count in enumerate((700, 300)):
        produce(audited.bootstrap, audited.topic, events(count, partition), partition=partition)
    audited.learn(monkeypatch, 40, (15, 30))
    audited.learn(monkeypatch, 90, (60,))
    numbers = audited.versions.numbers()
    assert len(numbers) >= 80
    before = {path: path.stat().st_mtime_ns for path in audited.spec.state_dir.rglob("*")}
    for number in random.Random(0).sample(numbers, 3):
        rebuilt = audited.rebuild(number)
        assert rebuilt is not None
        assert rebuilt.equal, rebuilt
        assert rebuilt.reasons == []
    assert before == {path: path.stat().st_mtime_ns for path in audited.spec.state_dir.rglob("*")}
