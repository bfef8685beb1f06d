"""A state directory that the code of before made, at b75fc922, is refused in a sentence that says how to begin again.

`before_extensions.tar.gz` has two: `learner`, of a bench of 6 steps of 32 events with a disk tier, and `join`, of 8
events that wait for labels and 3 labels, two of which match.
"""

import tarfile
from pathlib import Path

import pytest
import torch

from anabranch.learner.checkpoints.format import FORMAT
from anabranch.learner.errors import MisfitError
from tests.learner.extensions.late_labels.joins import JoinBench, options
from tests.learner.learner_bench import LearnerBench, small_model

REFUSED = (
    f"checkpoint 1 in {{0}} is of format 13, and this release reads {FORMAT}; use the release that made it, or begin "
    "again by moving {0} away"
)


@pytest.fixture
def before(tmp_path):
    with tarfile.open(Path(__file__).with_name("before_extensions.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_checkpoint_of_before_is_refused_and_a_learner_begins_again_once_it_is_moved_away(before, schema):
    path, replay = before / "learner", {"disk": {"bytes": "100kB"}, "capacity": 40}
    torch.manual_seed(0)
    with pytest.raises(MisfitError) as refused:
        LearnerBench(path, schema, small_model(), 2, replay=replay)
    assert str(refused.value) == REFUSED.format(path / "checkpoints")
    (path / "checkpoints").rename(path / "away")
    bench = LearnerBench(path, schema, small_model(), 2, replay=replay)
    bench.run()
    bench.finish()
    assert (bench.loop.state.steps, bench.checkpoints.numbers()) == (2, [1])
    bench.close()


def test_events_that_waited_before_are_refused_and_others_wait_once_their_checkpoint_is_moved_away(before):
    path, size = before / "join", options(take_back=True, bytes=2**16)
    with pytest.raises(MisfitError) as refused:
        JoinBench(path, size).restart()
    assert str(refused.value) == REFUSED.format(path / "checkpoints")
    (path / "checkpoints").rename(path / "away")
    assert JoinBench(path, size).join.events.waiting == 0
