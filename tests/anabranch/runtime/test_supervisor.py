"""Parts are kept alive, and none of them is left when the supervisor ends, however that happens."""

import json
import os
import signal
import sys
import textwrap
import threading
from concurrent.futures import Future
from datetime import timedelta

import psutil
import pytest

from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.learner.device import visible_devices
from anabranch.runtime.child_process import Part, close_pipe, spawn
from anabranch.runtime.lifecycle import Exit
from anabranch.runtime.supervisor import RestartPolicy, Supervisor, pipeline_parts
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.process

STAYS = "record('started')\nawait_end_of_stdin()\nrecord('end of stdin')"
LEARNS = "report(steps_since_start=1)\n" + STAYS
STANDBY = "record('standby')\nif sys.stdin.readline():\n    " + LEARNS.replace("\n", "\n    ")
PRELUDE = """
import json, os, select, signal, subprocess, sys, time
folder = {folder!r}

def record(what):
    with open(os.path.join(folder, what), "a") as file:
        file.write(f"{{os.getpid()}}\\n")

def records(what):
    return open(os.path.join(folder, what)).read().split()

def report(**figures):
    with open(os.path.join(folder, "report.json"), "w") as file:
        json.dump(dict(dict(pid=os.getpid()), **figures), file)

def on_sigterm(*_):
    record("sigterm")
    sys.exit(0)

# Python runs a handler between two instructions: a signal that comes just before a read begins would wait for its end.
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
signal.signal(signal.SIGTERM, on_sigterm)

def await_end_of_stdin():
    while reading in (ready := select.select([0, reading], [], [])[0]) or os.read(0, 1):
        if reading in ready:
            os.read(reading, 1)
"""
SUPERVISE = """
import json, sys
from datetime import timedelta
from pathlib import Path
from anabranch.runtime.lifecycle import stop_on_signals
from anabranch.runtime.child_process import Part
from anabranch.runtime.supervisor import Supervisor
parts = [
    Part(name, tuple(command), Path(report), stop_timeout=timedelta(seconds=s), standby=standby and tuple(standby))
    for name, command, report, s, standby in json.loads(sys.argv[1])
]
with stop_on_signals() as stop:
    sys.exit(Supervisor(parts).run(stop))
"""


class RecordedBackoff(RestartPolicy):
    """Waits for nothing, and keeps what it was asked."""

    def __init__(self, lasting=timedelta(0)):
        super().__init__(lasting=lasting)
        object.__setattr__(self, "asked", [])

    def seconds(self, deaths):
        self.asked.append(deaths)
        return 0.0


@pytest.fixture
def folder(tmp_path):
    """A folder in which children record events: a file by event, with the pid of each child that recorded it."""
    folder = tmp_path / "records"
    folder.mkdir()
    return folder


@pytest.fixture
def part(folder):
    """Makes a part of Python code that may call `record`, `records` and `report`."""

    def program(code):
        return (sys.executable, "-c", PRELUDE.format(folder=str(folder)) + textwrap.dedent(code))

    def make(code, name="part", standby=None, **options):
        standby = program(standby) if standby else None
        return Part(name, program(code), folder / "report.json", standby=standby, **options)

    return make


@pytest.fixture
def recorded(folder):
    """Returns the pids that have recorded an event."""

    def read(what):
        path = folder / what
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    return read


@pytest.fixture
def children(folder):
    """Returns the pids of parts and standbys that run."""

    def pids():
        processes = psutil.Process().children()
        return [each.pid for each in processes if any(str(folder) in word for word in each.cmdline())]

    return pids


@pytest.fixture
def running():
    """Runs a supervisor in a thread; returns the event that stops it and the future of its exit code."""
    threads = []

    def start(supervisor):
        stop, result = threading.Event(), Future()
        thread = threading.Thread(target=lambda: result.set_result(supervisor.run(stop)))
        thread.start()
        threads.append((stop, thread))
        return stop, result

    yield start
    for stop, thread in threads:
        stop.set()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_a_part_that_dies_after_progress_is_started_again_at_once_each_time(part, running, until, recorded):
    code = """
        record("started")
        report(steps_since_start=1)
        if len(records("started")) < 4:
            os._exit(1)
        await_end_of_stdin()
    """
    supervisor = Supervisor([part(code)], RestartPolicy(first=timedelta(hours=1)))
    running(supervisor)
    until(lambda: supervisor.restarts == {"part": 3}, "three starts more")
    until(lambda: len(recorded("started")) == 4, "four starts")


