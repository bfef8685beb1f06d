"""Which checkpoints stay when a new one is written."""

from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints

IN_A_TIER = {"replay": {"file": {"name": "1.rows", "id": "a"}, "row_bytes": None}}
"""The state of a checkpoint whose rows are in a tier alone."""


def test_a_refused_checkpoint_does_not_count_as_one_that_is_kept(make_bench):
    bench = make_bench(4)
    bench.run()
    bench.finish()
    found = bench.checkpoints.newest()
    assert found is not None
    payload = bench.checkpoints.write(2, found[1], 0.0) / "rank-0" / "rng.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1])
    checkpoints = Checkpoints(bench.checkpoints.path, bench.checkpoints.schema, 2)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0] == 1
    checkpoints.write(3, found[1], 0.0)
    CheckpointPruning(checkpoints, 2).prune()
    assert checkpoints.numbers() == [1, 2, 3], "it is kept until there are two newer ones"
    checkpoints.write(4, found[1], 0.0)
    CheckpointPruning(checkpoints, 2).prune()
    assert checkpoints.numbers() == [3, 4]


def test_the_last_complete_checkpoint_of_each_hour_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, "schema", 1)
    states = {5: IN_A_TIER, 8: IN_A_TIER}
    for number, hour in enumerate([0, 1, 1, 2, 2, 3, 3, 3], start=1):
        checkpoints.write(number, Checkpoint(number, {}, states.get(number, {})), 3600.0 * hour + number)
    pruning = CheckpointPruning(checkpoints, 1, hours=2)
    assert [number for number in checkpoints.numbers() if pruning.names_slots(number)] == [5, 8]
    assert pruning.prune() == 8
    assert checkpoints.numbers() == [4, 7, 8], "5 is the last of its hour, and the tier reuses its slots"
    assert pruning.recent() == {8}
    assert pruning.prune() == 8
    assert checkpoints.numbers() == [4, 7, 8]
