"""`[stream.backfill]`: what is refused, and with which words."""

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill import files
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import revealed
from tests.pipelines import CONFIG

IDENTITY = {"partition": "p", "offset": "o"}


@pytest.mark.parametrize(
    ("backfill", "sentence"),
    [
        (
            {"files": ["a.csv"]},
            'files: "a.csv" does not end with .parquet, .pq, .jsonl, .ndjson; end it so, or set format',
        ),
        ({"files": ["a"]}, 'files: "a" does not end with'),
        ({"until": "soon"}, 'write "stream" or an ISO time such as "2026-01-31T08:00:00Z"'),
        ({"name": "events"}, "backfill.name: events is the name of a topic; choose another"),
        ({"name": "events.dead"}, "backfill.name: events.dead is the name of a topic; choose another"),
        ({"epochs": 2, "identity": IDENTITY}, "epochs > 1 and identity exclude each other"),
        ({"shuffle": 10, "identity": IDENTITY}, "shuffle and identity exclude each other"),
        ({"files": ["a.jsonl"], "identity": IDENTITY}, "identity needs Parquet files"),
        ({"files": []}, "at least 1 item"),
        ({"epochs": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_fit_no_history_are_refused(backfill, sentence):
    with pytest.raises(ValidationError) as raised:
        StreamSettings.model_validate({"topics": ["events"], "backfill": {"files": ["a.parquet"], **backfill}})
    assert sentence in str(raised.value)


def test_with_several_topics_a_column_has_to_name_each_rows():
    with pytest.raises(ValidationError, match=r"backfill.identity.topic is missing: with several topics"):
        StreamSettings.model_validate(
            {"topics": ["a", "b"], "backfill": {"files": ["a.parquet"], "identity": IDENTITY}}
        )


def test_a_later_pass_has_a_name_of_its_own():
    settings = BackfillSettings(files=("a.parquet",), epochs=3)
    assert [settings.topic_of(number) for number in range(3)] == ["history", "history.2", "history.3"]
    with pytest.raises(ValidationError, match=r"backfill.name: history.2 is the name of a topic"):
        StreamSettings.model_validate({"topics": ["history.2"], "backfill": {"files": ["a.parquet"], "epochs": 2}})


def test_times_without_a_zone_are_utc():
    assert BackfillSettings(files=("a.pq",), until="2026-01-31").until_time == datetime(2026, 1, 31, tzinfo=UTC)
    assert BackfillSettings(files=("a.pq",)).until_time is None


def test_relative_patterns_are_below_the_folder_of_the_settings(tmp_path):
    path = tmp_path / "pipeline.toml"
    stream = '[stream.backfill]\nfiles = ["lake/*.parquet", "/data/a.parquet", "s3://bucket/a.parquet"]\n'
    stream += 'storage = {aws_secret_access_key = "secret"}'
    path.write_text(CONFIG.format(bootstrap="b:1", topic="events", stream=stream, width=3, status="127.0.0.1:1"))
    backfill = load_config(path, {}).pipeline.stream.backfill
    assert backfill is not None
    assert backfill.files == (f"{tmp_path}/lake/*.parquet", "/data/a.parquet", "s3://bucket/a.parquet")
    assert "secret" not in repr(backfill).replace("aws_secret_access_key", "")
    assert '"aws_secret_access_key":"secret"' in revealed(load_config(path, {}).pipeline.stream)


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_PARTITIONS", 5)
    for number in range(3):
        (tmp_path / f"{number}.parquet").touch()
    with pytest.raises(SettingsError, match=r"3 files match, which makes 6 partitions with epochs = 2, and 5 are"):
        files.listed(BackfillSettings(files=(str(tmp_path / "*"),), format="parquet", epochs=2))


def test_a_history_without_pyarrow_names_the_extra(monkeypatch):
    from anabranch.ingest.backfill.build import history_of
    from tests.ingest.backfill.test_history import SCHEMA, Schema, SchemaSettings

    monkeypatch.setitem(__import__("sys").modules, "anabranch.ingest.backfill.history", None)
    stream = StreamSettings.model_validate({"topics": ["events"], "backfill": {"files": ["a.parquet"]}})
    with pytest.raises(SettingsError, match=r"\[stream.backfill\] needs pyarrow: pip install 'anabranch\[arrow\]'"):
        history_of(stream, Schema(SchemaSettings.model_validate(SCHEMA)), 0)
