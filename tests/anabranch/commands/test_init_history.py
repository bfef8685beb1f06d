"""`anabranch init --history`: a pipeline that fits the files that it was written from."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from anabranch.cli import app as cli
from anabranch.commands.init import write_history
from anabranch.config.loader import Config, load_config
from anabranch.core.errors import SettingsError
from ingest.backfill.row_decoder import RowDecoder
from ingest.events.schema import Schema
from learner.model.factory import build_model, check_model, make_task


def columns(rows: int = 6) -> dict[str, Any]:
    return {
        "amount": np.linspace(0, 1e6, rows),
        "items": pa.array([1, None, *range(2, rows)], pa.int16()),
        "weekend": [row % 2 == 0 for row in range(rows)],
        "pixels": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * 4, np.float32)), 4),
        "country": pa.array(["CH", None, *["DE"] * (rows - 2)]).dictionary_encode(),
        "tags": [["a"]] * rows,
        "class": ["a"] * rows,
        "at": pa.array(np.arange(rows), pa.timestamp("ms")),
        "fraud": [row % 2 for row in range(rows)],
        "two words": np.zeros(rows),
    }


@pytest.fixture
def history(tmp_path: Path) -> Path:
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table(columns()), tmp_path / "lake" / "part-0.parquet")
    return tmp_path / "lake"


def loaded(history: Path, label: str = "fraud") -> Config:
    folder = history.parent / "fraud eu"
    write_history(folder, f"{history}/*.parquet", label)
    return load_config(folder / "pipeline.toml", {})


def test_the_pipeline_fits_the_files_and_its_model_fits_the_schema(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loaded(history)
    pipeline, schema = config.pipeline, Schema(config.pipeline.events)
    assert RowDecoder(schema, None, 1_000_000).problem(pq.read_schema(history / "part-0.parquet")) is None
    assert pipeline.name == "fraud-eu"
    assert pipeline.stream.backfill is not None
    assert pipeline.stream.backfill.files == (f"{history}/*.parquet",)
    described = {
        name: (feature.dtype, feature.shape, feature.default) for name, feature in pipeline.events.features.items()
    }
    assert described == {
        "amount": ("float32", (), None),
        "items": ("int16", (), 0),
        "weekend": ("bool", (), None),
        "pixels": ("float32", (4,), None),
        "country": ("string", (), ""),
        "class": ("string", (), None),
    }
    assert (pipeline.events.label.name, pipeline.events.label.classes) == ("fraud", 2)
    assert pipeline.events.time is not None
    assert pipeline.events.time.name == "at"
    text = config.path.read_text()
    assert '"tags" is left out: no feature is of Arrow type list' in text
    assert '"two words" is left out: its name is not that of a field' in text
    monkeypatch.syspath_prepend(str(config.folder))
    model = build_model(pipeline.model.factory, pipeline.model.args, config.folder)
    assert check_model(model, make_task(pipeline.model.task), schema, torch.device("cpu")) == (2,)


def test_a_label_of_floats_is_a_regression_and_one_of_strings_has_its_classes(history: Path) -> None:
    regression = loaded(history, "amount").pipeline
    assert (regression.events.label.classes, regression.model.args["outputs"]) == (None, 1)
    assert regression.model.task == "regression"
    write_history(history.parent / "b", f"{history}/*.parquet", "country")
    words = load_config(history.parent / "b" / "pipeline.toml", {}).pipeline
    assert words.events.label.classes == ("CH", "DE")


def test_columns_of_kafka_connect_are_the_identity_and_no_features(history: Path) -> None:
    table = pa.table(columns() | {"kafka_topic": ["t"] * 6, "kafka_partition": [0] * 6, "kafka_offset": list(range(6))})
    pq.write_table(table, history / "part-0.parquet")
    pipeline = loaded(history).pipeline
    assert pipeline.stream.backfill is not None
    identity = pipeline.stream.backfill.identity
    assert identity is not None
    assert (identity.topic, identity.partition, identity.offset) == ("kafka_topic", "kafka_partition", "kafka_offset")
    assert not {"kafka_partition", "kafka_offset"} & pipeline.events.features.keys()


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        ("nothing", r"part-0\.parquet has no column nothing; --label takes one of amount, items"),
        ("tags", r"the label tags is of Arrow type list.*, not a number or a string"),
        ("class", r"the label class has 1 classes, not 2 to 1000"),
    ],
)
def test_a_column_that_is_no_label_is_named(history: Path, label: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        loaded(history, label)


def test_a_file_that_is_no_parquet_and_options_that_lack_each_other_are_one_sentence(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", str(history.parent / "a"), "--label", "fraud"]) == 2
    assert "--history and --label go together" in capsys.readouterr().err
    (history / "part-0.parquet").write_bytes(b"PAR1, but no more")
    assert cli.main(["init", str(history.parent / "a"), "--history", f"{history}/*", "--label", "fraud"]) == 2
    assert "part-0.parquet cannot be read as Parquet" in capsys.readouterr().err
    assert not (history.parent / "a").exists()


INJECTED = 'a\nstorage = {url = "s3:\\u002F\\u002Fevil"}\ntracing = {setup = "os:abort"}\n#'


def test_the_names_of_files_and_columns_write_no_setting(history: Path) -> None:
    inner = pa.struct([(INJECTED, pa.int32()), ("b", pa.string())])
    table = pa.table({**columns(), INJECTED: [0] * 6, "nested": pa.array([None] * 6, inner), "\x7f\u2028": [0] * 6})
    pq.write_table(table, history / "part-0.parquet")
    (history / "part-0.parquet").rename(history / "0 \"#'.parquet")
    pipeline = loaded(history).pipeline
    assert (pipeline.storage, pipeline.tracing) == (None, None)
    assert "amount" in pipeline.events.features


@pytest.mark.parametrize("name", [f"{INJECTED}.parquet", "\x1b[2J.parquet", "a\u2028.parquet", "\udcff.parquet"])
def test_a_file_whose_name_is_no_plain_text_is_refused(history: Path, name: str) -> None:
    (history / "part-0.parquet").rename(history / name)
    with pytest.raises(SettingsError, match=r"has control characters or is not UTF-8: .*; rename it") as raised:
        loaded(history)
    assert str(raised.value).isascii()
    assert str(raised.value).isprintable()
