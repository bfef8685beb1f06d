"""docs/project/limits.md has each limit of the pages, with a test that shows that it is still so."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.settings.learner import ScheduleSettings
from anabranch.learner.settings.pipeline import Tokens
from anabranch.serving.settings import TlsSettings

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "project" / "limits.md"
ROW = re.compile(r"^\| (?P<limit>[^|]+) \| `(?P<path>tests/[^`:]+\.py)::(?P<name>\w+)` \|$", re.MULTILINE)
DENIED = re.compile(r"\b(?:[Nn]ot (?:yet )?supported|[Nn]ot yet (?:possible|there))\b")
"""How a page denies that there is something. Records of decisions and error sentences may."""


def rows():
    return list(ROW.finditer(PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["limit"])
def test_each_limit_has_a_test_that_shows_it(row):
    path = ROOT / row["path"]
    assert path.is_file()
    assert re.search(rf"^ *(async )?def {row['name']}\(", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_each_row_of_the_tables_is_read():
    limits, _, _ = PAGE.read_text(encoding="utf-8").partition("## Never tried")
    cells = [line for line in limits.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows()) == len([line for line in cells if line != "| limit | test |"]) > 30


def test_no_other_page_denies_anything():
    found = []
    for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), ROOT / "README.md"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("docs/adr/", "docs/reference.md", "docs/operate/troubleshoot", "docs/project/limits")):
            found += [f"{name}: {each[0]}" for each in DENIED.finditer(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("key", ["kinesis", "pulsar", "rest"])
def test_events_come_from_kafka_alone(key):
    with pytest.raises(ValidationError, match="Input should be 'kafka-python' or 'confluent'"):
        StreamSettings.model_validate({"topics": ["events"], "client": key})


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (Tokens, {"read", "admin"}),
        (TlsSettings, {"cert", "key"}),
        (ScheduleSettings, {"warmup_steps", "restart"}),
    ],
)
def test_these_sections_have_no_other_keys(section, keys):
    assert set(section.model_fields) == keys
