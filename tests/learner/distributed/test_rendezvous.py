"""A learner on several hosts, each a separate launcher here: what it learns, survives and refuses."""

import contextlib
import json
import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from torch.distributed import HashStore

from anabranch.core.errors import SettingsError
from anabranch.runtime.embedded_broker import free_port
from ingest.config import StreamSettings
from learner.config import LearnerSettings
from learner.distributed import membership, rendezvous
from learner.distributed.membership import HostState, Membership, MembershipRound, listen
from learner.distributed.rendezvous import Coordinator, Member, MembershipChange
from learner.model.device import Precision
from learner.state_dir.report import LearnerReport
from learner.state_dir.version import Versions
from tests import forkserver
from tests.pipelines import NARROW, Learner, adds_up, events, total

pytestmark = pytest.mark.any_broker

CONFIG = """
batch_size = 8
hosts = 2
rendezvous = "127.0.0.1:{port}"
interface = "{interface}"
join_timeout = "{join_timeout}"
device = "cpu"
stop_timeout = "20s"
optimizer = {{name = "sgd", lr = 0.5}}
[versions]
publish_every = "100ms"
[checkpoints]
every = "200ms"
[gate]
holdout_fraction = 0.1
"""
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
PROGRAM = Path(__file__).parents[1] / "ranks_program.py"

Write = Callable[..., Path]
Start = Callable[..., Learner]


@pytest.fixture
def pipeline(kafka: Any, write_pipeline: Callable[..., Path], tmp_path: Path) -> Write:
    """Writes the pipeline of two hosts, `pipeline(topic, join_timeout)`; the second has a copy, in another folder."""

    def write(topic: str, join_timeout: str = "100s") -> Path:
        rest = CONFIG.format(port=free_port(), join_timeout=join_timeout, interface=INTERFACE)
        config = write_pipeline(kafka.bootstrap, topic, rest=rest)
        (tmp_path / "second").mkdir()
        for name in ("pipeline.toml", "tiny_model.py"):
            shutil.copy(config.parent / name, tmp_path / "second" / name)
        return config

    return write


@pytest.fixture
def second(start: Start) -> Start:
    """Starts the second host of a pipeline, `second(config, **environment)`."""

    def begin(config: Path, **environment: str) -> Learner:
        path = config.parent / "second" / config.name
        return start(path, **{"ANABRANCH__LEARNER__HOST_RANK": "1", **environment})

    return begin


def ranks(learner: Learner) -> list[psutil.Process]:
    """Return the processes that are the ranks of a host, in order."""
    found = [child for child in forkserver.children(learner.process) if "--group" in child.arguments]
    return [child.process for child in sorted(found, key=lambda child: int(child.environment["RANK"]))]


