"""Benchmarks start, and measure what their keys say."""

import argparse
import contextlib
import importlib
import io
import json
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from anabranch.config.pipeline import Pipeline
from tests.support.tokenizer import tokenizer_json
from tests.support.waiting import wait_until

Load = Callable[[str], ModuleType]


@pytest.fixture
def load():
    """A module of the harness, by its name."""
    return lambda name: importlib.import_module(f"benchmarks.harness.{name}")


def test_stored_events_are_verified(load):
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


def test_every_arm_has_each_position_in_a_round(load):
    called: list[str] = []
    arms = {name: lambda name=name: float(len(called.append(name) or called)) for name in "abc"}
    found = load("interleave").interleave(arms, rounds=3)
    assert sorted(position for rounds in found.values() for position in rounds) == list(range(4, 13))
    for figures in found.values():
        assert sorted((int(position) - 1) % 3 for position in figures) == [0, 1, 2]


def test_each_target_is_printed_as_met_or_missed(load, capsys, tmp_path):
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


def test_saved_results_have_the_machine_and_the_revision_and_one_line_a_run(load, tmp_path):
    module, spread = load("results"), load("interleave").Spread
    for form in (module.Form.QUICK, module.Form.QUICK, module.Form.LONG):
        results = module.Results("toy", {"mean_seconds": module.Target(0.5)})
        results.fact("quick", form is module.Form.QUICK)
        results.add("mean_seconds", spread.of([0.1, 0.2, 0.7]))
        results.add("rate", float("nan"), unit="1/s")
        results.write(argparse.Namespace(json=None, save=tmp_path, form=form, only=["part"], data=tmp_path))
        results.write(argparse.Namespace(json=None, save=tmp_path, form=form, only=["part"], data=tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "toy.jsonl").read_text().splitlines()]
    assert [line["parameters"]["form"] for line in lines] == ["quick", "quick", "long"]
    found, machine = lines[-1], lines[-1]["machine"]
    assert set(machine) == {"name", "cpu", "cores", "gpu", "system", "python", "torch", "kafka"}
    assert (machine["torch"], found["revision"]) == (torch.__version__, module.revision())
    assert found["parameters"] == {"form": "long", "only": ["part"], "data": str(tmp_path)}
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


@pytest.fixture
def forgetting():
    return importlib.import_module("benchmarks.forgetting")


