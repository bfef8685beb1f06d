"""The memory of large requests is returned to the system."""

import platform
import subprocess
import sys

import pytest

CODE = """
import psutil
from anabranch.serving.freed_memory import return_freed_memory
{call}
process = psutil.Process()
bytearray(31_000_000)  # from here on glibc would take such blocks from its heap
before = process.memory_info().rss
bodies, replies = [], []
for _ in range(4):
    bodies.append(bytearray(15_900_000))
    replies.append(bytearray(100_000))
bodies.clear()
print(process.memory_info().rss - before)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_the_memory_of_large_bodies_is_returned_to_the_system_while_small_replies_stay():
    kept = {
        call: int(subprocess.check_output([sys.executable, "-c", CODE.format(call=call)], timeout=60))
        for call in ("", "return_freed_memory()")
    }
    assert kept["return_freed_memory()"] < 5_000_000 < 15_000_000 < kept[""]
