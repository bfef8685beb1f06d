"""Benchmarks start, and measure what their keys say."""

import argparse
import contextlib
import importlib
import json
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

import numpy as np
import pytest
import torch

Load = Callable[[str], ModuleType]
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load() -> Load:
    """A module of the harness, by its name."""
    return lambda name: importlib.import_module(f"benchmarks.harness.{name}")


SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[!_]*.py"))
EACH_IN_A_FORK = """
import os, runpy, sys
import kafka, prometheus_client, pydantic, torch

for script in sys.argv[1:]:
    print("==", script, flush=True)
    if os.fork() == 0:
        sys.argv[1:] = ["--help"]
        runpy.run_module(f"benchmarks.{script}", run_name="__main__", alter_sys=True)
        os._exit(0)
    print("==", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def helped() -> dict[str, tuple[str, str]]:
    """The output of each benchmark's `--help`, and its exit code.

    Each runs in a forked process with the third parties already imported, of which torch takes the longest.
    """
    command = [sys.executable, "-c", EACH_IN_A_FORK, *SCRIPTS]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(command, cwd=BENCHMARKS.parent, timeout=120, check=True, **output)
    _, *parts = run.stdout.split("== ")
    return {
        named.partition("\n")[0]: (named.partition("\n")[2], code.strip())
        for named, code in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.process
def test_a_benchmark_starts_and_has_the_common_options(helped: dict[str, tuple[str, str]], script: str) -> None:
    said, code = helped[script]
    assert code == "0", said
    for option in ("--quick", "--only", "--json", "--save"):
        assert option in said


def test_stored_events_are_verified(load: Load) -> None:
    events = load("events").Events(16)
    columns = events.columns(100_000_000, 300)
    x, label = columns["feature.x"], columns["label"]
    events.verify(x, label, below=100_000_300)
    assert set(columns) == set(events.columns(0, 1))
    for rows in (x + 1, x[[0, *range(299)]]):
        with pytest.raises(SystemExit):
            events.verify(rows, label, below=100_000_300)
    with pytest.raises(SystemExit):
        events.verify(x, label, below=100_000_299)


def test_every_arm_has_each_position_in_a_round(load: Load) -> None:
    called: list[str] = []
    arms = {name: lambda name=name: float(len(called.append(name) or called)) for name in "abc"}
    found = load("interleave").interleave(arms, rounds=3)
    assert sorted(position for rounds in found.values() for position in rounds) == list(range(4, 13))
    for figures in found.values():
        assert sorted((int(position) - 1) % 3 for position in figures) == [0, 1, 2]


def test_each_target_is_printed_as_met_or_missed(
    load: Load, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module, spread = load("results"), load("interleave").Spread
    results = module.Results("toy", {"speed": module.Target(5, least=True), "cost": module.Target(1.5)})
    results.add("speed", spread.of([4.0, 6.0, 7.0]))
    results.add("cost", 1.6)
    results.add("other", 3.0)
    speed, cost, other = capsys.readouterr().out.splitlines()
    assert speed.split() == ["speed", "6", "[4", "..", "7]", ">=", "5", "met"]
    assert cost.split() == ["cost", "1.6", "<=", "1.5", "MISSED"]
    assert other.split() == ["other", "3"]
    results.write(argparse.Namespace(json=tmp_path / "found.json", save=None, quick=True))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["speed"] == 6.0
    assert (found["speed_least"], found["speed_most"]) == (4.0, 7.0)
    assert not [value for value in found.values() if isinstance(value, dict | list)]


def test_saved_results_have_the_machine_and_the_revision_and_replace_no_file(load: Load, tmp_path: Path) -> None:
    module, spread = load("results"), load("interleave").Spread
    for quick in (True, True, False):
        results = module.Results("toy", {"mean_seconds": module.Target(0.5)})
        results.fact("quick", quick)
        results.add("mean_seconds", spread.of([0.1, 0.2, 0.7]))
        results.add("rate", float("nan"), unit="1/s")
        results.write(argparse.Namespace(json=None, save=tmp_path, quick=quick, only=["part"], data=tmp_path))
        results.write(argparse.Namespace(json=None, save=tmp_path, quick=quick, only=["part"], data=tmp_path))
    *_, found = (json.loads(path.read_text()) for path in tmp_path.glob("toy/*.json"))
    machine = found["machine"]
    stem = f"{found['time'][:10]}-{machine['name']}"
    assert {path.stem for path in tmp_path.glob("toy/*")} == {stem, f"{stem}-quick", f"{stem}-quick-2"}
    assert set(machine) == {"name", "cpu", "cores", "gpu", "system", "python", "torch", "kafka"}
    assert (machine["torch"], found["revision"]) == (torch.__version__, module.revision())
    assert found["parameters"] == {"form": found["parameters"]["form"], "only": ["part"], "data": str(tmp_path)}
    assert found["figures"] == [
        {
            "key": "mean_seconds",
            "value": 0.2,
            "unit": "s",
            "least": 0.1,
            "most": 0.7,
            "target": "<= 0.5",
            "met": True,
            "remark": "",
        },
        {
            "key": "rate",
            "value": None,
            "unit": "1/s",
            "least": None,
            "most": None,
            "target": None,
            "met": None,
            "remark": "",
        },
    ]


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("sample_hot_seconds_1e6", "s"),
        ("mlp_steps_per_second_baseline", "1/s"),
        ("mlp_over_baseline", "ratio"),
        ("sample_growth", "ratio"),
        ("index_bytes_per_event", "bytes per event"),
        ("swap_disk_bytes", "bytes"),
        ("stall_fraction_cold", "fraction"),
        ("swap_failed", ""),
    ],
)
def test_the_unit_follows_from_the_key(load: Load, key: str, unit: str) -> None:
    assert load("results").unit_of(key) == unit


@pytest.fixture
def forgetting() -> ModuleType:
    return importlib.import_module("benchmarks.forgetting")


def test_a_data_set_may_contain_arrays_only(load: Load) -> None:
    data = load("data")
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(2)]
    (x, y) = data.unpickled(pickle.dumps(arrays, protocol=3))
    assert np.array_equal(x, arrays[0])
    assert np.array_equal(y, arrays[1])
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        data.unpickled(b"cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(pickle.UnpicklingError, match=r"numpy\.load"):
        data.unpickled(b"cnumpy\nload\n(S'x'\ntR.")


def test_a_missing_data_set_is_named(load: Load, tmp_path: Path) -> None:
    np.savez(tmp_path / "elec.npz", x=np.zeros((2, 6), np.float32))
    assert load("data").load("elec", tmp_path)["x"].shape == (2, 6)
    with pytest.raises(SystemExit, match=r"mnist\.npz does not exist"):
        load("data").load("mnist", tmp_path)


def test_flights_are_in_scheduled_order_with_the_weather_of_their_hour(load: Load) -> None:
    flights = (
        "year,month,day,sched_dep_time,sched_arr_time,arr_delay,carrier,origin,dest,distance,hour\n"
        "2013,1,1,1800,2030,20,UA,EWR,IAH,1400,18\n"
        "2013,1,1,600,100,-3,AA,JFK,MIA,1000,6\n"
        "2013,1,1,700,900,NA,AA,JFK,MIA,1000,7\n"
    )
    weather = (
        "origin,year,month,day,hour,temp,dewp,humid,wind_speed,precip,pressure,visib\n"
        "EWR,2013,1,1,18,40,30,60,10,0,NA,9\n"
    )
    arrays = load("flights").flights_arrays(flights, weather)
    assert arrays["delay"].tolist() == [-3.0, 20.0]
    assert arrays["cat"].tolist() == [[0, 1, 1], [1, 0, 0]]
    early, late = arrays["num"]
    assert early[:2].tolist() == pytest.approx([1, 0], abs=1e-6)
    assert early[4:].tolist() == pytest.approx([1 / 12, 1.0, 19 * 60 / 600, *[-1] * 7])
    assert late[7:].tolist() == [40, 30, 60, 10, 0, -1, 9]


def test_a_pipeline_file_is_valid_toml(load: Load) -> None:
    document = {"a": {"b c": [1, 2.5, True]}, "d": float("inf"), "e": 'say "x"\n', "f": {"g": {"h": {}}}}
    assert tomllib.loads(load("pipeline").toml(document)) == document


def test_the_images_are_ordered_by_task_and_shuffled_by_seed(forgetting: ModuleType) -> None:
    label = np.arange(1000) % 10
    first, second = (forgetting.in_task_order(label, seed) for seed in (0, 1))
    assert sorted(first.tolist()) == list(range(1000))
    assert (np.diff(label[first] // 2) >= 0).all()
    assert not np.array_equal(first, second)
    assert np.array_equal(label[first] // 2, label[second] // 2)


def test_the_accuracy_is_the_mean_over_tasks_of_any_size(forgetting: ModuleType) -> None:
    def always_zero(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10).float()

    label = np.array([0] * 30 + [1] * 10 + [2, 4, 6, 8])
    assert forgetting.mean_of_tasks(always_zero, np.zeros((44, 1), np.float32), label) == pytest.approx(100 * 0.75 / 5)


def test_a_model_predicts_with_the_average_of_its_weights(load: Load) -> None:
    torch.manual_seed(0)
    model = load("models").averaged_pixels_mlp([4, 3, 2], decay=0.5)
    x = torch.full((1, 4), 255.0)
    weight = model.body[1][0].weight
    model.train()(x)
    assert torch.equal(model.eval()(x), model.body(x))
    with torch.no_grad():
        weight += 2
    assert not torch.equal(model.eval()(x), model.body(x))
    before = weight.detach() - 2
    model.train()(x)
    torch.testing.assert_close(model.average[1][0].weight, before + 2 * 0.9)
    assert not [each for each in model.average.parameters() if each.requires_grad]


STALLING = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
begin, connections = None, []
listener.setblocking(False)
while True:
    try:
        connections.append(listener.accept()[0])
        connections[-1].setblocking(False)
        begin = begin or time.monotonic()
    except BlockingIOError:
        pass
    for connection in connections:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            continue
        if data:
            time.sleep(max(0.0, begin + 0.5 - time.monotonic()))
            connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
"""


