"""An ingest process that dies, or does not return, when it decodes certain messages, as a library in C can make it."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

from ingest.__main__ import main
from ingest.formats.base import Decoded
from ingest.formats.json import JsonFormat
from ingest.worker import decoding_guard

CRASH, ENDLESS = b'{"x": "crash"}', b'{"x": "endless"}'
_sound = JsonFormat.decode


def _decode(self: JsonFormat, values: Sequence[bytes], headers: Any = ()) -> Decoded:
    if CRASH in values:
        os.kill(os.getpid(), signal.SIGKILL)
    if ENDLESS in values:
        re.match(r"(a|a)*$", "a" * 60 + "!")  # in C, and with the GIL
    return _sound(self, values, headers)


if __name__ == "__main__":
    JsonFormat.decode = _decode  # type: ignore[method-assign]
    decoding_guard._TOGETHER_SECONDS = decoding_guard._ALONE_SECONDS = 0.3
    sys.exit(main())