@pytest.mark.parametrize(
    "figures", ["version=0", "steps_since_start=7, version=None", "steps_since_start=7, pid=1, launcher=os.getpid()"]
)
def test_a_version_or_a_step_is_progress(part, running, until, recorded, figures):
    backoff = RecordedBackoff()
    running(Supervisor([part(f"record('started'); report({figures}); os._exit(1)")], backoff))
    until(lambda: len(recorded("started")) >= 4, "four starts")
    assert set(backoff.asked) == {1}


def test_a_version_of_an_earlier_life_is_no_progress_of_a_learner(part, running, until, recorded):
    backoff = RecordedBackoff()
    running(Supervisor([part("record('started'); report(steps_since_start=0, version=3); os._exit(1)")], backoff))
    until(lambda: len(recorded("started")) >= 3, "three starts")
    assert backoff.asked[:2] == [1, 2]


def test_deaths_without_progress_are_counted_until_there_is_progress(part, running, until, recorded):
    code = """
        record("started")
        starts = len(records("started"))
        if starts == 3:
            report(steps_since_start=1)
        if starts < 6:
            os._exit(1)
        await_end_of_stdin()
    """
    backoff = RecordedBackoff()
    running(Supervisor([part(code)], backoff))
    until(lambda: len(recorded("started")) == 6, "six starts")
    assert backoff.asked == [1, 2, 1, 2, 3]


@pytest.mark.parametrize(
    ("figures", "life", "asked"),
    [
        ("steps_since_start=1", 10, [1, 1, 1, 2, 3, 4]),
        ("steps_since_start=1, checkpoint=7", 10, [1, 1, 1, 1, 2, 3]),
        ("steps_since_start=1, checkpoint=starts", 10, [1] * 6),
        ("steps_since_start=1", 60, [1] * 6),
        ("version=1", 10, [1, 1, 1, 2, 3, 4]),
    ],
    ids=["no checkpoint", "an old checkpoint", "new checkpoints", "long lives", "serving"],
)
def test_deaths_again_and_again_soon_after_progress_are_backed_off(part, until, recorded, figures, life, asked):
    code = f"record('started'); starts = len(records('started')); report({figures}); os._exit(1)"
    backoff, now = RecordedBackoff(lasting=timedelta(seconds=60)), [0.0]
    supervisor = Supervisor([part(code)], backoff, lambda _: now.__setitem__(0, now[0] + life), clock=lambda: now[0])
    supervisor.start()
    try:
        until(lambda: (supervisor.check(), len(backoff.asked) >= len(asked))[1], "some deaths")
        assert backoff.asked[: len(asked)] == asked
    finally:
        supervisor.stop()


def test_another_process_s_report_is_no_progress(part, running, until, recorded, folder):
    (folder / "report.json").write_text(json.dumps({"pid": 1, "steps": 5, "version": 3}))
    backoff = RecordedBackoff()
    running(Supervisor([part("record('started'); os._exit(1)")], backoff))
    until(lambda: len(recorded("started")) >= 3, "three starts")
    assert backoff.asked[:2] == [1, 2]


def test_a_part_is_not_started_before_its_backoff_is_over(part, until, recorded):
    supervisor = Supervisor([part("record('started'); os._exit(1)")], RestartPolicy(first=timedelta(hours=1)))
    supervisor.start()
    try:
        until(lambda: (supervisor.check(), len(recorded("started")) == 2 and not supervisor.pids())[1], "two deaths")
        for _ in range(20):
            supervisor.check()
        assert (recorded("started")[2:], supervisor.pids()) == ([], {})
    finally:
        supervisor.stop()


def test_a_dead_part_is_logged_and_started_again_in_one_check(part, until, recorded, is_gone):
    ran = []
    supervisor = Supervisor([part(STAYS)], on_death=lambda dead: ran.append((dead.name, supervisor.pids())))
    supervisor.start()
    try:
        (pid,) = until(lambda: recorded("started"), "the start")
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_gone(pid), "its end")
        supervisor.check()
        assert ran == [("part", {})]
        assert supervisor.pids().keys() == {"part"}
    finally:
        supervisor.stop()


def test_the_backoff_starts_with_nothing_doubles_and_stops_at_its_longest():
    backoff = RestartPolicy(timedelta(seconds=1), timedelta(seconds=30))
    assert backoff.seconds(1) == 0
    for deaths, longest in ((2, 1), (3, 2), (4, 4), (6, 16), (7, 30), (1000, 30)):
        delays = {backoff.seconds(deaths) for _ in range(100)}
        assert len(delays) > 1
        assert longest / 2 <= min(delays)
        assert max(delays) <= longest


