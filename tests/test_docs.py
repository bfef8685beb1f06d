"""The documentation, as far as a machine can hold it against the code."""

import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anabranch.commands.event_files.files import open_source
from anabranch.config.loader import load_config
from anabranch.config.model import Pipeline
from ingest.events.schema import Schema
from ingest.formats.registry import FORMATS
from ingest.formats.rows import row_dtype
from learner.compatibility import RULES, Conflict
from learner.model.device import Precision
from learner.model.factory import build_model, check_model, make_task
from learner.strategies.er import NoReplay
from learner.training.trainer import Trainer
from serving.reporting.report import read_report
from tools import reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
ELSEWHERE = ("README.md", "CONTRIBUTING.md", "benchmarks/NOTES.md")
PAGES |= {name: (ROOT / name).read_text(encoding="utf-8") for name in ELSEWHERE}
PAGES |= {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("examples/**/*.md"))
}
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for package in ("anabranch", "serving", "learner", "replay", "ingest")
    for path in sorted((ROOT / package).rglob("*.py"))
)

FENCED = re.compile(r"((?:<!-- [^\n]* -->\n)*)```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
METRIC = re.compile(r"anabranch_[a-z_]+")
BASE = """
    name = "base"
    stream = {topics = ["events"]}
    schema = {features = {x = {dtype = "float32"}}, label = {name = "y", classes = 2}}
    model = {factory = "my_model:build"}
"""


class Fence(NamedTuple):
    """A fenced block: the comments directly above it, its language and its text."""

    page: str
    marks: str
    language: str
    text: str

    def mark(self, name: str) -> str | None:
        """What a mark says after its name, as in `<!-- file: pipeline.toml -->`; None without such a mark."""
        found = re.search(rf"<!-- {name}(?:: ([^\n]*))? -->", self.marks)
        return found and (found[1] or "")


BLOCKS = [Fence(page, *match.groups()) for page, text in PAGES.items() for match in FENCED.finditer(text)]


def blocks(**attributes: str) -> list[Fence]:
    found = [block for block in BLOCKS if all(getattr(block, name) == value for name, value in attributes.items())]
    assert found, attributes
    return found


def named(block: Fence) -> str:
    return f"{block.page}:{BLOCKS.index(block)}"


def write_files(page: str, folder: Path, *changes: tuple[str, str]) -> None:
    """Write the blocks of a page that are files, with what is to be another in them."""
    for block in blocks(page=page):
        if (name := block.mark("file")) is not None:
            (folder / name).write_text(changed(block.text, *changes), encoding="utf-8")


def changed(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        text = text.replace(before, after)
    return text


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    words = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower())
    return words.replace(" ", "-")


def headings(text: str) -> set[str]:
    prose = FENCED.sub("", text)
    return {slug(line.lstrip("#")) for line in prose.splitlines() if line.startswith("#")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.key}-{rule.other}")
def test_what_does_not_go_together_is_in_the_table(rule: Conflict) -> None:
    _, _, rest = PAGES["docs/guides/training.md"].partition("### What does not go together")
    rows = [line.split(" | ") for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    names = f"`{rule.key}", f"`{rule.other}"
    assert any(one in row[0] and other in row[1] for row in rows for one, other in (names, names[::-1]))


@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if "/" in (each.mark("file") or "") and each.language == "python"], ids=named
)
@pytest.mark.process
def test_a_file_that_is_added_to_a_package_passes_its_linter(block: Fence) -> None:
    name = str(ROOT / str(block.mark("file")))
    for command in (["check", "--no-cache"], ["format", "--check"]):
        arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename", name, "-"]
        done = subprocess.run(arguments, input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    lost = []
    for link in LINK.findall(FENCED.sub("", PAGES[page])):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in headings(target.read_text(encoding="utf-8"))):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", PAGES)
def test_no_blank_line_is_within_a_table(page):
    """What comes after it would be shown as text: a table begins with a head and a line of dashes."""
    parts = FENCED.sub("", PAGES[page]).split("\n\n")
    tables = [part.splitlines() for part in parts if part.startswith("|")]
    assert [table[0] for table in tables if len(table) < 2 or not re.fullmatch(r"[|: -]+", table[1])] == []


def test_the_index_names_every_page():
    linked = set(LINK.findall(PAGES["docs/README.md"]))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("adr/0")} - {"README.md"} <= linked


