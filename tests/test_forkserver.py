"""The forked processes of the tests."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS


@pytest.mark.process
@pytest.mark.skipif(not forkserver._forks(), reason="test processes are not forked here")
def test_a_forked_process_leaves_what_it_inherits_out_of_its_garbage_collections():
    code = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    with forkserver.start(["-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.communicate(timeout=PATIENCE_SECONDS)[0] == "True True\n"


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
def test_a_process_ends_with_its_code_after_its_threads_and_what_it_has_registered(end, code, error):
    done = forkserver.run(["-c", WORK + end], env=dict(os.environ))
    assert (done.returncode, done.stdout) == (code, "work\nend\n")
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)


@pytest.mark.process
def test_a_script_passes_signals_and_the_exit_code_on(tmp_path):
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print(sys.argv, flush=True)"
    program = tmp_path / "program"
    program.write_text(forkserver.script("-c", f"{code}; signal.pause()"))
    program.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen([program, "one", "two"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "['-c', 'one', 'two']\n"
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 3
