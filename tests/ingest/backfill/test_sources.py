"""`[stream.backfill]` and what it refuses; files behind URLs, by HTTP on loopback and by obstore."""

import hashlib
import re
from datetime import UTC, datetime
from functools import partial

import pytest
from obstore.store import LocalStore
from pydantic import ValidationError

from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill import files
from anabranch.ingest.backfill.files import FileMark
from anabranch.ingest.backfill.object_store import ObjectStoreFiles
from anabranch.ingest.errors import HistoryAwayError, HistoryError
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import revealed
from tests.ingest.backfill.test_history import begun, jsonl, numbers, parquet, read, read_until_error
from tests.pipelines import CONFIG
from tests.support.http_server import Handler, serving

IDENTITY = {"partition": "p", "offset": "o"}


@pytest.mark.parametrize(
    ("backfill", "sentence"),
    [
        (
            {"files": ["a.orc"]},
            'files: "a.orc" does not end with .parquet, .pq, .jsonl, .ndjson, .csv, .tsv; end it so, or set format',
        ),
        ({"files": ["a"]}, 'files: "a" does not end with'),
        ({"until": "soon"}, 'write "stream" or an ISO time such as "2026-01-31T08:00:00Z"'),
        ({"name": "events"}, "backfill.name: events is the name of a topic; choose another"),
        ({"name": "events.dead"}, "backfill.name: events.dead is the name of a topic; choose another"),
        ({"epochs": 2, "identity": IDENTITY}, "epochs > 1 and identity exclude each other"),
        ({"shuffle": 10, "identity": IDENTITY}, "shuffle and identity exclude each other"),
        ({"files": ["a.jsonl"], "identity": IDENTITY}, "identity needs Parquet files"),
        ({"delimiter": ";;"}, "at most 1 character"),
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


class Web(Handler):
    """Serves the files of a folder, with ranges, etags and `If-Match`; answers 503 while `away`."""

    away = False

    def __init__(self, folder, *arguments):
        self._folder = folder
        super().__init__(*arguments)

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, *, body):
        path = self._folder / self.path.lstrip("/")
        if Web.away or not path.is_file():
            self.send_error(503 if Web.away else 404)
            return
        contents = path.read_bytes()
        etag = f'"{hashlib.md5(contents).hexdigest()}"'
        if self.headers.get("If-Match", etag) != etag:
            self.send_error(412)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = contents[int(found[1]) : int(found[2]) + 1] if found else contents
        self.send_response(206 if found else 200)
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(part)))
        if found:
            self.send_header("Content-Range", f"bytes {found[1]}-{int(found[1]) + len(part) - 1}/{len(contents)}")
        self.end_headers()
        if body:
            self.wfile.write(part)


@pytest.fixture
def web(tmp_path):
    """The URL of a web server that serves `tmp_path`."""
    Web.away = False
    with serving(partial(Web, tmp_path)) as url:
        yield url


def test_files_of_a_web_server_are_read_by_ranges(tmp_path, web):
    parquet(tmp_path / "a.parquet", range(5000), row_group_size=1000)
    jsonl(tmp_path / "b.jsonl", range(5000, 6000))
    source = begun(f"{web}/a.parquet", f"{web}/b.jsonl")
    assert numbers(read(source)) == [*range(6000)]


def test_files_of_a_store_share_its_client():
    settings = files.BackfillSettings(files=("s3://bucket/a.parquet",))
    store = files.store_of("s3://bucket/y=1/a.parquet", settings)
    assert store is files.store_of("s3://bucket/b.parquet", settings)
    assert store is not files.store_of("s3://other/b.parquet", settings)
    region = files.BackfillSettings.model_validate({"files": ["s3://bucket/*.parquet"], "storage": {"region": "x"}})
    assert store is not files.store_of("s3://bucket/b.parquet", region)


@pytest.mark.slow
def test_a_file_that_changes_on_the_server_is_refused_while_it_is_read(tmp_path, web):
    jsonl(tmp_path / "a.jsonl", range(30_000))
    store = files.store_of(f"{web}/a.jsonl", begun(f"{web}/a.jsonl")._settings)
    (mark,) = store.matching(f"{web}/a.jsonl")
    with store.open(mark) as file:
        assert file.read(10) != b""
        jsonl(tmp_path / "a.jsonl", range(1, 30_001))
        with pytest.raises(HistoryError, match=r"a.jsonl was changed while it was read; put back the version"):
            file.read()


def test_a_missing_file_is_no_match_and_a_server_that_is_away_is_no_missing_file(tmp_path, web):
    with pytest.raises(SettingsError, match="no file matches"):
        begun(f"{web}/none.parquet")
    parquet(tmp_path / "a.parquet", range(10))
    store = ObjectStoreFiles.of(f"{web}/a.parquet", {"timeout": "1s"})
    Web.away = True
    store._store = type(store._store).from_url(
        web, client_options={"allow_http": True}, retry_config={"max_retries": 0}
    )
    with pytest.raises(HistoryAwayError, match=r"a.parquet cannot be read: .*; reading it is tried again"):
        store.find(f"{web}/a.parquet")


@pytest.mark.slow
def test_errors_of_a_server_pass_through_the_reader_of_parquet(tmp_path, web, monkeypatch):
    """They come out of threads of pyarrow."""
    parquet(tmp_path / "a.parquet", range(200_000), row_group_size=50_000)
    source = begun(f"{web}/a.parquet")

    def away(*_):
        raise HistoryAwayError("the server is away")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.ingest.backfill.object_store._Ranges.readinto", away)
        with pytest.raises(HistoryAwayError, match="the server is away"):
            read_until_error(source)
    assert numbers(read(source)) == [*range(200_000)]


def test_globs_match_objects_as_they_match_files(tmp_path):
    for name in ("y=1/a.parquet", "y=1/b.parquet", "y=2/a.parquet", "y=2/deep/c.parquet", "other/a.parquet", "a.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    store = ObjectStoreFiles("s3://bucket/", LocalStore(tmp_path))

    def matching(pattern):
        return [mark.name.removeprefix("s3://bucket/") for mark in store.matching(f"s3://bucket/{pattern}")]

    assert matching("y=*/*.parquet") == ["y=1/a.parquet", "y=1/b.parquet", "y=2/a.parquet"]
    assert matching("y=2/**/*.parquet") == ["y=2/a.parquet", "y=2/deep/c.parquet"]
    assert matching("y=1/a.parquet") == ["y=1/a.parquet"]
    assert matching("y=3/*.parquet") == []
    assert isinstance(store.find("s3://bucket/a.csv"), FileMark)
    assert store.find("s3://bucket/none.csv") is None


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("ftp://host/a.parquet", {}, "ftp://host/ cannot be opened: .*Unable to recognise URL"),
        ("s3://bucket/a.parquet", {"nonsense": "1"}, "'nonsense' is not valid for store 'S3'"),
    ],
)
def test_urls_and_options_that_obstore_does_not_have_are_one_sentence(url, options, why):
    with pytest.raises(SettingsError, match=f"stream.backfill.files: .*{why}"):
        ObjectStoreFiles.of(url, options)


def test_a_url_without_obstore_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "anabranch.ingest.backfill.object_store", None)
    settings = files.BackfillSettings(files=("s3://bucket/a.parquet",))
    with pytest.raises(SettingsError, match=r"s3://bucket/a.parquet needs obstore: pip install 'anabranch\[storage\]'"):
        files.store_of("s3://bucket/a.parquet", settings)
