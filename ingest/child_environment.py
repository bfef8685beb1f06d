"""The environment of ingest processes."""

import os

_SETTINGS = "ANABRANCH__"
_ONE_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""Makes memory that one thread freed available to the others, and keeps it for the next rows.

Otherwise glibc keeps a heap for each thread and returns large arrays to the system, which clears new pages for the next
ones, and Arrow uses another allocator. With it, the memory of a process that reads files does not grow with
their rows. Not where only topics are read, since librdkafka's threads would wait for each other.
"""


def without_settings(*, reads_files: bool = False) -> dict[str, str]:
    """Return the environment without variables of settings: ingest receives its own, and must not see tokens.

    The threads of a process that reads files share one heap, unless the environment has other values.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return _ONE_HEAP | kept if reads_files else kept
