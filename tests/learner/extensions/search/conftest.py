"""What all tests of the search share."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Models are small in all of them."""
