"""Which erasure records a learner applies again, keeps and drops, given its checkpoints."""

import shutil

import numpy as np
import pytest

from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.background_erasure import BackgroundErasure
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.erase_checkpoints import applied_to_all
from anabranch.learner.checkpoints.format import RANK
from anabranch.learner.errors import MisfitError
from anabranch.learner.loop.erasure import Erasure
from anabranch.learner.loop.resume import ResumePoint
from anabranch.replay.erasure.erased_events import ByKey
from anabranch.replay.erasure.erasure_log import Applied, ErasureLog
from anabranch.replay.tiers.disk import DiskTier
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize("waits", [False, True])
def test_caches_are_stale_after_a_start_with_pending_records(make_bench, monkeypatch, *, waits):
    bench = make_bench(1, replay={"disk": {"bytes": "2MB"}})
    marked: list[bool] = []
    monkeypatch.setattr(bench.store.tiers.erasure, "mark_stale", lambda: marked.append(True))
    bench.log.append([ByKey(time=0.0, by="command", key_hash="0" * 16, up_to={})])
    if not waits:
        bench.log.append(Applied(time=0.0, through=1, store=0, holdout=0))
    files = BackgroundErasure(bench.log, bench.checkpoints, bench.checkpointer)
    Erasure(bench.log, files, bench.holdout).record_erased(0, 0)
    assert marked == [True] * waits


def test_stale_slots_are_erased_before_a_record_is_marked_as_applied(make_bench, monkeypatch):
    bench = make_bench(1, replay={"disk": {"bytes": "2MB"}})
    erased_from: list[int] = []

    def erase_stale(first, most):
        assert not bench.log.through
        erased_from.append(first)
        return len(erased_from) < 3

    monkeypatch.setattr(bench.store.tiers.erasure, "erase_stale", erase_stale)
    bench.log.append([ByKey(time=0.0, by="command", key_hash="0" * 16, up_to={})])
    bench.finish()
    assert bench.log.through == 1
    assert len(erased_from) == 3
    assert erased_from == sorted(set(erased_from))


def test_records_that_a_checkpoint_needs_are_kept_and_a_checkpoint_without_them_is_refused(make_bench, tmp_path):
    key = f"{10**9:016x}"
    bench = make_bench(12)
    bench.run()
    bench.finish()
    assert applied_to_all(bench.checkpoints, 5) == 0
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "backup")
    bench.close()
    bench.log.append([ByKey(time=0, by="command", key_hash=key, up_to={"events#0[0]": 3}) for _ in range(3)])
    bench.log.append(Applied(time=0, through=3, store=0, holdout=0))
    later = make_bench(14)
    later.resume()
    later.run()
    later.finish()
    later.close()
    assert [applied_to_all(later.checkpoints, through) for through in (5, 3, 2)] == [0, 0, 0], (
        "the first checkpoint needs all records"
    )
    CheckpointPruning(later.checkpoints, 1).prune()
    assert [applied_to_all(later.checkpoints, through) for through in (5, 3, 2)] == [3, 3, 2]
    written = ErasureLog(tmp_path / "erasures.log")
    written.refresh()
    written.compact({"events#0[0]": 3}, applied_to_all(later.checkpoints, written.through))
    written.refresh()
    assert (written.dropped, bool(written.erased)) == (3, False)
    assert ResumePoint.newest(later.checkpoints, written).found is not None
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "backup").rename(tmp_path / "checkpoints")
    with pytest.raises(
        MisfitError, match=r"checkpoint 1 was made before events were erased that .*erasures.log no longer lists"
    ):
        ResumePoint.newest(later.checkpoints, written)
    flip = later.checkpoints.path / "1" / RANK / "state.json"
    flip.write_bytes(flip.read_bytes().replace(b'"erased":0', b'"erased":9'))
    assert applied_to_all(later.checkpoints, 3) == 0, "the state of a damaged checkpoint was used"


def test_records_that_another_host_has_applied_are_applied_to_the_files_of_this_one(make_bench, tmp_path):
    """After a failover and back: this host still has files with the events that were erased elsewhere meanwhile."""
    bench = make_bench(12, replay={"disk": {"bytes": "1MB"}})
    bench.run()
    bench.finish()
    bench.close()
    old = DiskTier.create(tmp_path / "replay" / RANK / "9.rows", 16, 100)
    old.write(np.arange(50), np.arange(50, dtype=np.uint64), np.full((50, 16), 7, np.uint8))
    old.close()
    shutil.copytree(bench.checkpoints.path / "1", bench.checkpoints.path / "5.set-aside")
    bench.log.append([ByKey(time=0, by="command", key_hash=f"{10**9:016x}", up_to={"events#0[0]": 3})])
    bench.log.append(Applied(time=0, through=1, store=0, holdout=0))
    for fetched in (False, True):
        later = make_bench(14, replay={"disk": {"bytes": "1MB"}})
        later.resume()
        if fetched:
            later.erasure.start_over()
        later.erasure.finish(Deadline(PATIENCE))
        assert (bytes([7] * 16) in old.path.read_bytes()) == (not fetched)
        assert (bench.checkpoints.path / "5.set-aside").exists() == (not fetched)
        assert later.erasure.through == 1
        later.close()
