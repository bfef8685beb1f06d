"""`state.json`: which versions have served, of all workers, in their order."""

from anabranch.learner.versions.format import RegistryState, Versions
from anabranch.serving.rollout.eligibility import ServingPolicy
from anabranch.serving.rollout.state_file import _MOST_RECENT, StateFile


def test_it_names_the_versions_that_served_most_recently(tmp_path):
    versions = Versions(tmp_path)
    workers = [StateFile(versions, ServingPolicy(versions)) for _ in range(2)]
    for previous, number in [(None, 1), (1, 2), (2, 4), (4, 2)]:
        for worker in workers:  # the second has nothing to add
            worker.swapped(previous, number)
    assert versions.state().recent == [1, 2, 4, 2]
    workers[0].swapped(None, 2)  # a restart
    assert versions.state().recent == [1, 2, 4, 2]
    for number in range(5, 5 + 2 * _MOST_RECENT):
        workers[0].swapped(number - 1, number)
    assert versions.state().recent == [*range(5 + _MOST_RECENT, 5 + 2 * _MOST_RECENT)]


def test_a_worker_that_is_late_to_pin_withdraws_no_version(tmp_path):
    """It chose while one was pinned, and writes after another worker has unpinned it."""
    versions = Versions(tmp_path)
    worker = StateFile(versions, ServingPolicy(versions))
    versions.write_state(RegistryState(serving=2, pinned=1))
    assert worker.read()
    versions.write_state(RegistryState(serving=2))
    worker.swapped(2, 1)
    assert versions.state().rolled_back == []
    # Without a pin, a version that is replaced by an older one is withdrawn.
    worker.swapped(1, 2)
    worker.swapped(2, 1)
    assert versions.state().rolled_back == [2]
