"""State that is complete after the learner, or a command that changes its state, was killed in the middle of it."""

import contextlib
import itertools
import subprocess
import sys
import threading

import pytest

from anabranch import cli
from anabranch.commands.checkpoints.ls import list_checkpoints
from anabranch.commands.checkpoints.show import show_checkpoint
from anabranch.commands.versions.show import show_version
from anabranch.config.loader import load_config
from anabranch.learner.versions.format import Versions
from tests.pipelines import Learner, adds_up, events, total

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(180)]

REST = """
batch_size = 8
[replay]
capacity = 200
disk.bytes = "1MB"
[checkpoints]
every = "100ms"
keep = 4
[versions]
publish_every = "50ms"
keep = 20
"""
KILLED_AT_A_RENAME = """
import os, signal, sys
renames = iter(range(int(sys.argv.pop(1)), -1, -1))
def kill(event, arguments):
    if event == "os.rename" and "set-aside" in str(arguments[1]) and not next(renames):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
from anabranch.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs a command, and kills it just before it sets a checkpoint aside: its first argument is how many it may."""


def test_state_is_complete_when_the_learner_or_a_restore_is_killed(kafka, make_topic, produce, write_pipeline):
    topic, sent = make_topic(1), 0
    path = write_pipeline(kafka.bootstrap, topic, REST)
    config = load_config(path)
    versions = Versions(config.state_dir / "versions")

    def command(*arguments):
        return cli.main([*map(str, arguments), "-c", str(path)])

    def send():
        nonlocal sent
        produce(kafka.bootstrap, topic, events(40))
        sent += 40

    def change_versions(stop):
        for action in itertools.cycle(("reject", "serve")):
            with contextlib.suppress(IndexError):  # none is published yet
                command("versions", action, versions.numbers()[-1], "--yes")
            if stop.is_set():
                return

    learner = Learner(path)
    with contextlib.closing(learner), contextlib.ExitStack() as at_end:
        stop = threading.Event()
        changing = threading.Thread(target=change_versions, args=(stop,))
        while len(list_checkpoints(config)) < 4 or not versions.numbers():
            send()
            learner.wait_for(lambda report: total(report) == sent)
        changing.start()
        at_end.callback(changing.join)
        at_end.callback(stop.set)
        send()
        assert command("checkpoints", "restore", list_checkpoints(config)[-1].number, "--yes") == 2
        learner.kill()
    state = versions.state()
    assert set(state.rolled_back) <= set(versions.numbers())
    assert {show_version(config, number).manifest is not None for number in versions.numbers()} == {True}

    before = [one.number for one in list_checkpoints(config)]
    oldest = before[-1]
    restore = ["checkpoints", "restore", str(oldest), "--yes", "-c", str(path)]
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_A_RENAME, "1", *restore], check=False)
    assert killed.returncode == -9
    assert [one.number for one in list_checkpoints(config)] == before[1:], "the newest was set aside, and no other"
    assert command(*restore[:4]) == 0
    assert [one.number for one in list_checkpoints(config)] == [oldest]
    assert show_checkpoint(config, "latest").problem is None

    learner = Learner(path)
    with contextlib.closing(learner):
        send()
        report = learner.wait_for(lambda report: total(report) == sent and adds_up(report))
        assert report.outcomes["trained"] + report.outcomes.get("held_out", 0) == sent
        assert learner.stop() == 0
    assert show_checkpoint(config, "latest").problem is None
    assert list_checkpoints(config)[0].number > before[0]
