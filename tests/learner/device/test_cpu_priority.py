"""All threads get a lower priority: running ones, later ones, and those of children."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.learner.device.cpu_priority import nice_level

PROGRAM = """
import os, subprocess, sys, threading
from pathlib import Path
from anabranch.learner.device.cpu_priority import step_back

def nice():
    return str(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

stay, levels = threading.Event(), []
def run():
    stay.wait()
    levels.append(nice())

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
thread = threading.Thread(target=run)
thread.start()
print(step_back(19))
later = threading.Thread(target=run)
later.start()
stay.set()
thread.join(), later.join()
print(*levels, nice(), os.getpriority(os.PRIO_PROCESS, child.pid))
group = Path("/proc/self/autogroup")
print(group.read_text().strip().rpartition(" ")[2] if group.exists() else "")
child.communicate()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a level is a process' own")
@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.process
def test_all_threads_and_children_step_back_to_a_moderate_level_and_the_session_if_it_is_their_own(leads):
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, start_new_session=leads)
    assert done.returncode == 0, done.stderr
    said, levels, session = done.stdout.splitlines()
    assert levels.split() == ["5"] * 4
    grouped = leads and session != ""
    assert said == ("nice 5, its session too" if grouped else "nice 5")
    assert (session == "5") == grouped


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a level is a process' own")
@pytest.mark.process
def test_what_is_lower_already_stays_so():
    code = (
        "import os; os.nice(15); from anabranch.learner.device.cpu_priority import step_back; "
        "step_back(3); print(os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "15\n"), done.stderr


@given(fraction=st.floats(0.001, 0.999))
def test_a_level_gives_training_at_least_its_fraction(fraction):
    level = nice_level(fraction)
    weight = 1.25**-level
    if level < 19:
        assert weight / (1 + weight) >= min(fraction, 0.5) - 1e-9
    assert nice_level(0.0) == 19


SLICES = """
import ctypes, os, platform, threading
from anabranch.learner.device import cpu_priority

def attributes():
    read = ctypes.create_string_buffer(cpu_priority._ATTRIBUTES.size)
    ctypes.CDLL(None).syscall({"x86_64": 315, "aarch64": 275}[platform.machine()], 0, read, len(read), 0)
    return cpu_priority._ATTRIBUTES.unpack(read.raw)

os.nice(3)
before, took = attributes(), cpu_priority.shorten_slice()
later = []
thread = threading.Thread(target=lambda: later.append(attributes()))
thread.start(), thread.join()
print(took, before[3], before[5], later[0][3], later[0][5])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has slices")
@pytest.mark.process
def test_a_shortened_slice_is_that_of_later_threads_too_and_leaves_the_level():
    done = subprocess.run([sys.executable, "-c", SLICES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    took, *numbers = done.stdout.split()
    nice, slice_before, nice_later, slice_later = map(int, numbers)
    assert (took, nice, nice_later) == ("True", 3, 3)
    assert slice_later == (100_000 if slice_before else 0)  # kernels before 6.12 have none
