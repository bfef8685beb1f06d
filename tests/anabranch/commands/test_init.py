"""The example that `anabranch init` writes."""

import json

import pytest

from anabranch.commands.init.command import FILES, next_commands, write_example
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat


def test_the_example_is_a_valid_pipeline_with_its_model_and_events(tmp_path):
    paths = write_example(tmp_path / "new" / "digits")
    assert sorted(path.name for path in (tmp_path / "new" / "digits").iterdir()) == sorted(FILES)
    assert [path.name for path in paths] == list(FILES)
    config = load_config(paths[0], {})
    assert (config.folder / f"{config.pipeline.model.factory.partition(':')[0]}.py").exists()


def test_every_event_of_the_example_can_be_used(example):
    schema = Schema(load_config(example / "pipeline.toml", {}).pipeline.events)
    lines = (example / "events.jsonl").read_bytes().splitlines()
    decoded = JsonFormat(schema).decode(lines)
    assert (len(decoded.message), list(decoded.rejects), decoded.unknown_fields) == (20, [], 0)
    assert {json.loads(line)["y"] for line in lines} == set(range(10))
    assert all(0 <= value <= 1 for line in lines for value in json.loads(line)["x"])


def test_an_existing_file_is_refused_by_name_and_nothing_is_written(tmp_path):
    (tmp_path / "my_model.py").write_text("mine")
    with pytest.raises(SettingsError, match=r"my_model\.py exists already; --force overwrites it"):
        write_example(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["my_model.py"]


def test_force_overwrites(tmp_path):
    (tmp_path / "my_model.py").write_text("mine")
    write_example(tmp_path, force=True)
    assert "nn.Module" in (tmp_path / "my_model.py").read_text()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot write .*file"):
        write_example(tmp_path / "file" / "digits")


def test_the_next_commands_begin_with_entering_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "cd digits\n" in next_commands(tmp_path.__class__("digits"))
    assert "cd" not in next_commands(tmp_path)
