"""A replay buffer in Python is the store of the daemon: what it keeps, what it samples, and what it goes on with."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import anabranch
from anabranch.api.saved import SavedState
from anabranch.commands.backtest.batches import Numbering
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.testing.stores import add_now

SCHEMA = anabranch.Schema(
    {
        "features": {"x": {"dtype": "float32", "shape": [3]}},
        "label": {"name": "y", "classes": 4},
        "weight": {"name": "w"},
    }
)
TIMED = anabranch.Schema(
    {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "dtype": "float32"}, "time": {"name": "at"}}
)


def events(begin, count):
    """Return events that contain their number."""
    numbers = np.arange(begin, begin + count)
    x = np.repeat(numbers[:, None], 3, axis=1).astype(np.float32)
    return {"x": x, "number": numbers, "y": numbers % 4, "w": np.ones(count)}


def numbers(buffer, n=10_000):
    found = buffer.sample(n)["x"][:, 0].astype(int)
    assert len({*found.tolist()}) == len(found)
    return sorted(found.tolist())


@pytest.mark.parametrize("admission", ["reservoir", "class-balanced"])
def test_a_buffer_holds_what_the_store_of_the_daemon_holds(admission):
    with anabranch.ReplayBuffer(64, SCHEMA, admission=admission, seed=7) as buffer:
        settings = ReplaySettings(capacity=64, admission=admission)
        seed = StreamSecret.fixed(7).number("replay")
        store, numbering = build_store(settings, SCHEMA, torch.device("cpu"), seed), Numbering()
        for begin in range(0, 1000, 100):
            new = events(begin, 100)
            buffer.add(new)
            columns = {"feature.x": new["x"], "label": new["y"], "labelled": np.ones(100, np.bool_)}
            columns = numbering.add({**columns, "weight": np.ones(100, np.float32)})
            add_now(store, columns, [TopicPartition("buffer", 0)])
        held = sorted(store.event_table.by_slot["offset"][store.event_table.slots].tolist())
        store.close()
        assert numbers(buffer) == held


def test_a_sample_has_the_events_as_they_were_added():
    with anabranch.ReplayBuffer(100, SCHEMA) as buffer:
        buffer.add(events(0, 60))
        sample = buffer.sample(16)
        assert {name: (column.dtype, column.shape) for name, column in sample.items()} == {
            "x": (np.float32, (16, 3)),
            "y": (np.int64, (16,)),
            "w": (np.float32, (16,)),
        }
        np.testing.assert_array_equal(sample["y"], sample["x"][:, 0] % 4)
        sample["x"][:] = -1  # it is the caller's
        assert numbers(buffer) == [*range(60)]


def test_the_arrays_of_added_events_may_change():
    with anabranch.ReplayBuffer(100) as buffer:
        new = {"x": np.arange(5.0)}
        buffer.add(new)
        new["x"][:] = 9
        assert sorted(buffer.sample(5)["x"].tolist()) == [0, 1, 2, 3, 4]


def test_without_a_schema_columns_are_kept_as_they_are():
    data = {"x": np.array([[1.5, np.nan]]), "label": np.array([3], np.uint8), "ok": np.array([True])}
    with anabranch.ReplayBuffer(10) as buffer:
        buffer.add(data)
        sample = buffer.sample(1)
        assert sample.keys() == data.keys()
        for name, column in data.items():
            assert sample[name].dtype == column.dtype
            np.testing.assert_array_equal(sample[name], column)


def test_samples_are_all_equally_likely():
    with anabranch.ReplayBuffer(10) as buffer:
        buffer.add({"x": np.arange(10)})
        counts = np.bincount(np.concatenate([buffer.sample(3)["x"] for _ in range(2000)]), minlength=10)
        assert (abs(counts - 600) < 110).all(), counts  # 5 standard deviations; the seed is fixed


def test_recent_events_stay_longer():
    with anabranch.ReplayBuffer(50, TIMED, admission="recent", settings={"half_life": "100s"}) as buffer:
        at = np.arange(2000.0)
        buffer.add({"x": at, "y": at, "at": 1.7e9 + at})
        assert np.median(buffer.sample(50)["x"]) > 1800


def test_a_loader_makes_batches_of_a_buffer():
    with anabranch.ReplayBuffer(100, SCHEMA) as buffer:
        buffer.add(events(0, 40))
        for loader in (
            DataLoader(buffer.as_dataset(), batch_size=8),
            DataLoader(buffer.as_dataset(8), batch_size=None),
        ):
            batches = iter(loader)
            for _ in range(7):  # more than all events
                batch = next(batches)
                assert batch["x"].shape == (8, 3)
                assert torch.equal(batch["y"], batch["x"][:, 0].long() % 4)


def test_a_dataset_refuses_workers(monkeypatch):
    with anabranch.ReplayBuffer(100, SCHEMA) as buffer:
        buffer.add(events(0, 4))
        monkeypatch.setattr("anabranch.api.replay_buffer.get_worker_info", object)
        with pytest.raises(anabranch.AnabranchError, match="num_workers=0"):
            next(iter(buffer.as_dataset(2)))


@pytest.mark.parametrize("schema", [SCHEMA, None])
def test_a_buffer_goes_on_as_if_it_had_never_been_closed(tmp_path, schema):
    def add(buffer, part):
        for begin in range(part * 600, part * 600 + 600, 100):
            new = events(begin, 100)
            buffer.add(new if schema else {"x": new["x"], "y": new["y"]})

    with anabranch.ReplayBuffer(80, schema, path=tmp_path / "whole", seed=3) as whole:
        with anabranch.ReplayBuffer(80, schema, path=tmp_path / "parts", seed=3) as parts:
            add(parts, 0)
            first = parts.sample(20)
        with anabranch.ReplayBuffer(80, schema, path=tmp_path / "parts", seed=3) as parts:
            add(parts, 1)
            second = parts.sample(20)
            add(whole, 0)
            for name, column in whole.sample(20).items():
                np.testing.assert_array_equal(column, first[name])
            add(whole, 1)
            for name, column in whole.sample(20).items():
                np.testing.assert_array_equal(column, second[name])
            assert len(whole) == len(parts)


def test_what_was_not_saved_is_lost_and_no_more(tmp_path):
    buffer = anabranch.ReplayBuffer(1000, path=tmp_path)
    buffer.add({"x": np.arange(30)})
    buffer.save()
    buffer.add({"x": np.arange(30, 50)})
    buffer._release()  # as a process that is killed
    with anabranch.ReplayBuffer(1000, path=tmp_path) as again:
        assert sorted(again.sample(1000)["x"].tolist()) == [*range(30)]
        again.add({"x": np.arange(100, 110)})
    with anabranch.ReplayBuffer(1000, path=tmp_path) as again:
        assert sorted(again.sample(1000)["x"].tolist()) == [*range(30), *range(100, 110)]


def test_a_damaged_save_is_passed_over(tmp_path):
    with anabranch.ReplayBuffer(100, path=tmp_path) as buffer:
        for number in range(3):
            buffer.add({"x": np.full(5, number)})
            buffer.save()
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    (newest / MANIFEST).write_bytes(b"{")
    with anabranch.ReplayBuffer(100, path=tmp_path) as again:
        assert len(again) == 15


def test_a_full_file_has_room_for_any_number_of_events(tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.api.replay_buffer._FREE_SLOTS", 900)
    with anabranch.ReplayBuffer(20, path=tmp_path, admission="reservoir") as buffer:
        for begin in range(0, 20_000, 2000):
            buffer.add({"x": np.arange(begin, begin + 2000)})
        assert 20 <= len(buffer) <= 21
        assert buffer._store.lost == 0


BAD = [
    ({"admission": "best"}, "ReplayBuffer: replay.admission = 'best': write 'reservoir'"),
    ({"capacity": 0}, "ReplayBuffer: replay.capacity = 0: Input should be greater than or equal to 1"),
    ({"settings": {"clas_floor": 1}}, 'unknown key replay.clas_floor; the nearest known key is "class_floor"'),
    ({"sampling": "loss"}, 'sampling = "loss" needs what the steps of a model compute'),
    ({"admission": "recent"}, 'admission = "recent" needs the time of each event'),
    ({"sampling": "class-balanced", "schema": TIMED}, 'sampling = "class-balanced" needs classes'),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=range(len(BAD)))
def test_what_a_buffer_cannot_do_is_said_when_it_is_made(arguments, sentence):
    with pytest.raises(anabranch.AnabranchError) as error:
        anabranch.ReplayBuffer(**{"capacity": 10, "schema": SCHEMA, **arguments})
    assert sentence in str(error.value)


def test_what_a_buffer_cannot_take_is_said():
    buffer = anabranch.ReplayBuffer(10)
    with pytest.raises(anabranch.AnabranchError, match="the buffer is empty"):
        buffer.sample(1)
    with pytest.raises(anabranch.AnabranchError, match="the buffer has no path"):
        buffer.save()
    with pytest.raises(anabranch.AnabranchError, match="the column x is of dtype <U1"):
        buffer.add({"x": ["a"]})
    buffer.add({"x": np.zeros(3, np.float32)})
    for data, had in (({"y": np.zeros(3)}, "missing"), ({"x": np.zeros(3)}, r"float64 \[\]")):
        with pytest.raises(
            anabranch.AnabranchError, match=rf"column x is {had}, and the first events had float32 \[\]"
        ):
            buffer.add(data)
    with pytest.raises(anabranch.AnabranchError, match=r"sample\(0\)"):
        buffer.sample(0)
    assert len(buffer) == 3
    buffer.close()
    with pytest.raises(anabranch.AnabranchError, match="the buffer is closed"):
        buffer.add({"x": np.zeros(3, np.float32)})


def test_one_buffer_at_a_time_has_a_folder_open(tmp_path):
    with anabranch.ReplayBuffer(10, SCHEMA, path=tmp_path) as buffer:
        buffer.add(events(0, 4))
        with pytest.raises(anabranch.AnabranchError, match="is open elsewhere"):
            anabranch.ReplayBuffer(10, SCHEMA, path=tmp_path)
    with pytest.raises(anabranch.AnabranchError, match="have another schema"):
        anabranch.ReplayBuffer(10, TIMED, path=tmp_path)
    saved = SavedState(tmp_path, "Learner")
    with pytest.raises(anabranch.AnabranchError, match="has what a ReplayBuffer has saved, and no Learner"):
        saved.newest()
    saved.close()
