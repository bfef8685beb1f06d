"""A learner reports each outlier, and predicts the other events as well as without them."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.outliers import VARIANTS, kinds_of, learn


@pytest.mark.any_broker  # Apache Kafka refuses some of the record times by itself
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["standard", "late-labels"])
def test_a_learner_names_each_outlier_and_goes_on(kafka: Any, tmp_path: Path, name: str) -> None:
    variant = next(each for each in VARIANTS if each.name == name)
    done = learn(tmp_path, kafka.bootstrap, variant, 6000, kinds_of(variant))
    assert (done.unnamed, done.alive, done.restarts, done.unfinished) == ([], [], 0, 0)
    assert done.right > 0.8
