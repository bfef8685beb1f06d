"""The forked processes of the tests."""

import os
import subprocess

import pytest

from tests import forkserver


@pytest.mark.process
@pytest.mark.skipif(not forkserver._forks(), reason="test processes are not forked here")
def test_a_forked_process_leaves_what_it_inherits_out_of_its_garbage_collections() -> None:
    code = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    with forkserver.start(["-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.communicate(timeout=60)[0] == "True True\n"


WORK = """
import atexit, sys, threading
atexit.register(print, "end")
threading.Thread(target=print, args=["work"]).start()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('so')", 1, "so\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_process_ends_with_its_code_after_its_threads_and_what_it_has_registered(
    end: str, code: int, error: str
) -> None:
    done = forkserver.run(["-c", WORK + end], env=dict(os.environ))
    assert (done.returncode, done.stdout) == (code, "work\nend\n")
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)
