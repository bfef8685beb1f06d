"""A learner of several ranks as a process: what it learns, how it comes back, and how it ends."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial

import psutil
import pytest
import torch
from torch.numa.binding import AffinityMode

from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.parallel.launcher import OUTCOME, _read_rows, launch, numa_options, read_outcome, write_outcome
from anabranch.learner.parallel.process_group import record_collectives
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.learner.versions.format import Versions
from tests import forkserver
from tests.pipelines import NARROW, adds_up, events, total
from tests.support.waiting import PATIENCE_SECONDS, slowness

pytestmark = pytest.mark.any_broker

OF_A_RANK = """
batch_size = 8
device = "cpu"
stop_timeout = "20s"
optimizer = {name = "sgd", lr = 0.5}
[versions]
publish_every = "100ms"
[checkpoints]
every = "200ms"
[gate]
holdout_fraction = 0.1
"""
CONFIG = f"replicas = 2{OF_A_RANK}"
TENSOR = {"ANABRANCH__LEARNER__MESH": "{tensor = 2}", "ANABRANCH__MODEL__PARALLEL": '{"0" = "column", "2" = "row"}'}
LAYERS = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
"""


@pytest.fixture
def pipeline(write_pipeline):
    """Writes a pipeline and returns the path of its config."""
    return partial(write_pipeline, rest=CONFIG)


def ranks(learner):
    """Return the processes that are its ranks, in order."""
    found = [child for child in forkserver.children(learner.process) if "--group" in child.arguments]
    return [child.process for child in sorted(found, key=lambda child: int(child.environment["RANK"]))]


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "mesh"), [(0, {}), (1, {}), (1, TENSOR)], ids=["0", "1", "1 of a tensor group"])
def test_when_a_rank_is_killed_all_come_back_from_the_checkpoint_and_nothing_is_learned_twice(
    kafka, make_topic, produce, pipeline, start, killed, mesh
):
    topic = make_topic(partitions=2)
    learner = start(pipeline(kafka.bootstrap, topic, model=LAYERS), **mesh)
    produce(kafka.bootstrap, topic, [*events(300), b"bad"], partition=0)
    produce(kafka.bootstrap, topic, events(30), partition=1)
    report = learner.wait_for(lambda each: total(each) >= 100 and (each.checkpoint or 0) > 1)
    assert adds_up(report)
    processes = ranks(learner)
    assert [report.pid, len(processes)] == [processes[0].pid, 2]
    processes[killed].kill()
    produce(kafka.bootstrap, topic, events(300), partition=1)
    report = learner.wait_for(lambda each: total(each) == 631, no_more=report.pid)
    assert learner.log.read_text().count("going on from checkpoint") == 1
    assert adds_up(report)
    assert report.outcomes["dead_lettered"] == 1
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 630
    assert report.replay_rows == {"device": report.outcomes["trained"]}, "an event is in the store twice, or not at all"
    assert report.accuracy["now"] > 0.8
    processes = ranks(learner)
    assert learner.stop(20) == 0
    assert psutil.wait_procs(processes, PATIENCE_SECONDS)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "sharding"), [((2, 1), "none"), ((1, 2), "none"), ((1, 2), "fsdp")])
def test_a_checkpoint_is_gone_on_from_with_another_number_of_ranks(
    kafka, make_topic, produce, pipeline, start, numbers, sharding
):
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)
    for turn, replicas in enumerate(numbers, 1):
        learner = start(
            config,
            ANABRANCH__LEARNER__REPLICAS=str(replicas),
            ANABRANCH__LEARNER__SHARDING=sharding,
            ANABRANCH__LEARNER__OPTIMIZER='{name = "adamw", lr = 0.05}',
        )
        produce(kafka.bootstrap, topic, events(200))
        report = learner.wait_for(lambda each, n=200 * turn: total(each) == n)
        assert learner.stop(40) == 0
        checkpoints = Checkpoints(learner.state_dir / "checkpoints", "", 0)
        has_others = "rank-1" in checkpoints.part(checkpoints.numbers()[-1], "rng")
        assert has_others == (replicas == 2), "a checkpoint has the generators of all ranks that there are"
    assert learner.log.read_text().count("going on from checkpoint") == 1
    assert report.steps > report.steps_since_start > 0
    assert report.replay_rows == {"device": report.outcomes["trained"]}
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 400
    versions = Versions(learner.state_dir / "versions")
    newest = versions.manifest(versions.numbers()[-1])
    assert newest.trained_through[f"{topic}:0"].offset == 399
    assert {name: list(value.shape) for name, value in versions.weights(newest).items()} == {
        "weight": [3, 3],
        "bias": [3],
    }


@pytest.mark.slow
def test_when_the_launcher_is_killed_no_rank_outlives_it(kafka, make_topic, pipeline, start):
    learner = start(pipeline(kafka.bootstrap, make_topic()))
    learner.wait_for(lambda _: True)
    processes = ranks(learner)
    learner.kill()
    assert psutil.wait_procs(processes, PATIENCE_SECONDS)[1] == []
    with lock_state_directory(learner.state_dir):
        pass


@pytest.mark.slow
def test_what_starting_again_cannot_fix_ends_with_its_own_exit_code(kafka, make_topic, pipeline, start):
    learner = start(pipeline(kafka.bootstrap, make_topic(), model="def build():\n    return 3\n"))
    assert learner.process.wait(PATIENCE_SECONDS * slowness()) == 2
    said = learner.log.read_text()
    assert said.count("returned int, not a torch.nn.Module") == 1, said


