"""The rates at which partitions are read."""

import pytest

from ingest.events.partition import TopicPartition
from ingest.events.position import Position
from learner.stream.ledger import PartitionLedger
from learner.stream.partition_rates import Rates


def test_rates_are_an_exponential_mean_that_continues_after_a_restart() -> None:
    now = [100.0]
    account, added = PartitionLedger(TopicPartition("t", 0), 1000), PartitionLedger(TopicPartition("t", 1), 50)
    rates = Rates(lambda: now[0])

    def read(rates: Rates, seconds: float, offsets: int, *accounts: PartitionLedger) -> list[float]:
        now[0] += seconds
        for each in accounts:
            each.position = Position(each.position.offset + offsets)
        rates.measure([account, added][: max(1, len(accounts))])
        return rates.now

    assert read(rates, 1, 500, account) == [500]
    assert read(rates, 1, 0, account, added)[0] == pytest.approx(250, rel=0.01)
    assert rates.now[1] == 0
    assert read(rates, 2, 400, account, added) == [pytest.approx(225, rel=0.01), pytest.approx(100, rel=0.01)]
    state = rates.state()
    now[0] += 5000
    restarted = Rates(lambda: now[0])
    restarted.restore(state, [account, added])
    assert restarted.now == rates.now
    assert read(restarted, 4, 1200, account, added) == [pytest.approx(262, rel=0.02), pytest.approx(200, rel=0.02)]
    for _ in range(100):
        read(restarted, 30, 30, account, added)
    assert restarted.now == [pytest.approx(1, rel=0.1)] * 2, "what is fifty minutes ago does not count any more"
