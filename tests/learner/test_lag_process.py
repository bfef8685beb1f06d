"""A stream that is faster than training, learned by a real learner that is killed in the midst of it."""

import pytest

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import pack_rows
from anabranch.ingest.settings.stream import SchemaSettings

STREAM = """
format = "rows"
buffer_bytes = 1_000_000
[stream.lag_policy]
action = "{action}"
high = "1s"
low = "500ms"
"""
CONFIG = """
batch_size = 16
replay_ratio = 0
[versions]
publish_every = "1h"
[checkpoints]
every = "300ms"
[gate]
holdout_fraction = 0.1
"""
SLOW = """
import time
from torch import nn
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.03)
        return super().forward(x)
def build():
    return Slow(512, 3)
"""
MESSAGES, ROWS = 300, 20


def total(report, term):
    return sum(getattr(partition, term) for partition in report.partitions.values())


def left_out(report):
    return report.outcomes["stored_only"] + report.outcomes["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("action", ["sample", "store-only", "skip-to-latest"])
def test_a_stream_that_is_too_fast_is_accounted_for_exactly_though_the_learner_is_killed(
    kafka, make_topic, produce, write_pipeline, start, action
):
    topic = make_topic(partitions=2)
    stream = STREAM.format(action=action)
    config = write_pipeline(kafka.bootstrap, topic, CONFIG, SLOW, stream=stream, width=512)
    learner = start(config)
    learner.wait_for(lambda report: bool(report.partitions))
    rows = [{"x": [float(i % 3 == k) for k in range(512)], "y": i % 3} for i in range(ROWS)]
    features = {"x": {"dtype": "float32", "shape": [512]}}
    schema = SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}})
    messages = [pack_rows(Schema(schema), rows)] * (MESSAGES // 2)
    for partition in range(2):
        produce(kafka.bootstrap, topic, messages, partition=partition)
    learner.wait_for(lambda each: total(each, "passed") + left_out(each) > 0)
    learner.kill()
    learner = start(config)

    def is_through(each):
        """Whether all is accounted for, and the lag is known, as it is not yet in the first report of a life."""
        known = each.lag_age_seconds is not None
        return known and total(each, "end") == MESSAGES and not total(each, "pending") and not each.behind

    report = learner.wait_for(is_through)
    assert report.lag_age_seconds is not None
    assert report.lag_age_seconds < 30
    terms = {term: total(report, term) for term in ("start", "finished", "passed", "gaps", "removed")}
    assert terms["start"] == terms["gaps"] == terms["removed"] == 0
    assert terms["finished"] + terms["passed"] == MESSAGES
    rows_finished = terms["finished"] * ROWS
    assert sum(report.outcomes.values()) == rows_finished
    assert report.skipped == ({"behind": report.outcomes["skipped"]} if report.outcomes["skipped"] else {})
    assert (terms["passed"] > 0) == (action == "skip-to-latest")
    assert (report.outcomes["stored_only"] > 0) == (action == "store-only")
    assert action != "sample" or report.outcomes["skipped"] > 0
    # Five standard errors of a tenth of them; how many there are depends on how fast the machine is.
    assert abs(report.outcomes["held_out"] / rows_finished - 0.1) < 5 * (0.1 * 0.9 / rows_finished) ** 0.5
    assert report.replay_rows["device"] == report.outcomes["trained"] + report.outcomes["stored_only"]
    # Having caught up it trains on all again; on a machine that does other things it may fall behind by one more.
    for more in range(1, 21):
        produce(kafka.bootstrap, topic, messages[:1], partition=more % 2)
        after = learner.wait_for(
            lambda each, end=MESSAGES + more: (
                total(each, "end") == end and not total(each, "pending") and not each.behind
            )
        )
        kept = sum(after.outcomes[kind] - report.outcomes[kind] for kind in ("trained", "held_out"))
        if kept == ROWS:
            break
        report = after
    assert kept == ROWS
