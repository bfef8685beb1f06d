"""Files behind URLs: a web server with ranges and etags on loopback, and obstore's store of a folder."""

import hashlib
import re
from functools import partial

import pytest
from obstore.store import LocalStore

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill import files
from anabranch.ingest.backfill.files import FileMark
from anabranch.ingest.backfill.object_store import ObjectStoreFiles
from anabranch.ingest.errors import HistoryAwayError, HistoryError
from tests.ingest.backfill.test_history import begun, jsonl, numbers, parquet, read, read_until_error
from tests.support.http_server import Handler, serving


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
