"""Ranks that torchrun starts: what they agree on, survive and refuse."""

import contextlib
import functools
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed.elastic.agent.server.api as agent
import torch.distributed.elastic.utils.store as store_exchange
import torch.distributed.rendezvous as torch_rendezvous
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous, static_tcp_rendezvous

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.errors import RankLostError
from anabranch.learner.parallel import torchrun
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.status.report import read_report
from anabranch.runtime.embedded_broker import EmbeddedBroker
from anabranch.runtime.lifecycle import stop_on_signals
from tests import forkserver
from tests.learner.parallel.test_launcher import LAYERS, OF_A_RANK, TENSOR
from tests.pipelines import adds_up, events, total
from tests.support import namespaces
from tests.support.facts import facts_of
from tests.support.namespaces import network_of_hosts
from tests.support.ports import first_free_port
from tests.support.waiting import PATIENCE_SECONDS, slowness, wait_until

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "several-hosts.md"
PROGRAM = Path(__file__).parent / "heartbeat_program.py"


IMPATIENT = """
import sys
from datetime import timedelta
from anabranch.learner.__main__ import main
from anabranch.learner.parallel import torchrun
torchrun.JOIN_TIMEOUT = timedelta(seconds=1)
sys.exit(main(["-c", sys.argv[1]]))
"""
"""A rank that waits a second for the others."""
PACKAGES = "anabranch|ingest|learner|replay|serving"