@contextlib.contextmanager
def listening(program: str) -> Iterator[tuple[str, IO[bytes]]]:
    """A server that prints its port first; yields its URL, and the rest of its output."""
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v2", server.stdout
    finally:
        server.kill()
        server.communicate()


@pytest.mark.process
def test_requests_arrive_on_time_while_the_server_stalls(load: Load) -> None:
    """The server stalls for half a second: each request that arrives in that time waits for the rest of it."""
    with listening(STALLING) as (url, _), load("load").Load(url, b"{}", {}) as requests:
        first, second = requests.turn(100, 1.0), requests.turn(100, 0.2)
    assert (len(first.seconds), first.failed, len(second.seconds)) == (100, 0, 20)
    assert (first.seconds > 0.1).sum() > 20
    assert (second.seconds < 0.1).sum() > 15


HASTY = """
import socket

with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
        connection.close()
        print("closed", flush=True)
"""


@pytest.mark.process
def test_a_connection_that_the_server_closed_is_not_used_again(load: Load) -> None:
    with listening(HASTY) as (url, said), load("load").Load(url, b"{}", {}) as requests:
        first, _, second = requests.turn(10, 0.1), said.readline(), requests.turn(10, 0.1)
    assert (len(first.seconds), len(second.seconds), second.failed) == (1, 1, 0)


CHUNKED = """
import socket

with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while connection.recv(65536):
        connection.sendall(b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n2\\r\\nok\\r\\n")
        print("half", flush=True)
        connection.sendall(b"0\\r\\n\\r\\n")
"""


@pytest.mark.process
def test_a_chunked_answer_ends_with_its_last_chunk(load: Load) -> None:
    with listening(CHUNKED) as (url, _), load("load").Load(url, b"{}", {}) as requests:
        answers = requests.flood(1, 0.1)
    assert len(answers.seconds) > 1
    assert answers.failed == 0


@pytest.mark.process
def test_clients_that_cannot_connect_are_counted(load: Load) -> None:
    with listening(HASTY) as (url, _):
        pass
    with load("load").Load(url, b"{}", {}) as requests:
        assert requests.flood(3, 0.1).failed == 3


def test_each_peer_of_serving_has_a_program(load: Load) -> None:
    module = load("serving_peer")
    assert all(Path(module.__file__).with_name(f"{name}_peer.py").is_file() for name in module.PEERS)