def test_exit_code_2_ends_everything_with_2_and_stops_the_others(part, running, until, recorded):
    other = part(STAYS, "other")
    supervisor = Supervisor([other, part("while not os.path.exists(folder + '/started'): pass\nsys.exit(2)", "bad")])
    _, result = running(supervisor)
    assert result.result(PATIENCE_SECONDS) is Exit.SETTINGS
    assert supervisor.ended is not None
    assert supervisor.ended.name == "bad"
    assert recorded("sigterm") == recorded("started")


def test_exit_code_3_on_the_first_start_ends_everything_with_3(part, running):
    _, result = running(Supervisor([part("sys.exit(3)")]))
    assert result.result(PATIENCE_SECONDS) is Exit.DEPENDENCY


@pytest.mark.parametrize("first_life", ["report(steps_since_start=1); sys.exit(3)", "sys.exit(1)"])
def test_exit_code_3_later_or_after_progress_is_waited_out(part, running, until, recorded, first_life):
    code = f"""
        record("started")
        if len(records("started")) == 1:
            {first_life}
        if len(records("started")) < 4:
            sys.exit(3)
        await_end_of_stdin()
    """
    stop, result = running(Supervisor([part(code)], RecordedBackoff()))
    until(lambda: len(recorded("started")) == 4, "four starts")
    stop.set()
    assert result.result(PATIENCE_SECONDS) is Exit.DONE


def test_exit_code_3_on_the_first_start_of_a_part_that_has_run_before_ends_nothing(part, running, until, recorded):
    code = """
        record("again")
        if len(records("again")) < 3:
            sys.exit(3)
        await_end_of_stdin()
    """
    backoff = RecordedBackoff()
    stop, result = running(Supervisor([part(STAYS, "other"), part(code, has_run_before=True)], backoff))
    until(lambda: len(recorded("again")) == 3 and recorded("started"), "three starts")
    stop.set()
    assert result.result(PATIENCE_SECONDS) is Exit.DONE
    assert backoff.asked == [1, 2]
    assert len(recorded("started")) == 1


def test_a_pipeline_that_has_a_version_has_run_before(example):
    config = load_config(example / "pipeline.toml", {})
    versions = config.state_dir / "versions"
    for folder, has_run in ((".tmp-1-7", False), ("7", True)):
        assert not any(part.has_run_before for part in pipeline_parts(config))
        (versions / folder).mkdir(parents=True)
        (versions / folder / "manifest.json").touch()
        assert [part.has_run_before for part in pipeline_parts(config)] == [has_run, has_run]


def test_serving_does_not_copy_versions_to_where_the_learner_of_the_same_state_dir_writes(example):
    path = example / "pipeline.toml"
    path.write_text(f'{path.read_text()}\n[storage]\nurl = "file://{example}/bucket"\n')
    environment = {"ANABRANCH__SERVING__VERSIONS_FROM": "storage"}
    with pytest.raises(SettingsError, match="here both have one state_dir"):
        pipeline_parts(load_config(path, environment))
    only = {"ANABRANCH__STORAGE__MODE": "only"}
    assert pipeline_parts(load_config(path, {**environment, **only}))
    with pytest.raises(SettingsError, match=r'"only" publishes no version into state_dir, .*versions_from = "storage"'):
        pipeline_parts(load_config(path, only))


def test_a_stop_is_a_sigterm_to_every_part(part, running, until, recorded, is_gone):
    stop, result = running(Supervisor([part(STAYS, "one"), part(STAYS, "two")]))
    pids = until(lambda: len(recorded("started")) == 2 and recorded("started"), "both started")
    stop.set()
    assert result.result(PATIENCE_SECONDS) is Exit.DONE
    assert sorted(recorded("sigterm")) == sorted(pids)
    assert all(map(is_gone, pids))


def test_a_part_that_outlives_its_stop_timeout_is_killed(part, running, until, recorded, is_gone):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrecord('started')\nwhile True: time.sleep(60)"
    stop, result = running(Supervisor([part(code, stop_timeout=timedelta(milliseconds=200))]))
    (pid,) = until(lambda: recorded("started"), "the start")
    stop.set()
    assert result.result(PATIENCE_SECONDS) is Exit.DONE
    assert is_gone(pid)


def test_what_a_dead_part_leaves_in_its_session_is_ended(part, running, until, recorded, is_gone):
    grandchild = "import time\nwhile True: time.sleep(60)"
    code = f"""
        if not os.path.exists(folder + "/started"):
            child = subprocess.Popen([sys.executable, "-c", {grandchild!r}])
            with open(folder + "/grandchild", "w") as file:
                file.write(str(child.pid))
            record("started")
            os._exit(1)
        record("started")
        await_end_of_stdin()
    """
    running(Supervisor([part(code)]))
    until(lambda: len(recorded("started")) == 2, "the second start")
    (pid,) = recorded("grandchild")
    until(lambda: is_gone(pid), "the grandchild's end")