class Host:
    """Torchrun on one host, with ranks; its files are in a folder that no other host sees."""

    def __init__(self, folder, config, inside=contextlib.nullcontext):
        folder.mkdir(exist_ok=True)
        for name in ("pipeline.toml", "tiny_model.py"):
            shutil.copy(config.parent / name, folder / name)
        self.state_dir, self._config, self._inside = folder / "var", folder / "pipeline.toml", inside
        self._path = folder / "log"
        self.process: Any = None

    def start(self, options, ranks=2, **environment):
        """Start it by the command of the guide, with other `options`."""
        (command,) = re.findall(r"<!-- torchrun -->\n```sh\ntorchrun (.*?)```", GUIDE.read_text(), re.DOTALL)
        words = shlex.split(command.replace("\\\n", ""))
        changes = {**options, "--nproc-per-node": ranks, "-c": self._config}
        assert not changes.keys() - set(words)
        words = [str(changes.get(before, word)) for before, word in pairwise(["", *words])]
        command = ["-m", "torch.distributed.run", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd()), **environment}
        with self._inside(), self._path.open("ab") as output:
            self.process = forkserver.start(command, stderr=output, env=environment)

    @property
    def log(self):
        """What it and its ranks have written."""
        return self._path.read_text()

    @property
    def raised_in(self):
        """The lines of tracebacks in its log that name our code."""
        return re.findall(rf'^ *File "{re.escape(str(Path.cwd()))}/(?:{PACKAGES})/.*$', self.log, re.MULTILINE)

    @property
    def ranks(self):
        """Its ranks."""
        assert self.process is not None
        return forkserver.children(self.process)

    def wait_for(self, condition):
        """Return the first report of its rank 0 that satisfies a condition."""
        process = self.process
        assert process is not None

        def polled():
            report = read_report(self.state_dir)
            if report is not None and report.launcher == process.pid and condition(report):
                return report
            assert process.poll() is None, self.log
            return None

        return wait_until(polled, lambda: f"{read_report(self.state_dir)} {self.log}", every=0.02)

    def stop(self):
        """Send SIGTERM to torchrun."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def ended(self, seconds):
        """Wait until it has ended, and return its exit code."""
        assert self.process is not None
        return self.process.wait(seconds * slowness())

    def close(self):
        """SIGKILL it and its ranks."""
        if self.process is not None and self.process.poll() is None:
            for process in [*(rank.process for rank in self.ranks), psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()


def whole(report, count):
    """Whether each of so many events was learned or held out once, and is in the store once if it was learned."""
    assert adds_up(report)
    assert report.outcomes["trained"] + report.outcomes["held_out"] == count == total(report)
    return report.replay_rows == {"device": report.outcomes["trained"]}


@pytest.fixture
def network():
    """Two hosts."""
    with contextlib.ExitStack() as stack:
        yield network_of_hosts(stack, 2)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.services
@pytest.mark.any_broker
@pytest.mark.timeout(600)
def test_a_host_may_be_cut_off_or_killed_and_come_back_and_every_event_is_learned_once(
    network, create_topic, produce, write_pipeline, tmp_path
):
    """With 4 ranks, then 2, then 4. When one host is stopped, all events are in the newest checkpoint."""
    sent = 0
    with contextlib.ExitStack() as stack:
        with network.inside(0):
            broker = stack.enter_context(EmbeddedBroker()).bootstrap
            create_topic(broker, "events", 2)
            create_topic(broker, "events.dead")
        config = write_pipeline(broker, "events", rest=OF_A_RANK)
        hosts = [Host(tmp_path / f"host{n}", config, functools.partial(network.inside, n)) for n in range(2)]
        for host in hosts:
            stack.callback(host.close)

        def start(*numbers):
            for number in numbers:
                options = {"--nnodes": len(numbers), "--node-rank": number, "--master-addr": network.addresses[0]}
                hosts[number].start(options)

        def learn():
            nonlocal sent
            with network.inside(0):
                for partition in (0, 1):
                    produce(broker, "events", events(150), partition=partition)
            sent += 300
            report = hosts[0].wait_for(lambda each: total(each) == sent and (each.checkpoint or 0) > 1)
            assert whole(report, sent)
            return report

        start(0, 1)
        learn()
        ranks = [rank for host in hosts for rank in host.ranks]
        assert {rank.environment["WORLD_SIZE"] for rank in ranks} == {"4"}
        assert len(ranks) == 4
        network.cut_off(1)
        assert [host.ended(PATIENCE_SECONDS) for host in hosts] == [1, 1]
        assert psutil.wait_procs([rank.process for rank in ranks], PATIENCE_SECONDS)[1] == []
        assert "another rank is gone: " in hosts[0].log
        assert "another rank is gone: " in hosts[1].log
        assert [host.raised_in for host in hosts] == [[], []], "a host that is lost is no bug, whatever torchrun prints"

        start(0)
        learn()
        assert len(hosts[0].ranks) == 2

        hosts[0].stop()
        assert hosts[0].ended(PATIENCE_SECONDS) == 1  # as always with a signal
        network.restore(1)
        start(0, 1)
        learn()
        assert {rank.environment["WORLD_SIZE"] for host in hosts for rank in host.ranks} == {"4"}

        hosts[1].close()
        assert hosts[0].ended(PATIENCE_SECONDS) == 1
        start(0, 1)
        report = learn()
        assert report.accuracy["now"] > 0.8
        assert not (tmp_path / "host1" / "var").exists(), "a host without rank 0 has no state"

        hosts[1].stop()
        assert [host.ended(PATIENCE_SECONDS) for host in hosts] == [1, 1]
        assert "another host was stopped" in hosts[0].log
        assert hosts[0].log.count("stopped after") == 2, "in order, by a signal here and by one there"
    newest = Checkpoints(hosts[0].state_dir / "checkpoints", "", 0).latest()
    assert newest is not None
    assert newest.step == report.steps


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.any_broker
@pytest.mark.timeout(300)
def test_a_tensor_group_of_torchrun_stops_in_order_and_one_process_goes_on_from_its_checkpoint(
    kafka, make_topic, produce, write_pipeline, start, tmp_path
):
    topic = make_topic()
    host = Host(tmp_path / "host", write_pipeline(kafka.bootstrap, topic, rest=OF_A_RANK, model=LAYERS))
    produce(kafka.bootstrap, topic, events(200))
    options = {"--nnodes": 1, "--node-rank": 0, "--master-addr": "127.0.0.1", "--master-port": first_free_port()}
    with contextlib.closing(host):
        host.start(options, GLOO_SOCKET_IFNAME="lo", **TENSOR)
        report = host.wait_for(lambda each: total(each) == 200)
        ranks = host.ranks
        host.stop()
        assert host.ended(PATIENCE_SECONDS) == 1  # as always with a signal
        assert psutil.wait_procs([rank.process for rank in ranks], PATIENCE_SECONDS)[1] == []
    checkpoints = Checkpoints(host.state_dir / "checkpoints", "", 0)
    newest = checkpoints.latest()
    assert newest is not None
    assert newest.step == report.steps

    learner = start(host.state_dir.parent / "pipeline.toml")
    produce(kafka.bootstrap, topic, events(200))
    report = learner.wait_for(lambda each: total(each) == 400)
    assert whole(report, 400)
    assert report.steps - report.steps_since_start == newest.step
    assert learner.stop(40) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="there are network namespaces on Linux alone")
@pytest.mark.parametrize(
    ("user", "environment", "outcome"),
    [(0, "true", pytest.fail.Exception), (0, "", pytest.skip.Exception), (1000, "true", pytest.skip.Exception)],
)
def test_no_run_of_ci_as_root_lacks_the_test_of_hosts_that_are_cut_off(monkeypatch, user, environment, outcome):
    """`.ci/run` runs it by sudo for other users."""
    monkeypatch.setenv("CI", environment)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(namespaces, "_PROGRAM", "no-such-program")
    with contextlib.ExitStack() as stack, pytest.raises(outcome, match="root"):
        network_of_hosts(stack, 2)
    (name,) = re.findall(r"sudo .*\n? .*-k (\S+)", (Path(__file__).parents[3] / ".ci" / "run").read_text())
    assert name in test_a_host_may_be_cut_off_or_killed_and_come_back_and_every_event_is_learned_once.__name__


@pytest.fixture
def refused_hosts(write_pipeline, tmp_path):
    """Starts a host with each environment; torchrun ends with 1 on all."""

    def refused(*environments):
        config = write_pipeline("127.0.0.1:1", "never", rest=OF_A_RANK)
        port = first_free_port()
        hosts = [Host(tmp_path / f"host{number}", config) for number in range(len(environments))]
        with contextlib.ExitStack() as stack:
            for number, (host, environment) in enumerate(zip(hosts, environments, strict=True)):
                stack.callback(host.close)
                options = {"--node-rank": number, "--master-addr": "127.0.0.1", "--master-port": port}
                host.start(options, ranks=1, GLOO_SOCKET_IFNAME="lo", **environment)
            assert [host.ended(PATIENCE_SECONDS) for host in hosts] == [1] * len(hosts)
        return hosts

    return refused


@pytest.mark.slow
@pytest.mark.process
def test_hosts_with_other_settings_are_refused_on_all_hosts(refused_hosts):
    """Torchrun shows the exit code of the rank."""
    changes = [{"ANABRANCH__LEARNER__BATCH_SIZE": str(8 + number), "ANABRANCH__SEED": str(number)} for number in (0, 1)]
    for host in refused_hosts(*changes):
        assert "anabranch: [learner], seed of rank 1 differ from those of rank 0; install the same" in host.log
        assert "(exitcode: 2)" in host.log


@pytest.mark.slow
@pytest.mark.process
def test_a_host_that_refuses_to_start_ends_the_other_at_once(refused_hosts):
    hosts = refused_hosts({}, {"ANABRANCH__LEARNER__DETERMINISTIC": "true"})
    refusal = (
        "torchrun starts 2 ranks, which count as learner.replicas: learner.replicas = 2 does not go with learner.d"
    )
    assert f"anabranch: {refusal}" in hosts[1].log
    assert f"anabranch: rank 1 does not start: {refusal}" in hosts[0].log


@pytest.mark.process
def test_a_rank_whose_store_is_gone_ends_with_one_sentence(write_pipeline):
    """As when torchrun of the first host was killed while this rank imported torch."""
    config = write_pipeline("127.0.0.1:1", "never", rest=OF_A_RANK)
    variables = {**ENVIRONMENT, "MASTER_PORT": str(first_free_port()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"TORCHELASTIC_RUN_ID": "none"}
    done = forkserver.run(["-c", IMPATIENT, str(config)], env={**os.environ, **variables})
    assert done.returncode == 1
    assert "rank 3 ends: torchrun's store at 127.0.0.1 does not answer: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.process
def test_torchrun_may_start_ranks_again_and_no_rank_outlives_it(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(first_free_port()), str(PROGRAM), str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path.cwd())}) as torchrun:
        try:
            first = joined(tmp_path, 2)
            first[1].kill()
            assert psutil.wait_procs(first, PATIENCE_SECONDS)[1] == []
            again = joined(tmp_path, 2)
            assert not {process.pid for process in first} & {process.pid for process in again}
        finally:
            torchrun.kill()
        assert psutil.wait_procs(again, PATIENCE_SECONDS)[1] == []


@pytest.mark.process
def test_a_rank_that_is_silent_or_gone_ends_those_that_wait_in_c(tmp_path):
    for name, end in (("silent", psutil.Process.suspend), ("gone", psutil.Process.kill)):
        folder = tmp_path / name
        folder.mkdir()
        with of_heartbeat(folder, 2, SILENT_SECONDS="5") as processes:
            ranks = joined(folder, 2)
            end(ranks[1])
            assert processes[0].wait(PATIENCE_SECONDS) == 1
            if name == "silent":
                ranks[1].resume()
                assert processes[1].wait(PATIENCE_SECONDS) == 1


@pytest.mark.process
def test_a_rank_does_not_wait_without_end_until_all_are_connected(tmp_path):
    with of_heartbeat(tmp_path, 2, started=1, JOIN_SECONDS="1") as (process,):
        assert process.wait(PATIENCE_SECONDS) == 1


@pytest.mark.process
def test_a_signal_to_one_host_stops_all_ranks_and_each_ends_after_all_others(tmp_path):
    with of_heartbeat(tmp_path, 3, SEES_STOP="1") as processes:
        joined(tmp_path, 3)
        (tmp_path / "stop-1").touch()
        assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0, 0, 0]
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in range(3)] == ["True", "False", "True"]


@contextlib.contextmanager
def of_heartbeat(folder, size, started=None, **environment):
    """Run ranks of `heartbeat_program.py`, the first `started` of them, by default all."""
    processes = [
        forkserver.start([str(PROGRAM), str(folder), str(rank), str(size)], env={**os.environ, **environment})
        for rank in range(size if started is None else started)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def joined(folder, size):
    """Wait until all ranks have joined, and return their processes."""
    files = [folder / f"joined-{rank}" for rank in range(size)]
    wait_until(lambda: all(file.exists() for file in files))
    processes = [psutil.Process(int(file.read_text())) for file in files]
    for file in files:
        file.unlink()
    return processes


@pytest.mark.parametrize("module", [static_tcp_rendezvous, agent, store_exchange, torch_rendezvous, torchrun])
def test_nothing_that_comes_from_the_store_is_unpickled(module):
    """Of torch, the modules by which the static rendezvous connects hosts; the others there unpickle their state."""
    assert "import pickle" not in inspect.getsource(module)
    assert "import pickle" in inspect.getsource(dynamic_rendezvous)


def agreed(values, timeout=PATIENCE_SECONDS, store=None):
    """Let ranks agree on their values, and return the errors of all."""
    store = store or HashStore()
    store.set_timeout(timedelta(seconds=timeout))

    def agree(rank):
        try:
            torchrun.agree(store, rank, 3, values[rank])
        except (SettingsError, DependencyError, RankLostError) as exc:
            return f"{type(exc).__name__}: {exc}" if any(isinstance(each, Exception) for each in values) else str(exc)
        return ""

    with ThreadPoolExecutor() as pool:
        return list(pool.map(agree, range(len(values))))


ALIKE = {"seed": "1", "[learner]": "a", "torch": "2.13.0", "device type": "cuda", "precision": "bf16", "CUDA": "13.0"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, ""),
        ({"seed": "2", "[learner]": "b"}, "[learner], seed of rank 2 differ"),
        ({"torch": "2.12.1"}, "torch (2.12.1, not 2.13.0) of rank 2 differ"),
        ({"CUDA": "12.8"}, "CUDA (12.8, not 13.0) of rank 2 differ"),
    ],
)
def test_ranks_with_other_settings_or_releases_are_refused_by_all(values, sentence):
    said = agreed([ALIKE, ALIKE, ALIKE | values])
    assert len(set(said)) == 1
    assert said[0].startswith(sentence)
    assert bool(said[0]) == bool(sentence)


def test_a_rank_with_another_kind_of_device_is_refused():
    """Only the ranks on CUDA devices have releases of CUDA, which are not compared."""
    on_cpu = {name: value for name, value in ALIKE.items() if name != "CUDA"} | {"device type": "cpu"}
    on_cpu["precision"] = "fp32"
    (said,) = set(agreed([ALIKE, on_cpu, ALIKE]))
    assert said.startswith("device type (cpu, not cuda), precision (fp32, not bf16) of rank 1 differ")


@pytest.mark.parametrize("kind", [SettingsError, DependencyError])
def test_a_rank_that_cannot_start_ends_the_others_at_once_with_its_sentence(kind):
    """The others have other values too: that is the smaller fault."""
    theirs = f"{kind.__name__}: rank 1 does not start: no such device"
    own = f"{kind.__name__}: no such device"
    assert agreed([ALIKE, kind("no such device"), ALIKE | {"seed": "2"}]) == [theirs, own, theirs]


@pytest.mark.slow
def test_a_rank_that_cannot_start_says_why_where_others_are_missing():
    (said,) = agreed([SettingsError("no such device")], timeout=0.2)
    assert said == "SettingsError: no such device"


@pytest.mark.slow
def test_ranks_do_not_wait_without_end_for_one_that_is_missing():
    (said,) = set(agreed([ALIKE, ALIKE], timeout=0.2))
    assert said.startswith("not all of the 3 ranks came within ")


def test_a_host_that_starts_again_before_that_of_rank_0_has_ended_joins_no_group_that_is_gone():
    store = HashStore()
    assert agreed([ALIKE] * 3, store=store) == ["", "", ""]
    assert agreed([ALIKE], store=store) == [
        "torchrun of rank 0 has not ended since the last start of this host; start all hosts again"
    ]


def test_the_values_to_agree_on_are_those_of_settings_device_and_releases():
    settings = LearnerSettings(device="cpu", batch_size=7)
    values = torchrun.values_to_agree_on(settings, {"seed": 1})
    assert values.keys() == {"seed", "[learner]", "torch", "device type", "precision"}
    assert (values["device type"], values["precision"]) == ("cpu", "fp32")
    other = {"replicas": 2, "status": "127.0.0.1:9", "stop_timeout": timedelta(1)}
    assert torchrun.values_to_agree_on(settings.model_copy(update=other), {"seed": 1}) == values
    assert torchrun.values_to_agree_on(settings.model_copy(update={"batch_size": 8}), {"seed": 1}) != values


ENVIRONMENT = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def test_the_ranks_of_a_host_count_as_replicas_and_those_of_all_hosts_where_settings_exclude_each_other():
    started = torchrun.TorchrunRank.of(ENVIRONMENT)
    assert (started.first, started.is_on_host_0) == (2, False)

    def of(**learner):
        settings = LearnerSettings.model_validate(learner)
        return started.settings(settings, facts_of(learner=settings))

    assert of(sharding="fsdp").replicas == 2
    with pytest.raises(
        SettingsError, match=r"torchrun starts 4 ranks.*learner.replicas = 4 does not go with learner.d"
    ):
        of(deterministic=True)
    with pytest.raises(
        SettingsError, match=r'"zero1" does not go with torchrun --nnodes = 2: torch unpickles the data'
    ):
        of(sharding="zero1")
    assert of(mesh={"data": 2, "tensor": 2}).replicas == 2
    with pytest.raises(SettingsError, match=r"learner\.mesh has 2 ranks .*, but 4 start"):
        of(mesh={"tensor": 2})
    with pytest.raises(SettingsError, match=r"learner\.mesh\.tensor = 4 does not divide the 2 ranks of this host"):
        of(mesh={"tensor": 4})
    started = torchrun.TorchrunRank.of({**ENVIRONMENT, "RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"})
    assert (started.first, started.is_on_host_0) == (0, True)
    assert of(sharding="zero1").sharding == "zero1"


@pytest.mark.skipif(sys.platform != "linux", reason="the interface is chosen on Linux alone")
def test_gloo_and_nccl_use_the_interface_that_leads_to_rank_0_unless_the_environment_names_one():
    environment: dict[str, str] = {}
    torchrun.use_interface_to(("127.0.0.1", 29400), environment, 1)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    environment = {"GLOO_SOCKET_IFNAME": "eth1"}
    torchrun.use_interface_to(("127.0.0.1", 29400), environment, 2)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth1"}
    torchrun.use_interface_to(("no host of this name.invalid", 29400), environment := {}, 2)
    assert environment == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the interface is chosen on Linux alone")
@pytest.mark.parametrize("name", ["localhost", "127.0.1.1"])
def test_a_name_that_leads_to_loopback_is_refused_with_several_hosts(name):
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name."""
    with pytest.raises(SettingsError, match=f"--master-addr {name} leads to loopback on this host"):
        torchrun.use_interface_to((name, 29400), {}, 2)


def test_the_second_signal_does_not_end_a_rank():
    """Torchrun sends its signals on to ranks, and a service manager may send them to all processes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with stop_on_signals() as stop:
            torchrun.ignore_further_signals()
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            assert stop.wait(PATIENCE_SECONDS)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
