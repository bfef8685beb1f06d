"""The rate of the backfill, and its expected end."""

import pytest

from anabranch.ingest.transport.protocol import HistoryProgress
from anabranch.learner.loop.reporter import BackfillRate


def progress(read, **changes):
    members = {"rows_done": read, "rows": 1_000_000, "files_done": 0, "files": 3, "file": "a.parquet"}
    members |= {"done": False, "topics": ("history",)}
    return HistoryProgress(**members | changes)


def test_the_expected_end_follows_the_rate_of_the_last_half_minute():
    now = [50.0]
    rate = BackfillRate(lambda: now[0])
    first = rate.report(progress(400_000))
    assert (first.rate, first.seconds_left) == (0, None), "rows that an earlier process has read are no rate"
    for second in range(1, 61):
        now[0] += 1
        report = rate.report(progress(400_000 + (1000 if second <= 20 else 6000) * second))
    assert report.rate == pytest.approx(6000, rel=0.001)
    assert report.seconds_left == pytest.approx(40, rel=0.001)
    assert (report.topics, report.file, report.files, report.fraction) == (["history"], "a.parquet", 3, 0.76)


def test_a_stalled_backfill_has_no_end_and_a_switch_is_the_end():
    now = [50.0]
    rate = BackfillRate(lambda: now[0])
    rate.report(progress(999_999))
    now[0] += 40
    stalled = rate.report(progress(999_999))
    assert (stalled.rate, stalled.seconds_left, stalled.fraction) == (0, None, 0.999), (
        "rounded to 100 % it would be over"
    )
    done = rate.report(progress(1_000_000, done=True, files_done=3, file=None))
    assert (done.rate, done.seconds_left, done.fraction, done.done) == (0, 0, 1, True)
