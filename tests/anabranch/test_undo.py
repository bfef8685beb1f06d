"""The drill of the page on undo, on a pipeline that has learned poisoned events and is killed meanwhile."""

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from anabranch.config.loader import load_config
from anabranch.learner.state_dir.undo_file import read_undo
from anabranch.learner.status.report import read_report as read_learner
from anabranch.learner.versions.format import Versions
from anabranch.serving.reporting.report import read_report as read_serving
from tests.pipelines import adds_up, events
from tests.support.waiting import PATIENCE_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "undo.md"
CONFIG = """
batch_size = 16
deterministic = true
[versions]
publish_every = "500ms"
[checkpoints]
every = "500ms"
keep = 100
[device_sharing]
policy = "exclusive"
[serving]
port = {port}
"""
CLEAN, POISONED = 900, 300


def drill():
    """Return the commands of the page's drill."""
    section = PAGE.read_text().partition("## Drill")[2].partition("\n## ")[0]
    return [
        line.removeprefix("anabranch ")
        for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        for line in block.splitlines()
        if line.startswith("anabranch ")
    ]


@pytest.mark.slow
@pytest.mark.any_broker
@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_drill_serves_a_clean_version_and_learns_again_though_the_learner_is_killed(
    spawn, kafka, make_topic, produce, free_port, write_pipeline, tmp_path, until
):
    topic = make_topic(1)
    path = write_pipeline(kafka.bootstrap, topic, CONFIG.format(port=free_port()))
    state_dir = load_config(path, {}).state_dir
    versions = Versions(state_dir / "versions")

    def run(line):
        process = spawn("-m", "anabranch", *shlex.split(line), cwd=tmp_path)
        said, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, errors
        return said

    def served():
        report = read_serving(state_dir)
        return report.version if report is not None else None

    def through(number):
        return versions.manifest(number).trained_through[f"{topic}:0"].offset if number else -1

    up = spawn("-m", "anabranch", "up", environment={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    produce(kafka.bootstrap, topic, events(CLEAN))
    # Fewer events than a batch are left at the end.
    until(lambda: through(served()) >= CLEAN - 17, "a version that has learned the clean events")
    until(lambda: (read_learner(state_dir).checkpoint or 0) > 1, "a checkpoint of them")
    poisoned = [{**event, "y": (event["y"] + 1) % 3} for event in events(POISONED)]
    produce(kafka.bootstrap, topic, poisoned, headers=[("build", b"1.4.2")])
    until(lambda: through(served()) >= CLEAN + POISONED - 17, "a version that has learned the poisoned events")

    commands = drill()
    assert [line.split()[0] for line in commands] == ["undo", "undo", "status"]
    planned = run(commands[0])
    assert f"{POISONED} offsets are undone: {topic}#0[0]@{CLEAN}..{CLEAN + POISONED - 1}" in planned
    assert not read_undo(state_dir), "a dry run changes nothing"
    tainted = {int(number) for number in re.findall(r"^version (\d+).* has seen some", planned, re.MULTILINE)}
    assert tainted == {number for number in versions.numbers() if through(number) >= CLEAN}

    done = run(commands[1])
    assert "the learner has returned to checkpoint" in done
    assert "version" in done
    assert served() not in tainted
    for _ in range(2):
        pid = until(lambda: (r := read_learner(state_dir)) and r.undo and r.pid, "a learner that learns again")
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: read_learner(state_dir).pid != pid, "the next learner")
    produce(kafka.bootstrap, topic, events(60))
    report = until(
        lambda: (r := read_learner(state_dir)) and r.undo and not r.undo.left and r.skipped.get("undone") and r,
        "the end of the undo",
    )
    assert report.skipped == {"undone": POISONED}
    assert adds_up(report)
    until(lambda: through(served()) >= CLEAN + POISONED, "a version that has learned what came after them")
    assert all(
        (versions.verdict(number) is None or versions.verdict(number).verdict == "fail") == (number in tainted)
        for number in versions.numbers()
    )
    assert "undo" in run(commands[2])
    assert json.loads(run("status --json"))["learner"]["report"]["undo"]["fraction"] == 1.0
    up.send_signal(signal.SIGTERM)
    assert up.wait(PATIENCE_SECONDS) == 0