def test_a_standby_replaces_a_part_that_dies_each_time(part, running, until, recorded):
    supervisor = Supervisor([part(LEARNS, standby=STANDBY)], RestartPolicy(first=timedelta(hours=1)))
    running(supervisor)
    for deaths in (0, 1, 2):
        standbys = until(lambda deaths=deaths: len(recorded("standby")) > deaths and recorded("standby"), "a standby")
        assert recorded("started")[1:] == standbys[:-1]
        until(lambda deaths=deaths: supervisor.restarts == {"part": deaths}, "the count of restarts")
        os.kill(supervisor.pids()["part"], signal.SIGKILL)
        until(lambda pid=standbys[-1]: supervisor.pids() == {"part": pid}, "the standby")
        until(lambda pid=standbys[-1]: recorded("started")[-1] == pid, "its start")


def test_what_takes_over_and_makes_no_progress_is_a_death_more(part, running, until, recorded):
    backoff = RecordedBackoff()
    supervisor = Supervisor([part(LEARNS, standby="record('standby')\nsys.stdin.readline()\nos._exit(1)")], backoff)
    running(supervisor)
    (pid,) = until(lambda: recorded("standby"), "a standby")
    os.kill(recorded("started")[0], signal.SIGKILL)
    until(lambda: len(recorded("started")) == 2, "the second start")
    assert pid not in recorded("started")
    assert backoff.asked == [1, 2]


def test_there_is_no_standby_before_progress(part, until, recorded, children):
    supervisor = Supervisor([part(STAYS, standby=STANDBY)])
    supervisor.start()
    try:
        until(lambda: (supervisor.check(), recorded("started"))[1], "the start")
        assert children() == recorded("started")
    finally:
        supervisor.stop()


def test_a_standby_that_dies_is_started_again_after_the_part_was(part, until, recorded, is_gone, children, caplog):
    supervisor = Supervisor([part(LEARNS, standby="record('standby')\nos._exit(1)")])
    supervisor.start()
    try:
        (gone,) = until(lambda: (supervisor.check(), recorded("standby"))[1], "a standby")
        until(lambda: is_gone(gone), "its end")
        for _ in range(3):
            supervisor.check()
            assert children() == recorded("started")
        assert f"the standby of part (pid {gone}) ended with exit code 1" in caplog.text
        os.kill(recorded("started")[0], signal.SIGKILL)
        until(lambda: (supervisor.check(), len(recorded("standby")) == 2)[1], "another standby")
        assert gone not in recorded("started")
        assert supervisor.restarts == {"part": 1}
    finally:
        supervisor.stop()


@pytest.mark.parametrize("dies", [True, False])
def test_where_nothing_can_go_on_the_part_is_started(part, until, recorded, is_gone, dies):
    deaf = "record('standby')\n" + ("sys.stdin.read()" if dies else "os.close(0)\nrecord('deaf')\nsignal.pause()")
    supervisor = Supervisor([part(LEARNS, standby=deaf)])
    supervisor.start()
    try:
        (standby,) = until(lambda: (supervisor.check(), recorded("standby" if dies else "deaf"))[1], "a standby")
        killed = [recorded("started")[0], *([standby] if dies else [])]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, killed)), "the end")
        supervisor.check()
        until(lambda: len(recorded("started")) == 2, "the second start")
        assert supervisor.pids() == {"part": recorded("started")[1]}
        assert is_gone(standby)
        assert standby not in recorded("started")
    finally:
        supervisor.stop()


def test_a_stop_ends_a_standby_at_once(part, running, until, recorded, is_gone):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrecord('standby')\nwhile True: time.sleep(60)"
    stop, result = running(Supervisor([part(LEARNS, standby=deaf, stop_timeout=timedelta(hours=1))]))
    (pid,) = until(lambda: recorded("standby"), "a standby")
    stop.set()
    assert result.result(PATIENCE_SECONDS) is Exit.DONE
    assert is_gone(pid)
    assert recorded("sigterm") == recorded("started")


def test_output_goes_to_the_part_s_file_and_variables_reach_it(part, running, until, folder):
    code = "print(os.environ['COLOUR'], flush=True)\nprint('trouble', file=sys.stderr, flush=True)\n" + STAYS
    output = folder / "log"
    stop, result = running(Supervisor([part(code, environment={"COLOUR": "blue"}, output=output)]))
    until(lambda: output.exists() and output.read_text() == "blue\ntrouble\n", "the output")
    stop.set()
    assert result.result(PATIENCE_SECONDS) is Exit.DONE