@pytest.mark.slow
def test_ranks_that_run_out_of_memory_go_on_with_smaller_micro_batches(kafka, make_topic, produce, pipeline, start):
    topic = make_topic()
    produce(kafka.bootstrap, topic, events(300))
    learner = start(pipeline(kafka.bootstrap, topic, model=NARROW))
    report = learner.wait_for(lambda each: total(each) == 300)
    assert adds_up(report)
    assert report.accuracy["now"] > 0.8
    assert sum("learner.micro_batch_size = 4" in warning for warning in report.warnings) == 1, report.warnings
    said = learner.log.read_text()
    assert "learner.micro_batch_size = 4 does so" in said
    assert "ended with" not in said, "no rank died for it"
    assert learner.stop(40) == 0


RANK = """
import pathlib, select, sys
select.select([0], [], [], 1)
bad, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
rounds = int(bad.read_text()) - 1
bad.write_text(str(rounds))
if rounds >= 0:
    sys.exit(1)
(folder / "outcome").write_text("0")
"""
"""Dies in as many rounds as a file says, and then ends well."""


@pytest.mark.process
@pytest.mark.parametrize(("deaths", "code"), [(3, 0), (4, None)])
def test_ranks_that_die_four_times_in_a_row_end_the_learner(tmp_path, deaths, code):
    program, bad = tmp_path / "rank.py", tmp_path / "bad"
    program.write_text(RANK)
    bad.write_text(str(deaths))
    command = (sys.executable, str(program), str(bad))
    assert launch(LearnerSettings(device="cpu"), command, threading.Event()) == code
    assert bad.read_text() == ("-1" if code == 0 else "0")


BLOCKED = """
import ctypes, os, pathlib, signal, sys, threading, time
folder, group = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
if (folder / "died").exists():
    (group / "outcome").write_text("0")
    sys.exit(0)
if os.environ["RANK"] == "0":
    while not (folder / "blocked").exists():
        time.sleep(0.02)
    (folder / "died").touch()
    os._exit(1)
from anabranch.learner.parallel.launcher import stop_with_launcher
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for all threads that start from now on too
stop_with_launcher(threading.Event())
(folder / "blocked").touch()
ctypes.CDLL(None).pause()
"""
"""Rank 1 waits in C, where no signal reaches it, as ranks wait for a kernel of NCCL; then rank 0 dies, once."""


@pytest.mark.process
def test_a_rank_that_waits_in_c_for_one_that_has_died_is_ended(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(BLOCKED)
    command, settings = (sys.executable, str(program), str(tmp_path)), LearnerSettings(device="cpu", replicas=2)
    assert launch(settings, command, threading.Event()) == 0


@pytest.mark.process
def test_a_rank_ends_without_the_destructors_of_its_group():
    """Four ranks are forked from one that has imported torch."""
    code = """
import atexit, os, sys
from anabranch.learner.parallel.process_group import exiting_at_once
for statement in sys.argv[1:]:
    if not (pid := os.fork()):
        atexit.register(print, "destroyed")
        with exiting_at_once():
            exec(statement)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    statements = ["pass", "sys.exit(3)", "sys.exit()", "raise ValueError('a bug')"]
    done = subprocess.run([sys.executable, "-c", code, *statements], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["0", "3", "0", "1"]
    assert "ValueError: a bug" in done.stderr


def test_ranks_are_bound_to_the_processors_near_their_gpus_where_there_are_gpus(monkeypatch, tmp_path):
    assert torch.cuda.is_available() or numa_options() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", {"numactl": "/usr/bin/numactl"}.get)
    options = numa_options()
    assert options is not None
    assert options.affinity_mode is AffinityMode.NODE
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert numa_options() is None


def test_nccls_last_collectives_are_recorded_in_the_state_directory_where_there_are_gpus(monkeypatch, tmp_path):
    environment: dict[str, str] = {"TORCH_FR_BUFFER_SIZE": "7"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record_collectives(tmp_path)
    assert (environment, list(tmp_path.iterdir())) == ({"TORCH_FR_BUFFER_SIZE": "7"}, [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    record_collectives(tmp_path)
    assert (tmp_path / "traces").is_dir()
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "traces" / "nccl-"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def test_a_file_that_a_rank_is_about_to_write_says_nothing_yet(tmp_path):
    (tmp_path / OUTCOME).touch()
    assert read_outcome(tmp_path) is None
    write_outcome(tmp_path, 3)
    assert read_outcome(tmp_path) == 3
    (tmp_path / "rows-0").touch()
    assert _read_rows(tmp_path) is None
    (tmp_path / "rows-1").write_text("7")
    assert _read_rows(tmp_path) == 7


@pytest.mark.process
def test_nothing_of_the_ranks_stays_in_the_temporary_directory(tmp_path, monkeypatch):
    program, bad, temporary = tmp_path / "rank.py", tmp_path / "bad", tmp_path / "temporary"
    program.write_text(RANK)
    bad.write_text("1")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    command = (sys.executable, str(program), str(bad))
    assert launch(LearnerSettings(device="cpu"), command, threading.Event()) == 0
    assert bad.read_text() == "-1", "ranks were started twice"
    assert list(temporary.iterdir()) == []
