"""A file of JSON lines has the same events for the history and for the commands, whatever wrote it."""

import gzip
import json

import numpy as np
import pytest

from anabranch.commands.event_files.files import open_source
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.history import FileHistory
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.stream import SchemaSettings
from tests.ingest.backfill.test_history import read

SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
)
LINES = [json.dumps({"x": n, "y": n % 3}).encode() for n in range(9)]
PLAIN = b"\n".join(LINES) + b"\n"
MARK = b"\xef\xbb\xbf"


def by_history(path):
    settings = BackfillSettings.model_validate({"files": [str(path)], "format": "jsonl"})
    history = FileHistory(settings, SCHEMA, seed=0, longest=1000)
    history.list_files(None)
    found = read(history)
    assert not [reject for rows in found for reject in rows.decoded.rejects]
    assert np.concatenate([rows.offset for rows in found]).tolist() == [*range(len(LINES))]
    return [float(x) for rows in found for x in rows.decoded.columns["feature.x"]]


def by_commands(path):
    with open_source(path, "jsonl", None, SCHEMA, checked=True) as source:
        return [json.loads(record.content)["x"] for record in source if isinstance(record.content, bytes)]


@pytest.mark.parametrize(
    "content",
    [
        PLAIN,
        PLAIN[:-1],
        gzip.compress(PLAIN, mtime=0),
        gzip.compress(PLAIN[:50], mtime=0) + gzip.compress(PLAIN[50:], mtime=0),
        b"\n\n" + PLAIN.replace(b"\n", b"\n\n") + b"\n",
        b"  \n" + PLAIN.replace(b"\n", b"\r\n \t\r\n\r\n") + b" ",
        MARK + PLAIN,
        MARK + b"\n" + PLAIN,
        gzip.compress(MARK + PLAIN, mtime=0),
    ],
)
@pytest.mark.parametrize("count_bytes", [1, 7, 1 << 20])
def test_a_file_has_the_same_events_for_both(tmp_path, content, count_bytes, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.backfill.jsonl_file._COUNT_BYTES", count_bytes)
    path = tmp_path / "a.json.data"
    path.write_bytes(content)
    assert by_history(path) == by_commands(path) == [float(n) for n in range(9)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[" + b",".join(LINES) + b"]", "it begins with a list"),
        (json.dumps([1, 2], indent=2).encode(), "it begins with a list"),
        (json.dumps({"x": 1, "y": 1}, indent=2).encode(), "its objects span several lines"),
        (PLAIN.decode().encode("utf-16"), "it is UTF-16; write it as UTF-8"),
        (PLAIN.decode().encode("utf-16-le"), "it is UTF-16 or UTF-32"),
        (PLAIN.decode().encode("utf-32-be"), "it is UTF-16 or UTF-32"),
        (gzip.compress(PLAIN.decode().encode("utf-16"), mtime=0), "it is UTF-16"),
        (b"\x28\xb5\x2f\xfd\x24...", "it is compressed with zstd"),
        (b"PAR1\x15\x04", "it is Parquet"),
    ],
)
def test_a_file_that_has_no_json_lines_is_refused_for_what_it_is(tmp_path, content, sentence):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for read_it in (by_history, by_commands):
        with pytest.raises(SettingsError, match=rf"a\.jsonl cannot be read as JSON lines: {sentence}"):
            read_it(path)


def test_one_torn_line_is_no_reason_to_refuse_a_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": \n' + PLAIN)
    with open_source(path, "jsonl", None, SCHEMA, checked=True) as source:
        assert len(list(source)) == 10
    history = FileHistory(BackfillSettings(files=(str(path),)), SCHEMA, seed=0, longest=1000)
    history.list_files(None)
    assert [reject.message for rows in read(history) for reject in rows.decoded.rejects] == [0]


@pytest.mark.parametrize(("name", "known"), [("a.jsonl.gz", True), ("a.ndjson.gz", True), ("a.parquet.gz", False)])
def test_a_suffix_of_gzip_is_one_of_json_lines(name, *, known):
    if known:
        assert BackfillSettings(files=(name,)).format_of(name) == "jsonl"
    else:
        with pytest.raises(ValueError, match="does not end with"):
            BackfillSettings(files=(name,))
