import pytest

from anabranch.core.sizes import size_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999_499, "999 kB"), (999_600, "1 MB"), (1e6, "1 MB"), (5e15, "5,000 TB")],
)
def test_a_size_has_three_digits_and_the_unit_that_needs_no_exponent(value, text):
    assert size_text(value) == text
