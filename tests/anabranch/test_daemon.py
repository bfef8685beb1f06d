"""What every daemon does when it starts."""

import resource
from collections.abc import Iterator

import pytest

from anabranch.daemon import raise_descriptor_limit


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limits of file descriptors, which are restored."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_daemon_takes_the_descriptors_that_the_system_allows_it(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == limits[1]
    assert soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))
