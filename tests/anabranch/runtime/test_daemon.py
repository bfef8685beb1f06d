"""What a daemon sets before its work begins."""

import subprocess
import sys

import pytest

from anabranch.runtime.daemon import set_allocator


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_is_configured_stays_as_it_is(name):
    environment = {name: "max_split_size_mb:128"}
    set_allocator(environment)
    assert environment == {name: "max_split_size_mb:128"}


@pytest.mark.process
def test_the_allocator_is_configured_before_torch_is_imported():
    code = (
        "import os, sys; from anabranch.runtime import daemon; usual = daemon.set_allocator;"
        "daemon.set_allocator = lambda it: (usual(it), print(it.get('PYTORCH_ALLOC_CONF'), 'torch' in sys.modules));"
        "daemon.enter('test', '', None, ['-c', 'none.toml'])"
    )
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "expandable_segments:True False\n", done.stderr
