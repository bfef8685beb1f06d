"""Commands to a child process over a pipe, until it is to end."""

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def received(connection: Connection) -> Iterator[Any]:
    """Yield the commands of the parent, until `end`, or the parent's death."""
    with contextlib.suppress(EOFError):
        while (command := connection.recv()) is not None:
            yield command


def end(connection: Connection, process: BaseProcess) -> None:
    """Let a process that reads `received` end, and wait for it.

    To close the parent's end would not do: a process that was forked has a copy of it.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have failed
        connection.send(None)
    process.join()
    connection.close()