def supervise(spawn, *parts):
    arguments = [
        (part.name, part.command, str(part.report), part.stop_timeout.total_seconds(), part.standby) for part in parts
    ]
    return spawn("-c", SUPERVISE, json.dumps(arguments))


def test_parts_end_when_their_supervisor_is_killed(part, spawn, until, recorded, is_gone):
    process = supervise(spawn, part(STAYS, "one"), part(STAYS, "two"))
    pids = until(lambda: len(recorded("started")) == 2 and recorded("started"), "both started")
    process.kill()
    until(lambda: all(map(is_gone, pids)), "the end of both")
    assert sorted(recorded("end of stdin")) == sorted(pids)


def test_a_standby_ends_when_the_supervisor_is_killed(part, spawn, until, recorded, is_gone):
    process = supervise(spawn, part(LEARNS, standby=STANDBY + "\nelse: record('never needed')"))
    standby = until(lambda: recorded("standby"), "a standby")
    process.kill()
    until(lambda: all(map(is_gone, recorded("started") + standby)), "the end of both")
    assert recorded("never needed") == standby


def test_ctrl_c_reaches_the_supervisor_alone_which_stops_its_parts(part, spawn, until, recorded, is_gone):
    code = "signal.signal(signal.SIGINT, lambda *_: record('sigint'))\n" + STAYS
    process = supervise(spawn, part(code))
    (pid,) = until(lambda: recorded("started"), "the start")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert is_gone(pid)
    assert (recorded("sigterm"), recorded("sigint")) == ([pid], [])


def test_a_second_ctrl_c_kills_at_once(part, spawn, until, recorded, is_gone):
    code = """
        signal.signal(signal.SIGTERM, lambda *_: record("sigterm"))
        record("started")
        while True: time.sleep(60)
    """
    process = supervise(spawn, part(code, stop_timeout=timedelta(hours=1)))
    (pid,) = until(lambda: recorded("started"), "the start")
    process.send_signal(signal.SIGINT)
    until(lambda: recorded("sigterm"), "the SIGTERM")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) != 0
    assert is_gone(pid)


def test_the_parts_of_a_pipeline_are_learner_and_serving_with_their_reports(example):
    import anabranch.serving.reporting.report
    from anabranch.learner.status import report as reports

    config = load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__STOP_TIMEOUT": "7s"})
    parts = pipeline_parts(config)
    assert [part.command[3] for part in parts] == ["anabranch.learner", "anabranch.serving"]
    assert [part.report for part in parts] == [
        config.state_dir / reports.REPORT,
        config.state_dir / anabranch.serving.reporting.report.REPORT,
    ]
    assert all(part.stop_timeout > timedelta(seconds=7) for part in parts)
    assert [part.standby for part in parts] == [None, None]


def test_a_learner_has_a_standby_where_the_config_says_so(example):
    learner, serving = pipeline_parts(load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__STANDBY": "true"}))
    assert learner.standby == (*learner.command, "--standby")
    assert serving.standby is None


def test_a_part_sees_only_the_device_that_its_uuid_names(example, monkeypatch):
    monkeypatch.setattr(visible_devices, "machine_devices", lambda: {"GPU-aa11": [], "GPU-bb22": ["MIG-cc33"]})
    settings = {"ANABRANCH__LEARNER__DEVICE": "GPU-aa11", "ANABRANCH__SERVING__DEVICE": "MIG-cc33"}
    config = load_config(example / "pipeline.toml", settings)
    seen = [part.environment.get("CUDA_VISIBLE_DEVICES") for part in pipeline_parts(config, {})]
    assert seen == ["GPU-aa11", "MIG-cc33"]
    seen = [part.environment.get("CUDA_VISIBLE_DEVICES") for part in pipeline_parts(load_config(config.path, {}), {})]
    assert seen == [None, None]
    with pytest.raises(
        SettingsError, match='CUDA_VISIBLE_DEVICES = "GPU-bb22" has no such device; it has GPU-bb22, MIG'
    ):
        pipeline_parts(config, {"CUDA_VISIBLE_DEVICES": "GPU-bb22"})


def test_a_child_is_started_with_the_devices_of_its_part(tmp_path):
    output = tmp_path / "seen"
    part = Part(
        "child",
        (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"),
        environment={"CUDA_VISIBLE_DEVICES": "GPU-aa11"},
        output=output,
    )
    process = spawn(part, part.command)
    assert process.wait(PATIENCE_SECONDS) == 0
    close_pipe(process)
    assert output.read_text() == "GPU-aa11\n"
