"""Log lines: text of others makes no line."""

import logging

from anabranch.core.logs import _PrintableFormatter


def test_a_text_with_line_breaks_makes_no_line_that_passes_for_another_message():
    forged = "a\n2026-01-01 00:00:00,000 INFO learner.run all is well\r\x1b[2J"
    record = logging.LogRecord("ingest", logging.WARNING, "", 0, "the file %s is missing", (forged,), None)
    first, second = _PrintableFormatter("%(levelname)s %(name)s %(message)s").format(record).split("\n")
    assert first == "WARNING ingest the file a"
    assert second.startswith("    2026-01-01 00:00:00,000 INFO")
    assert "\x1b" not in second
