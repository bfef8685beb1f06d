"""How a process writes log lines, and the options by which the processes that it starts do the same.

Text of files that others may have written is made safe for a terminal.
"""

import argparse
import json
import logging
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline: what a terminal interprets as commands, and what reverses the direction of a line."""


def printable(text: str) -> str:
    """Return a text with each control character replaced, so that it cannot send commands to a terminal."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


class _PrintableFormatter(logging.Formatter):
    """Formats lines, which may name what state files hold; those after the first of a message are indented.

    So a text that a message names can make no line that passes for another message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's name
        return super().formatMessage(record).replace("\n", "\n    ")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on a line; control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


@dataclass(frozen=True)
class LogSettings:
    """Which log lines are written, and how."""

    level: LogLevel = "info"
    format: LogFormat = "text"


_configured = LogSettings()


def configure_logging(settings: LogSettings = LogSettings()) -> None:
    """Write log lines to stderr. Lines of Kafka clients are not written: ingest logs what matters of them."""
    global _configured
    _configured = settings
    handler = logging.StreamHandler(sys.stderr)
    text = _PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(_JsonFormatter() if settings.format == "json" else text)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger("kafka").setLevel(logging.CRITICAL)


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `log_arguments` to the parser of a process."""
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info", help="log level")
    parser.add_argument("--log-format", choices=["text", "json"], default="text", help="format of log lines")


def log_arguments() -> tuple[str, ...]:
    """Return the options by which a process that this one starts logs in the same way; none for the defaults."""
    level = () if _configured.level == "info" else ("--log-level", _configured.level)
    return level if _configured.format == "text" else (*level, "--log-format", _configured.format)
