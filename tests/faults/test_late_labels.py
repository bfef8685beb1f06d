"""The set of events joined with their labels is that of an offline join, whenever the learner is killed."""

import numpy as np
import pytest

from benchmarks.harness import data
from tests.faults import late_labels
from tests.faults.late_labels import SHUFFLED_HOURS, WAIT_HOURS, flights, killed_while_events_wait


@pytest.fixture
def year(monkeypatch):
    """A made-up year of 5,000 flights, since the true ones are fetched from a package registry."""
    generator = np.random.default_rng(0)
    due = np.sort(generator.uniform(0, 365 * 86_400, 5000))
    delay = generator.exponential(3 * 3600, 5000) + 1800
    arrays = {"t": due, "t_label": due + delay, "delay": generator.normal(0, 20, 5000)}
    monkeypatch.setattr(data, "load", lambda *_: arrays)


@pytest.mark.usefixtures("year")
def test_a_plain_loop_over_the_messages_joins_what_is_expected():
    stream = flights(7000, seed=1, now=1_800_000_000)
    wait_ms = WAIT_HOURS * 3_600_000 / late_labels.SPEED
    times = dict(zip(stream.events.rows["flight"].tolist(), stream.events.time_ms.tolist(), strict=True))
    found = np.zeros(7000, np.int64)
    for row, time_ms in zip(stream.labels.rows, stream.labels.time_ms.tolist(), strict=True):
        flight = int(row["flight"])
        if flight in times and abs(time_ms - times[flight]) <= wait_ms:
            found[flight - 1] = row["y"]
    assert (found == stream.expected).all()
    assert {0, 1, 2} == set(np.unique(found).tolist())
    assert (np.diff(stream.events.time_ms) < 0).any(), "shuffled"
    assert np.diff(stream.events.time_ms).min() > -SHUFFLED_HOURS * 3_600_000 / late_labels.SPEED - 2
    assert max(stream.events.time_ms.max(), stream.labels.time_ms.max()) <= 1_800_000_000_000 - 3_600_000


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("year")
def test_the_joined_set_is_that_of_an_offline_join_whenever_the_learner_is_killed(kafka, tmp_path):
    joined = killed_while_events_wait(
        tmp_path, kafka.bootstrap, flights(3000, seed=2), kills=2, checkpoint_every="300ms", seed=3
    )
    assert (joined.kills, joined.differs, joined.twice, joined.other) == (2, 0, 0, 0)
    assert joined.exact
    assert joined.timed_out > 50
