"""Whatever becomes of the way to the broker or to Redis: training goes on, and what is counted adds up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.kills import CODE, ROW, TEXT, accounts
from tests.faults.pipeline import Pipeline, Supervised, adds_up, make_topic, send, total
from tests.faults.proxy import Fault, Proxy

FAULTS = {
    "corrupted": Fault(corrupted=0.5),
    "cut": Fault(cut=True),
    "stalled": Fault(stalled=True),
    "delayed": Fault(delay_seconds=0.2),
    "throttled": Fault(bytes_per_second=20_000),
}
EVENTS = 400


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_is_learned_from_once_whatever_becomes_of_the_way_to_the_broker(kafka: Any, tmp_path: Path) -> None:
    topic = make_topic(kafka.bootstrap, "proxy")
    text = TEXT.format(events=EVENTS * (len(FAULTS) + 1), batch=16, cut_every="200ms")
    with Proxy(kafka.bootstrap) as proxy:
        pipeline = Pipeline(tmp_path, proxy.address, topic, CODE, text)
        with Supervised(pipeline) as learner:
            for place, fault in enumerate([Fault(), *FAULTS.values()]):
                proxy.suffer(fault)
                rows = np.zeros(EVENTS, ROW)
                rows["id"] = np.arange(EVENTS) + place * EVENTS
                send(kafka.bootstrap, topic, (row.tobytes() for row in rows))
                if fault.cut or fault.stalled:
                    learner.until(lambda: pipeline.report().ill, "a word on the broker")
                    proxy.heal()
                if fault.corrupted:
                    learner.until(lambda: proxy.corruptions, "a bit that is flipped")
                    proxy.heal()
                wanted = (place + 1) * EVENTS
                report = learner.wait_for(lambda report, n=wanted: total(report) == n, f"all events of {fault}")
                proxy.heal()
            learner.wait_for(lambda report: not report.ill, "health")
            assert proxy.connections > 3
    assert adds_up(report)
    assert report.outcomes["trained"] == wanted
    assert (accounts(pipeline) == 1).all()