def whole(report: LearnerReport, events: int) -> bool:
    """Whether each of so many events was learned or held out once, and is in the store once if it was learned."""
    assert adds_up(report)
    assert report.outcomes["trained"] + report.outcomes["held_out"] == events == total(report)
    return report.replay_rows == {"device": report.outcomes["trained"]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_may_die_and_come_back_and_every_event_is_learned_once(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    pipeline: Write,
    start: Start,
    second: Start,
) -> None:
    """At first all events are of one partition, then of two, which are current_round to both hosts."""
    topic = make_topic(partitions=2)

    sent, halves = 0, "partitions that each host reads: 1, 1"

    def learn(partitions: tuple[int, ...] = (0, 1), no_more: int = 0) -> LearnerReport:
        """Send 300 events, and wait until a rank 0 that is not `no_more` has learned all."""
        nonlocal sent
        sent += 300
        for partition in partitions:
            produce(kafka.bootstrap, topic, events(300 // len(partitions)), partition=partition)
        report = leader.wait_for(lambda each: total(each) == sent and (each.checkpoint or 0) > 1, no_more=no_more)
        assert whole(report, sent)
        return report

    config = pipeline(topic, join_timeout="4s")
    other = second(config, ANABRANCH__LEARNER__REPLICAS="2")
    other.until(lambda: "waiting for host 0" in other.log.read_text())
    leader = start(config)
    report = learn(partitions=(1,))
    assert "2 of 2 hosts take part, with 3 ranks" in leader.log.read_text()

    while halves not in leader.log.read_text():
        learn()
    report = learn()

    (reader,) = (each for each in forkserver.children(other.process) if "--listen" in each.arguments)
    reader.process.kill()
    leader.until(lambda: "another host does not read its part of the stream" in leader.log.read_text())
    learn()
    report = leader.wait_for(lambda each: not each.problems)
    assert leader.log.read_text().count(halves) > 1
    report = learn()

    ranks(other)[1].kill()
    report = learn(no_more=report.pid)
    assert leader.log.read_text().count("with 3 ranks") == 2
    assert leader.log.read_text().rpartition("with 3 ranks")[2].count(halves), "by the rates that the checkpoint has"

    orphans = [each.process for each in forkserver.children(other.process)]
    assert len(orphans) == 3, "two ranks, and ingest"
    other.kill()
    assert psutil.wait_procs(orphans, 20)[1] == []
    report = learn(no_more=report.pid)
    assert report.problems == ["learner.hosts: host 1 did not come; learning goes on without it"]

    other = second(config)
    report = leader.wait_for(lambda each: not each.problems, no_more=report.pid)
    report = learn()
    assert report.accuracy["now"] > 0.8
    assert "2 of 2 hosts take part, with 2 ranks" in leader.log.read_text()
    assert "another rank is gone" in leader.log.read_text()
    assert "Traceback" not in leader.log.read_text(), "a host that is lost is no bug"
    assert not (other.log.parent / "var").exists(), "a host that does not lead has no state"
    processes = [*ranks(leader), *ranks(other)]
    assert [leader.stop(40), other.stop(40)] == [0, 0]
    assert psutil.wait_procs(processes, 10)[1] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_leading_host_may_die_and_others_leave_in_order_and_a_checkpoint_is_gone_on_from_by_one_host(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    pipeline: Write,
    start: Start,
    second: Start,
) -> None:
    topic = make_topic()
    config = pipeline(topic)
    leader, other = start(config), second(config)
    produce(kafka.bootstrap, topic, events(200))
    report = leader.wait_for(lambda each: total(each) == 200 and (each.checkpoint or 0) > 1)
    led = ranks(other)
    leader.kill()
    assert psutil.wait_procs(led, 20)[1] == []
    other.until(lambda: "host 0 is gone" in other.log.read_text())

    leader = start(config)
    produce(kafka.bootstrap, topic, events(200))
    report = leader.wait_for(lambda each: total(each) == 400)
    assert whole(report, 400)
    assert leader.log.read_text().count("2 of 2 hosts take part, with 2 ranks") == 2

    assert other.stop(40) == 0
    produce(kafka.bootstrap, topic, events(200))
    report = leader.wait_for(lambda each: total(each) == 600, no_more=report.pid)
    assert whole(report, 600)
    assert "ended with" not in leader.log.read_text(), "no rank died for it"
    steps = report.steps
    assert leader.stop(40) == 0

    alone = start(config, ANABRANCH__LEARNER__HOSTS="1")
    produce(kafka.bootstrap, topic, events(200))
    report = alone.wait_for(lambda each: total(each) == 800)
    assert whole(report, 800)
    assert report.steps > steps
    assert alone.stop(40) == 0
    versions = Versions(alone.state_dir / "versions")
    newest = versions.manifest(versions.numbers()[-1])
    assert newest.trained_through[f"{topic}:0"].offset == 799


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_that_hangs_keeps_nobody_waiting_and_is_taken_in_when_it_goes_on(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    pipeline: Write,
    start: Start,
    second: Start,
) -> None:
    topic = make_topic()
    config = pipeline(topic, join_timeout="4s")
    other = second(config)
    other.until(lambda: "waiting for host 0" in other.log.read_text())
    leader = start(config)
    produce(kafka.bootstrap, topic, events(200))
    report = leader.wait_for(lambda each: total(each) == 200 and (each.checkpoint or 0) > 1)
    assert "2 of 2 hosts take part" in leader.log.read_text()
    hanging = [psutil.Process(other.process.pid), *(each.process for each in forkserver.children(other.process))]
    for process in hanging:
        process.suspend()
    produce(kafka.bootstrap, topic, events(200))
    report = leader.wait_for(lambda each: total(each) == 400, no_more=report.pid)
    assert whole(report, 400)
    assert "host 1 is gone" in leader.log.read_text()
    assert report.problems
    for process in hanging:
        process.resume()
    produce(kafka.bootstrap, topic, events(200))
    report = leader.wait_for(lambda each: total(each) == 600 and not each.problems, no_more=report.pid)
    assert whole(report, 600)
    assert [leader.stop(40), other.stop(40)] == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_that_runs_out_of_memory_time_after_time_ends_no_learner(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    pipeline: Write,
    start: Start,
    second: Start,
) -> None:
    """From 128 new events and more to 4 at once, there alone."""
    topic = make_topic()
    produce(kafka.bootstrap, topic, events(1000))
    config = pipeline(topic)
    (config.parent / "second" / "tiny_model.py").write_text(NARROW)
    large = {"ANABRANCH__LEARNER__BATCH_SIZE": "128"}
    leader, other = start(config, **large), second(config, **large)
    leader.until(lambda: leader.report is not None and total(leader.report) == 1000, patience=300)
    report = leader.report
    assert report is not None
    assert whole(report, 1000)
    assert leader.log.read_text().count("2 of 2 hosts take part") == 1, "ranks were started again"
    assert other.log.read_text().count("ran out of memory") >= 5
    assert ["another replica ran out of memory" in warning for warning in report.warnings] == [True]
    assert [leader.stop(40), other.stop(40)] == [0, 0]


@pytest.mark.slow
def test_a_host_with_other_settings_and_a_second_one_of_a_number_are_refused(
    kafka: Any, make_topic: Callable[..., str], pipeline: Write, start: Start, second: Start
) -> None:
    config = pipeline(make_topic())
    start(config)
    strange = second(config, ANABRANCH__LEARNER__BATCH_SIZE="9", ANABRANCH__SEED="3")
    assert strange.process.wait(60) == 2
    said = "anabranch: [learner], seed of host 1 differ from those of host 0; all hosts take the same ones"
    assert said in strange.log.read_text()
    one = second(config)
    one.until(lambda: len(ranks(one)) == 1)
    twice = second(config)
    assert twice.process.wait(60) == 2
    assert "learner.host_rank = 1: another launcher is host 1 already" in twice.log.read_text()
    assert one.process.poll() is None


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            {"RENDEZVOUS": "192.0.2.77:29400"},
            'learner.rendezvous = "192.0.2.77:29400" cannot be listened on by host 0: ',
        ),
        ({"INTERFACE": "nowhere0"}, 'learner.interface = "nowhere0": there are '),
        ({"HOST_RANK": "2"}, "host_rank = 2, but hosts = 2: it is below that"),
        ({"SHARDING": "zero1"}, 'learner.sharding = "zero1" does not go with learner.hosts = 2'),
    ],
)
def test_hosts_that_cannot_connect_are_refused_in_one_sentence(
    pipeline: Write, start: Start, setting: dict[str, str], sentence: str
) -> None:
    config = pipeline("never")
    learner = start(config, **{f"ANABRANCH__LEARNER__{name}": value for name, value in setting.items()})
    assert learner.process.wait(60) == 2
    (said,) = learner.log.read_text().splitlines()
    assert sentence in said


