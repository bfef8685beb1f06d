"""A standby has its imports done, holds no lock or device, and has not read the settings yet."""

import contextlib
import signal
import subprocess
import sys

import pytest

from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS

PREPARED = """
import sys
from anabranch.learner.__main__ import prepare
prepare()
before = set(sys.modules)
import torch
from anabranch.learner.settings.learner import OptimizerSettings
from anabranch.learner.train.optimizers import OPTIMIZERS, build_optimizer
from anabranch.learner.assembly import learn
for name in OPTIMIZERS:
    build_optimizer(OptimizerSettings(name=name), [torch.nn.Parameter(torch.zeros(2))])
print(sorted(set(sys.modules) - before), torch.cuda.is_initialized())
"""


@pytest.fixture
def standby(tmp_path):
    """Starts a standby of a missing `pipeline.toml`, and returns it once it is ready."""
    with contextlib.ExitStack() as stack:

        def begin():
            command = ["-P", "-m", "anabranch.learner", "-c", str(tmp_path / "pipeline.toml")]
            process = stack.enter_context(
                forkserver.start(
                    [*command, "--supervised", "--standby"],
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stderr is not None
            assert "learner is ready as standby" in process.stderr.readline()
            return process

        yield begin


@pytest.mark.parametrize("signalled", [True, False])
def test_it_ends_well_on_a_signal_and_with_its_supervisor(standby, tmp_path, signalled):
    process = standby()
    assert process.stdin is not None
    if signalled:
        process.send_signal(signal.SIGTERM)
    else:
        process.stdin.close()
    assert process.wait(PATIENCE_SECONDS) == 0
    assert list(tmp_path.iterdir()) == []


def test_it_goes_on_with_the_settings_of_that_moment(standby, tmp_path):
    process = standby()
    (tmp_path / "pipeline.toml").write_text("nam = 'of that moment'")
    _, said = process.communicate("\n", 30)
    assert process.returncode == 2
    assert "nam" in said


@pytest.mark.process
def test_what_is_prepared_leaves_no_import_to_the_first_optimizer():
    found = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True, check=True)
    assert found.stdout == "[] False\n"
