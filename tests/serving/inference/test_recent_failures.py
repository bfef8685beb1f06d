"""Peers whose requests made the model raise are kept for a while, in bounded memory."""

from anabranch.serving.inference.batcher import RecentFailures


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_peer_is_removed_ten_seconds_after_its_last_failure():
    clock = Clock()
    failures = RecentFailures(clock)
    failures.add("a")
    clock.now += 6
    failures.add("a")
    clock.now += 9
    assert "a" in failures
    clock.now += 1
    assert "a" not in failures


def test_a_peer_that_was_not_added_or_has_no_name_is_not_contained():
    failures = RecentFailures()
    failures.add("a")
    failures.add(None)
    assert "b" not in failures
    assert None not in failures
    assert len(failures) == 1


def test_expired_peers_are_removed_when_another_is_added():
    clock = Clock()
    failures = RecentFailures(clock)
    for peer in range(100):
        failures.add(peer)
    clock.now += 10
    failures.add("new")
    assert len(failures) == 1


def test_the_oldest_peers_are_removed_for_newer_ones():
    failures = RecentFailures(Clock())
    failures.add("again")
    for peer in range(4095):
        failures.add(peer)
    failures.add("again")
    failures.add("one more")
    assert len(failures) == 4096
    assert 0 not in failures
    assert all(peer in failures for peer in ("again", 1, "one more"))