def test_a_host_that_comes_gets_ranks_and_one_that_leaves_or_stops_publishing_loses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "SILENT_SECONDS", 1.0)
    store, stop = HashStore(), threading.Event()
    settings = LearnerSettings(
        hosts=3, replicas=2, rendezvous="h:1", interface="i", join_timeout=timedelta(seconds=0.5)
    )
    leading = Coordinator(store, settings, {})
    with contextlib.closing(leading):
        current_round = leading.next_round(stop)
        assert current_round is not None
        assert [current_round.size, set(current_round.assignments)] == [2, {0}]
        assert leading.poll() is MembershipChange.NONE
        others = [
            Membership(store, host, HostState(f"id {host}", ranks, {}), range(1)) for host, ranks in ((1, 1), (2, 4))
        ]
        until(lambda: leading.poll() is MembershipChange.HOSTS)
        leading.round_ended(ran_out=False)
        current_round = leading.next_round(stop)
        assert current_round is not None
        assert current_round.size == 7
        assert [current_round.assignments[host].first for host in range(3)] == [0, 2, 3]
        until(lambda: (state := others[0].latest(0)) is not None and state.current_round == current_round)
        assert leading.poll() is MembershipChange.NONE, "they are ready, and have not begun"
        for each in others:
            each.publish(within=current_round.name)
        others[1].publish(leaving=True)
        until(lambda: leading.poll() is MembershipChange.HOSTS)
        others[1].publish(within=None)
        until(lambda: leading.poll() is MembershipChange.DIED)
        leading.round_ended(ran_out=False)
        others[0].publish(within=None)
        others[1].close()
        current_round = leading.next_round(stop)
        assert current_round is not None
        assert set(current_round.assignments) == {0, 1}
        others[0].close()
        until(lambda: leading.poll() is MembershipChange.LOST)