def test_the_python_api_is_that_of_the_code():
    """Of names that a module lacks mkdocstrings shows nothing, without a warning."""
    page = PAGES["docs/reference/python-api.md"]
    directives = re.findall(r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", page, re.MULTILINE)
    assert len(directives) == page.count("\n::: ") > 0
    listed = [(module, name) for module, names in directives for name in names.split(", ")]
    assert [each for each in listed if not hasattr(importlib.import_module(each[0]), each[1])] == []


@pytest.mark.parametrize("block", blocks(language="toml"), ids=named)
def test_toml_is_a_pipeline_or_a_part_of_one(block):
    whole = tomllib.loads(BASE)
    for section, value in tomllib.loads(block.text).items():
        whole[section] = whole.get(section, {}) | value if isinstance(value, dict) else value
    Pipeline.model_validate(without_secrets(whole))


def without_secrets(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() in ({"env"}, {"file"}):
        return "a secret"
    return {key: without_secrets(inner) for key, inner in value.items()}


def test_commands_and_options_are_those_of_the_command_line():
    known = {
        name: {option for each in command.params for option in each.opts}
        for name, command in reference.commands().items()
    }
    groups = {name.split()[0] for name in known if " " in name}
    wrong = []
    for page, words in commands():
        name = " ".join(words[: 2 if words[0] in groups else 1])
        options = {word.partition("=")[0] for word in words if re.match(r"--?\w", word)}
        if name not in known or not options <= known[name] | {"--help"}:
            wrong.append(f"{page}: anabranch {' '.join(words)}")
    assert wrong == []


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page, and the words after it, of every `anabranch COMMAND` in code."""
    for page, text in PAGES.items():
        prose = FENCED.sub("", text)
        code = [line for line in prose.splitlines() if line.startswith("    ")]
        code += re.findall(r"`([^`\n]+)`", prose)
        code += [line for block in BLOCKS if block.page == page for line in block.text.splitlines()]
        for line in code:
            for found in re.findall(r"(?<![\w/:.-])anabranch ([a-z].*)", line):
                yield page, list(itertools.takewhile(lambda word: word not in ("|", "&&", "#"), found.split()))


def test_every_metric_is_explained_once():
    rows = [line for line in PAGES["docs/operate/monitor.md"].splitlines() if line.startswith("| `anabranch_")]
    assert sorted(METRIC.search(row)[0] for row in rows) == sorted(reference.metrics())


@pytest.mark.parametrize("page", PAGES)
def test_no_metric_is_named_that_does_not_exist(page):
    suffixes = ("_bucket", "_count", "_sum")
    found = {name for name in METRIC.findall(PAGES[page]) if not name.endswith("_")}
    assert [name for name in found if name not in reference.metrics() and not name.endswith(suffixes)] == []


def test_sentences_are_those_of_the_code():
    """The headings of the page of errors, and the rows of the table of what is checked at start."""
    joined = re.sub(r'"\s*\n\s*f?"', "", SOURCES).replace('\\"', '"')
    (checked,) = sections_of("docs/guides/model.md", "What is checked at start")
    sentences = re.findall(r"^### `([^`]{9,})`$", PAGES["docs/operate/troubleshoot.md"], re.MULTILINE)
    sentences += re.findall(r"^\| `([^`]{9,})` \|", checked, re.MULTILINE)
    assert len(sentences) > 60
    unknown = []
    for sentence in sentences:
        # What differs is written as ..., or as the value of an example.
        pieces = re.split(
            r'\.\.\.|my_model|build|task "\w+"|\[[^\]]*\]|\{[^}]*\}|torch\.float32|\b3\b|amount', sentence
        )
        unknown += [f"{sentence}: {piece}" for piece in pieces if len(piece) > 4 and piece.strip(" ,:") not in joined]
    assert unknown == []


def sections_of(page: str, *names: str) -> list[str]:
    parts = re.split(r"^## ", PAGES[page], flags=re.MULTILINE)
    found = [part for part in parts if part.partition("\n")[0] in names]
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark("run") == ""], ids=named)
@pytest.mark.process
def test_python_runs(block, tmp_path):
    write_files(block.page, tmp_path)
    run(block.text, tmp_path)


def test_what_strategies_are_worth_is_what_was_measured():
    """The guide gives the newest figures of the page of benchmarks, and no older ones."""
    rows = dict(re.findall(r"\| \[`split_mnist_(\w+)`\]\(\S+\) \| ([\d.]+) \|", (DOCS / "benchmarks.md").read_text()))
    page = (DOCS / "guides" / "strategies.md").read_text()
    guide = re.search(r"five seeds, through\s+Kafka;.*?Where nothing", page, re.DOTALL)
    names = ("none", "er_500", "derpp_500", "best_500", "er_200", "derpp_200")
    assert re.findall(r" (\d\d\.\d)\b", guide[0]) == [f"{float(rows[name]):.1f}" for name in names]


@pytest.mark.process
def test_the_worked_example_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])  # where the factory's folder is put
    write_files("docs/get-started/tutorial.md", tmp_path)
    run((tmp_path / "make_events.py").read_text(), tmp_path)
    config = load_config(tmp_path / "pipeline.toml", {})
    pipeline, schema, device = config.pipeline, Schema(config.pipeline.events), torch.device("cpu")
    task = make_task(pipeline.model.task)
    torch.manual_seed(pipeline.seed)
    model = build_model("my_model:build", pipeline.model.args, tmp_path)
    check_model(model, task, schema, device)
    trainer = Trainer(model, task, NoReplay(), schema, pipeline.learner, device, Precision("fp32", None))
    decoded = FORMATS["json"](schema).decode((tmp_path / "events.jsonl").read_bytes().splitlines())
    assert list(decoded.rejects) == []
    right = [
        trainer.step(trainer.examples({name: column[begin : begin + 64] for name, column in decoded.columns.items()}))
        for begin in range(0, len(decoded.message), 64)
    ]
    assert np.mean([step.score / 64 for step in right[-50:]]) > 0.85


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quickstart_ends_with_predictions(kafka, tmp_path):
    command = tmp_path / "bin" / "anabranch"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m anabranch "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ANABRANCH__STREAM__BOOTSTRAP_SERVERS": kafka.bootstrap,
        "ANABRANCH__STREAM__TOPICS": json.dumps([f"quickstart-{uuid.uuid4().hex}"]),
        "ANABRANCH__LEARNER__STATUS": "127.0.0.1:0",
        "ANABRANCH__SERVING__PORT": "0",
    }

    def shell(script: str, folder: Path) -> str:
        done = subprocess.run(
            ["sh", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    page = [block for block in BLOCKS if block.page == "docs/get-started/quickstart.md"]
    create, backtest, produce, ask = (block.text for block in page if block.mark("run") == "quickstart")
    (up,) = (block.text for block in page if block.mark("run") == "quickstart up")
    shell(create, tmp_path)
    folder = tmp_path / "digits"
    assert "4,000" in shell(backtest, folder)
    assert shell(produce, folder).count("=1999") == 2
    with subprocess.Popen(up.split(), cwd=folder, env=environment, stderr=subprocess.DEVNULL) as pipeline:
        try:
            deadline = time.monotonic() + 120
            while not _is_served(folder) and time.monotonic() < deadline:
                time.sleep(0.2)
            answers = shell(ask, folder).splitlines()
        finally:
            pipeline.send_signal(signal.SIGINT)
    assert all(json.loads(answer).keys() == {"version", "prediction", "probabilities"} for answer in answers[:3])
    assert any(line.startswith("outcomes ") for line in answers)


def _is_served(folder: Path) -> bool:
    report = read_report(folder / "var")
    return report is not None and report.ready


class TestMessages:
    """The producers of docs/guides/messages.md, on a broker."""

    def script(self, block, kafka, topic):
        return changed(block.text, ("localhost:9092", kafka.bootstrap), ("payments", topic))

    @pytest.mark.parametrize(
        "block",
        [block for block in BLOCKS if re.fullmatch(r"kafka( rows| arrow)?", block.mark("run") or "")],
        ids=named,
    )
    def test_what_they_write_can_be_read(self, block, kafka, make_topic, consume_all, tmp_path):
        topic = make_topic()
        run(self.script(block, kafka, topic), tmp_path)
        write_files(block.page, tmp_path)
        schema = Schema(load_config(tmp_path / "pipeline.toml", {}).pipeline.events)
        decoder = FORMATS[block.mark("run").partition(" ")[2] or "json"](schema)
        decoded = decoder.decode([record.value for record in consume_all(kafka.bootstrap, topic, at_least=1)])
        assert (list(decoded.rejects), len(decoded.message) > 0) == ([], True)

    def test_dead_letters_can_be_read_and_sent_again(self, kafka, make_topic, produce, consume_all, tmp_path):
        topic = make_topic()
        headers = [("anabranch-error", b"too large"), ("anabranch-source", b"payments[0]@7")]
        produce(kafka.bootstrap, f"{topic}.dead", [b'{"fraud": 7}'] * 2, headers=headers)  # twice, as after a crash
        show, again = (block for block in BLOCKS if block.mark("run") == "kafka letters")
        assert run(self.script(show, kafka, topic), tmp_path) == "payments[0]@7 too large all\n" * 2
        run(self.script(again, kafka, topic), tmp_path)
        assert [record.value for record in consume_all(kafka.bootstrap, topic, at_least=1)] == [b'{"fraud": 1}']

    @pytest.mark.parametrize("block", blocks(page="docs/guides/messages.md", language="json"), ids=named)
    def test_json_is_an_event(self, block, tmp_path):
        write_files(block.page, tmp_path)
        schema = Schema(load_config(tmp_path / "pipeline.toml", {}).pipeline.events)
        assert list(FORMATS["json"](schema).decode([block.text.encode()]).rejects) == []

    def test_the_row_of_the_table_has_the_size_that_it_says(self, tmp_path):
        write_files("docs/guides/messages.md", tmp_path)
        row = row_dtype(Schema(load_config(tmp_path / "pipeline.toml", {}).pipeline.events))
        ranges = [(row.fields[name][1], row.fields[name][0].itemsize) for name in row.names]
        written = re.findall(r"^\| (\d+) to (\d+) \| `\w+` \|", PAGES["docs/guides/messages.md"], re.MULTILINE)
        assert [(int(first), int(last) - int(first) + 1) for first, last in written] == ranges

    def test_the_columns_of_the_csv_are_fields(self, tmp_path):
        write_files("docs/guides/messages.md", tmp_path)
        write_files("docs/guides/send-a-file.md", tmp_path)
        schema = Schema(load_config(tmp_path / "pipeline.toml", {}).pipeline.events)
        with open_source(tmp_path / "events.csv", None, None, schema, checked=True) as source:
            assert ([record.fault for record in source], source.left_out) == (["", "", ""], [])
