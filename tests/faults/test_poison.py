"""Poisonous events end no process, and do not affect the good events among them."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.poison import KINDS, train_with_poison


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("client", "replicas"), [("kafka-python", 1), ("confluent", 1), ("kafka-python", 2)])
def test_each_kind_of_poison_has_its_outcome_and_ends_no_process(
    kafka: Any, tmp_path: Path, client: str, replicas: int
) -> None:
    outcome = train_with_poison(tmp_path, kafka.bootstrap, client, 400, 2 * len(KINDS), seed=1, replicas=replicas)
    assert (outcome.restarts, outcome.without_outcome, outcome.wrong) == (0, 0, 0), f"{outcome.report} {outcome.said}"