def test_a_host_with_other_settings_ends_no_round_and_is_logged_once_each_time_it_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "learner.distributed.rendezvous")
    store, stop, alike = HashStore(), threading.Event(), {"seed": "1", "[learner]": "a", "[model]": "m"}
    settings = LearnerSettings(hosts=2, rendezvous="h:1", interface="i", join_timeout=timedelta(seconds=0.5))
    leading = Coordinator(store, settings, alike)
    with contextlib.closing(leading):
        assert leading.next_round(stop) is not None
        for start in (1, 2):
            strange = Membership(
                store, 1, HostState(f"start {start}", 1, {**alike, "seed": "2", "[learner]": "b"}), range(1)
            )
            changes: list[MembershipChange] = []

            def polled(seen: list[MembershipChange] = changes, turns: int = start) -> bool:
                seen.append(leading.poll())
                return len(caplog.messages) == turns or MembershipChange.HOSTS in seen

            with contextlib.closing(strange):
                until(polled)
                changes += [leading.poll() for _ in range(5)]
            assert set(changes) == {MembershipChange.NONE}, "a round goes on"
        assert caplog.messages == ["host 1 is refused: its [learner], seed differ from those of host 0"] * 2
        leading.round_ended(ran_out=False)
        current_round = leading.next_round(stop)
        assert current_round is not None
        assert set(current_round.assignments) == {0}
        with contextlib.closing(Membership(store, 1, HostState("fixed", 1, alike), range(1))):
            until(lambda: leading.poll() is MembershipChange.HOSTS)


