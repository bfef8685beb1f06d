"""The request log: one line of JSON for each request at the configured level, with the id of its answer."""

import json
import logging
import os
import re
import time
from datetime import timedelta

from anabranch.serving.errors import shorten
from anabranch.serving.settings import RequestLogLevel

log = logging.getLogger("anabranch.requests")

HEADER = b"x-request-id"
"""The header with a client's or proxy's id of a request; without it the server assigns an id."""


_USABLE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_MOST_LINES = 100
_EVERY = timedelta(seconds=1)


class RequestLog:
    """Writes at most a hundred lines a second, so an overload does not fill the disk. Used by the loop's thread."""

    def __init__(self, level: RequestLogLevel) -> None:
        self._lowest = {"none": 1000, "errors": 500, "all": 0}[level]
        self._since = 0.0
        self._written = 0
        self._left_out = 0

    def answered(self, name: bytes, method: str, path: str, status: int, seconds: float) -> None:
        """Log an answer if the level includes its status; `name` is the request's id."""
        if status < self._lowest:
            return
        now = time.monotonic()
        if now - self._since >= _EVERY.total_seconds():
            self._since, self._written = now, 0
        if self._written >= _MOST_LINES:
            self._left_out += 1
            return
        self._written += 1
        line = {
            "request": name.decode(),
            "method": shorten(method),
            "path": shorten(path),
            "status": status,
            "seconds": round(seconds, 6),
            **({"left_out": self._left_out} if self._left_out else {}),
        }
        self._left_out = 0
        log.info("%s", json.dumps(line))


def name_of(given: bytes | None) -> bytes:
    """Return the id that a request came with, if it fits into a line and a header; else a new one."""
    if given is not None and _USABLE.fullmatch(given):
        return given
    return os.urandom(8).hex().encode()
