"""A topic or a history of which nothing can be learned is a problem."""

import pytest

from anabranch.learner.loop.reporter import unusable_sources
from anabranch.learner.status.report import PartitionReport


def report(pending=0, history=0, **outcomes):
    """Return the account of events by outcome, or by reason for skipped ones."""
    reasons = {name: count for name, count in outcomes.items() if name not in ("trained", "dead_lettered", "label")}
    counted = {name: count for name, count in outcomes.items() if name not in reasons}
    counted["skipped"] = sum(reasons.values())
    return PartitionReport(
        *(0, 0, 0, 0, 0, 0, pending, 0), outcomes=counted, skipped=reasons, history=history, files=2 * bool(history)
    )


@pytest.mark.parametrize(
    ("partitions", "named"),
    [
        (
            {"history": report(history=1, unlabelled=400)},
            "none of the 400 events of history can be used: 0 were",
        ),
        ({"history": report(history=1, dead_lettered=3)}, "3 were rejected, and 0 have no label"),
        ({"history": report(pending=1, history=1, dead_lettered=3)}, None),
        ({"history": report(history=1, left_to_topics=400)}, None),
        ({"history": report(history=1, left_to_topics=400, dead_lettered=2)}, "none of the 2 events of history"),
        ({"history": report(history=1, trained=1, dead_lettered=900)}, None),
        ({"history.2": report(history=2, repeated=900)}, None),
        ({"e:0": report(dead_lettered=60), "e:1": report(unlabelled=40, pending=9)}, "none of the 100 events of e can"),
        ({"e:0": report(dead_lettered=60), "e:1": report(unlabelled=39)}, None),
        ({"e:0": report(dead_lettered=900), "e:1": report(trained=1)}, None),
        ({"e:0": report(dead_lettered=900), "f:0": report(trained=1)}, "none of the 900 events of e can"),
        ({"e#0:0": report(dead_lettered=900), "e:0": report(trained=1)}, None),
        ({"e:0": report(tombstone=900)}, None),
        ({"labels:0": report(label=900)}, None),
        ({}, None),
    ],
)
def test_a_source_of_which_no_event_can_be_used_is_named(partitions, named):
    found = unusable_sources(partitions)
    assert len(found) == (named is not None)
    assert (named or "") in "".join(found)