@pytest.mark.process
@pytest.mark.parametrize(
    ("device", "precision", "sentence"),
    [
        (
            "cuda",
            "bf16",
            "device type (cuda, not cpu), precision (bf16, not fp32) of host 1 differ from those of host 0",
        ),
        ("cpu", "bf16", "precision (bf16, not fp32) of host 1 differ from those of host 0"),
    ],
)
def test_a_host_with_another_kind_of_device_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    precision: str,
    sentence: str,
) -> None:
    """Of hosts whose settings are the same: `auto` is what each of them has."""
    caplog.set_level(logging.WARNING, "learner.distributed.rendezvous")
    stop, both = threading.Event(), {"hosts": 2, "rendezvous": f"127.0.0.1:{free_port()}", "interface": INTERFACE}
    both |= {"join_timeout": "500ms"}
    settings, its = (LearnerSettings.model_validate({**both, "host_rank": rank}) for rank in (0, 1))
    stream = StreamSettings(bootstrap_servers="127.0.0.1:1", topics=("never",))
    monkeypatch.setattr(rendezvous, "choose_device", lambda _name: torch.device("cpu"))
    with rendezvous.connect_hosts(settings, stream, {}) as leading, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(rendezvous, "choose_device", lambda _name: torch.device(device))
        monkeypatch.setattr(rendezvous, "choose_precision", lambda _name, _device: Precision(precision, None))
        with rendezvous.connect_hosts(its, stream, {}) as led:
            assigned = pool.submit(led.next_round, stop)
            current_round = leading.next_round(stop)
            with pytest.raises(SettingsError, match=re.escape(sentence)):
                assigned.result(20)
            until(lambda: leading.poll() is MembershipChange.NONE and bool(caplog.messages))
    assert current_round is not None
    assert set(current_round.assignments) == {0}
    assert sentence.partition(" of host")[0] in caplog.text


@pytest.mark.parametrize(("ours", "differing"), [("13.0", ""), ("12.8", "CUDA (12.8, not 13.0)")])
def test_hosts_with_other_releases_of_cuda_are_refused(ours: str, differing: str) -> None:
    alike = {"device type": "cuda", "precision": "bf16", "CUDA": "13.0", "NCCL": "2.28.3"}
    one, host_0 = HostState("1", 1, alike | {"CUDA": ours}), HostState("0", 1, alike)
    assert rendezvous.differing_settings(one, host_0) == differing


@pytest.mark.process
def test_host_0_receives_in_which_round_the_ranks_of_another_host_ran_out_of_memory() -> None:
    stop, both = threading.Event(), {"hosts": 2, "rendezvous": f"127.0.0.1:{free_port()}", "interface": INTERFACE}
    settings, its = (LearnerSettings.model_validate({**both, "host_rank": rank}) for rank in (0, 1))
    stream = StreamSettings(bootstrap_servers="127.0.0.1:1", topics=("never",))
    assert settings.rendezvous is not None
    leading, led = Coordinator(listen(settings.rendezvous), settings, {}), Member(its, stream, {})
    with contextlib.closing(leading), contextlib.closing(led), ThreadPoolExecutor() as pool:

        def begin() -> MembershipRound:
            assigned = pool.submit(led.next_round, stop)
            current_round = leading.next_round(stop)
            assert current_round is not None
            assert assigned.result(20) == current_round
            return current_round

        first = begin()
        assert list(leading.ran_out) == []
        led.round_ended(ran_out=True)
        until(lambda: list(leading.ran_out) == [first.name])
        leading.round_ended(ran_out=False)
        second = begin()
        assert list(leading.ran_out) == [first.name] != [second.name], "until its ranks end again"
        led.round_ended(ran_out=False)
        until(lambda: not leading.ran_out)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.mark.process
def test_ranks_that_connect_over_an_address_learn_as_one_rank_does_and_have_the_same_weights(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    store = listen(address)
    (tmp_path / "address").write_text(address)
    scenario = {"steps": [[11, 9], [1, 0], [1, 1], [2, 0], [1, 5], [3, 1], [7, 0]]}
    (tmp_path / "alone").mkdir()
    for folder, size in ((tmp_path / "alone", 1), (tmp_path, 2)):
        command = [str(size), str(folder), json.dumps(scenario)]
        processes = [forkserver.start([str(PROGRAM), str(rank), *command]) for rank in range(size)]
        try:
            assert [process.wait(60) for process in processes] == [0] * size
        finally:
            for process in processes:
                process.kill()
                process.wait()
    del store
    names = ("alone/0", "0", "led-0")
    alone, leading, led = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in names)
    assert led
    for name, value in led.items():
        assert torch.equal(value, leading[f"model.{name}"]), name
        assert torch.allclose(value, alone[f"model.{name}"], rtol=0, atol=1e-6), name
