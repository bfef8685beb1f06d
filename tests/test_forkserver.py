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
