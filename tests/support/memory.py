"""The memory of Python's own objects."""

import contextlib
import tracemalloc


@contextlib.contextmanager
def python_memory():
    """Yield what returns the most bytes of objects that the block had at once, besides those of before."""
    tracemalloc.start()
    try:
        before, most = tracemalloc.get_traced_memory()[0], [0]
        yield lambda: most[0]
        most[0] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