def test_a_data_set_may_contain_arrays_only(load):
    data = load("data")
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(2)]
    (x, y) = data.unpickled(pickle.dumps(arrays, protocol=3))
    assert np.array_equal(x, arrays[0])
    assert np.array_equal(y, arrays[1])
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        data.unpickled(b"cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(pickle.UnpicklingError, match=r"numpy\.load"):
        data.unpickled(b"cnumpy\nload\n(S'x'\ntR.")


def test_flights_are_in_scheduled_order_with_the_weather_of_their_hour(load):
    flights = (
        "year,month,day,sched_dep_time,sched_arr_time,dep_delay,arr_delay,air_time,carrier,flight,origin,dest,distance,"
        "hour,minute,time_hour\n"
        "2013,1,1,1800,2030,4,20,227,UA,15,EWR,IAH,1400,18,0,2013-01-01T23:00:00Z\n"
        "2013,1,1,610,100,-2,-3,160,AA,15,JFK,MIA,1000,6,10,2013-01-01T11:00:00Z\n"
        "2013,1,1,700,900,5,NA,NA,AA,7,JFK,MIA,1000,7,0,2013-01-01T12:00:00Z\n"
    )
    weather = (
        "origin,year,month,day,hour,temp,dewp,humid,wind_speed,precip,pressure,visib\n"
        "EWR,2013,1,1,18,40,30,60,10,0,NA,9\n"
    )
    arrays = load("flights").flights_arrays(flights, weather)
    assert arrays["delay"].tolist() == [-3.0, 20.0]
    assert arrays["cat"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert arrays["flight"].tolist() == [0, 1], "of two lines that both have a flight 15"
    assert arrays["t"].tolist() == [1357038600.0, 1357081200.0]
    assert ((arrays["t_label"] - arrays["t"]) / 60).tolist() == [-2 + 160 + 20, 4 + 227 + 20]
    early, late = arrays["num"]
    assert early[:2].tolist() == pytest.approx([np.sin(angle := 2 * np.pi * 370 / 1440), np.cos(angle)])
    assert early[4:].tolist() == pytest.approx([1 / 12, 1.0, (19 * 60 - 10) / 600, *[-1] * 7])
    assert late[7:].tolist() == [40, 30, 60, 10, 0, -1, 9]


def test_texts_have_their_source_and_rating(load, tmp_path):
    data = load("data")
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as files:
        for source, name in enumerate(data.TEXT_SOURCES.values()):
            rated = f"1\t-{source}.5\tzu {source}\r\n2\t1\tü\r\n"
            add_file(files, f"hutto_ICWSM_2014/{name}_GroundTruth.txt", rated.encode())
    with tarfile.open(tmp_path / "sdist.tar.gz", mode="w:gz") as files:
        add_file(files, "v-1/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    arrays = data._texts(tmp_path / "sdist.tar.gz")
    assert arrays["text"].tolist() == ["zu 0", "ü", "zu 1", "ü", "zu 2", "ü", "zu 3", "ü"]
    assert arrays["source"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert arrays["rating"].tolist() == [-0.5, 1, -1.5, 1, -2.5, 1, -3.5, 1]


def add_file(files, name, content):
    about = tarfile.TarInfo(name)
    about.size = len(content)
    files.addfile(about, io.BytesIO(content))


@pytest.fixture
def minilm(tmp_path):
    """A folder with texts and a model's files in place of the fetched ones."""
    tokenizer = np.frombuffer(json.dumps(tokenizer_json()).encode(), np.uint8)
    np.savez(tmp_path / "minilm.npz", **{"tokenizer.json": tokenizer, "config.json": np.frombuffer(b"{}", np.uint8)})
    source = np.arange(40) % 4
    np.savez(tmp_path / "texts.npz", text=np.array([f"good film {n}" for n in range(40)]), source=source)
    return tmp_path


def test_each_arm_of_pretrained_is_a_valid_pipeline(load, minilm):
    pretrained, texts = importlib.import_module("benchmarks.pretrained"), load("texts")
    folder = texts.write_minilm(minilm, minilm)
    stream = load("pipeline").Stream("localhost:1", "texts", texts.text_schema(folder), 40)
    arms = {**pretrained.arms(folder), "student": pretrained.student(folder, minilm / "var", 1)}
    for name, sections in arms.items():
        document = load("pipeline").pipeline(stream, {"factory": ""}, 0, sections)
        settings = Pipeline.model_validate(document)
        strategy = "er" if name == "student" else "none"
        assert (settings.stream.format, settings.learner.strategy.name) == ("json", strategy)
    assert texts.ids_of(["good film"], folder)[0, :5].tolist() == [2, 4, 6, 3, 0]


def test_the_accuracy_of_texts_is_that_of_all_batches(load, minilm):
    texts = load("texts")
    folder = texts.write_minilm(minilm, minilm)
    label = np.array([0] * 60 + [1] * 20)

    def by_first_word(ids):
        return torch.nn.functional.one_hot((ids[:, 1] == 5).long(), 2).float()

    found = texts.Texts(["good"] * 60 + ["bad"] * 10 + ["good"] * 10, label)
    assert texts.accuracy(by_first_word, found, folder) == 100 * 70 / 80


def test_the_images_are_ordered_by_task_and_shuffled_by_seed(forgetting):
    label = np.arange(1000) % 10
    first, second = (forgetting.in_task_order(label, seed) for seed in (0, 1))
    assert sorted(first.tolist()) == list(range(1000))
    assert (np.diff(label[first] // 2) >= 0).all()
    assert not np.array_equal(first, second)
    assert np.array_equal(label[first] // 2, label[second] // 2)


def test_an_hour_is_labelled_by_the_next_one_at_its_airport(load):
    """Rows of another airport follow; a missing direction has no label, and 350 degrees are in the sector of north."""
    strangers, names = (
        load("strangers"),
        "origin,temp,dewp,humid,wind_dir,wind_speed,precip,pressure,visib,hour,time_hour",
    )
    hours = [("EWR", 30, 90, "1T00"), ("EWR", 31, 350, "1T01"), ("EWR", 30, "NA", "1T02"), ("JFK", 9, 45, "1T00")]
    lines = [f"{origin},{temp},1,50,{wind},3,0,NA,10,5,{time}" for origin, temp, wind, time in hours]
    arrays = strangers.hour_arrays("\n".join([names, *lines]))
    np.testing.assert_array_equal(arrays["after"], np.array([[350, 1], [np.nan, -1]], np.float32))
    assert strangers.stranger("wind", arrays)[1].tolist() == [0]
    assert strangers.stranger("warmer", arrays)[1].tolist() == [1, 0]
    assert np.isfinite(strangers.stranger("warmer", arrays)[0]).all()


def test_the_accuracy_is_the_mean_over_tasks_of_any_size(forgetting):
    def always_zero(x):
        return torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10).float()

    label = np.array([0] * 30 + [1] * 10 + [2, 4, 6, 8])
    assert forgetting.mean_of_tasks(always_zero, np.zeros((44, 1), np.float32), label) == pytest.approx(100 * 0.75 / 5)


def test_a_model_predicts_with_the_average_of_its_weights(load):
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


def test_images_are_shifted_in_training_alone_and_nothing_wraps_around(load):
    torch.manual_seed(0)
    shifted, image = load("models").Shifted(1), torch.zeros(28, 28, dtype=torch.uint8)
    image[0, 27] = 200
    x = image.reshape(1, 784).repeat(500, 1)
    assert torch.equal(shifted.eval()(x), x)
    found = shifted.train()(x).reshape(500, 28, 28)
    assert found.dtype == torch.uint8
    assert {tuple(each.nonzero().flatten().tolist()) for each in found} == {(), (0, 26), (0, 27), (1, 26), (1, 27)}


def test_an_average_of_weights_leaves_the_buffers_of_the_model_as_they_are(load):
    model = load("models").Averaged(torch.nn.BatchNorm1d(2), decay=0.5, parts=1)
    with torch.no_grad():
        model.body.weight.fill_(3)
    model.train()(torch.tensor([[0.0, 1.0], [2.0, 5.0]]))
    assert model.average.weight.tolist() == [3, 3]
    assert model.average.running_mean.tolist() == [0, 0]


def test_narrowed_layers_compute_what_the_whole_ones_do_without_the_smallest_neurons(load):
    torch.manual_seed(0)
    first, second, x = torch.nn.Linear(3, 6), torch.nn.Linear(6, 2), torch.randn(5, 3)
    with torch.no_grad():
        second.weight[:, [0, 4]] = 0
    narrow_first, narrow_second = load("models").narrowed(first, second, 4)
    assert narrow_first.out_features == 4
    torch.testing.assert_close(narrow_second(narrow_first(x).relu()), second(first(x).relu()))


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
def listening(program):
    """A server that prints its port first; yields its URL, and the rest of its output."""
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v2", server.stdout
    finally:
        server.kill()
        server.communicate()


@pytest.mark.process
def test_requests_arrive_on_time_while_the_server_stalls(load):
    """The server stalls for half a second: each request that arrives in that time waits for the rest of it."""
    with listening(STALLING) as (url, _), load("load").Load(url, b"{}", {}) as requests:
        first = requests.turn(100, 1.0)
        assert (len(first.seconds), first.failed) == (100, 0)
        assert (first.seconds > 0.1).sum() > 20
        # Later turns are not late any more, as soon as the machine lets them.
        wait_until(lambda: (requests.turn(100, 0.2).seconds < 0.1).sum() > 15)


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
def test_a_connection_that_the_server_closed_is_not_used_again(load):
    with listening(HASTY) as (url, said), load("load").Load(url, b"{}", {}) as requests:
        first, _, second = requests.turn(10, 0.1), said.readline(), requests.turn(10, 0.1)
    assert (len(first.seconds), len(second.seconds), second.failed) == (1, 1, 0)


@pytest.mark.process
def test_clients_that_cannot_connect_are_counted(load):
    with listening(HASTY) as (url, _):
        pass
    with load("load").Load(url, b"{}", {}) as requests:
        assert requests.flood(3, 0.1).failed == 3


@pytest.mark.parametrize("kind", ["FOUR", "WIDE"])
@pytest.mark.parametrize("form", ["avro", "protobuf", "json-schema", "json"])
def test_every_message_of_the_ingest_benchmark_becomes_an_event(load, form, kind):
    module, formats = load("registered_messages"), load("ingest_formats")
    events = getattr(module, kind)
    fetched = formats._fetched(module.messages(events, form, 50))
    with module.builder(events, form, {"bootstrap_servers": "localhost:1", "topics": ["t"]}) as made:
        assembled = made.assemble([formats.Incoming(fetched, 0, formats.Position(0))])
    assert len(assembled) == 50
    assert not assembled.letters
    expected = [events.event(dice, number) for dice in [np.random.default_rng(0)] for number in range(50)]
    name = "amount" if kind == "FOUR" else "x"
    np.testing.assert_array_equal(assembled.columns[f"feature.{name}"], [event[name] for event in expected])
    assert assembled.columns["label"].tolist() == [event["y"] for event in expected]


def test_the_benchmark_of_features_measures_both_parts(capsys, tmp_path):
    """On made-up files in place of the real streams, of 200 events."""
    random = np.random.default_rng(0)
    np.savez(tmp_path / "elec.npz", x=random.random((200, 6), np.float32), y=random.integers(0, 2, 200))
    np.savez(tmp_path / "nycflights.npz", num=random.random((200, 3), np.float32), delay=30 * random.random(200))
    module = importlib.import_module("benchmarks.features")
    found = module.Results("features", module.TARGETS)
    module.tabular("elec2", tmp_path, 200, 1, found)
    module.tabular("flights", tmp_path, 200, 1, found)
    module.many_ids("ids", 1_000, 300, 1, found)
    printed = capsys.readouterr().out
    for key in ("elec2_standard_gap", "flights_quantile_gap", "ids_learn_gap", "ids_learn_over_hash_points"):
        assert key in printed
