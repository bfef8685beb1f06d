"""The documentation, as far as a machine can hold it against the code."""

import contextlib
import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from anabranch.commands.event_files.files import open_source
from anabranch.config.loader import load_config
from anabranch.config.pipeline import Pipeline
from anabranch.core.failures import decoded
from anabranch.core.users_code import FOLDER
from anabranch.ingest.events.block import Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.formats.rows import row_dtype
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import HoldOut
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming
from anabranch.learner.model.device import Precision
from anabranch.learner.model.factory import build_model, check_model, make_task
from anabranch.learner.object_storage.head import BucketHead
from anabranch.learner.settings.compatibility import RULES
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.status.report import read_report as read_learner
from anabranch.learner.strategies.er import NoReplay
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import Versions
from anabranch.serving.reporting.report import read_report
from tests import forkserver
from tests.support.formats import FORMATS
from tests.support.waiting import wait_until
from tools import reference
from tools.draw_benchmarks import RESULTS, newest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
ELSEWHERE = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/NOTES.md", "tests/faults/README.md")
PAGES |= {name: (ROOT / name).read_text(encoding="utf-8") for name in ELSEWHERE}
PAGES |= {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("examples/**/*.md"))
}
INDEXES = {name for name in PAGES if re.match(r"docs/(README|adr/\d+)", name)}
"""Pages that answer no question: the table of all pages, and records of decisions."""
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

    def mark(self, name):
        """What a mark says after its name, as in `<!-- file: pipeline.toml -->`; None without such a mark."""
        found = re.search(rf"<!-- {name}(?:: ([^\n]*))? -->", self.marks)
        return found and (found[1] or "")


BLOCKS = [Fence(page, *match.groups()) for page, text in PAGES.items() for match in FENCED.finditer(text)]


def blocks(**attributes):
    found = [block for block in BLOCKS if all(getattr(block, name) == value for name, value in attributes.items())]
    assert found, attributes
    return found


def named(block):
    return f"{block.page}:{BLOCKS.index(block)}"


def write_files(page, folder, *changes):
    """Write the blocks of a page that are files, with what is to be another in them."""
    for block in blocks(page=page):
        if (name := block.mark("file")) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(changed(block.text, *changes), encoding="utf-8")


def changed(text, *changes):
    for before, after in changes:
        text = text.replace(before, after)
    return text


def run(script, folder):
    done = forkserver.run(["-c", script], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def slug(heading):
    """The anchor that GitHub gives a heading."""
    words = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower())
    return words.replace(" ", "-")


def headings(text):
    prose = FENCED.sub("", text)
    return {slug(line.lstrip("#")) for line in prose.splitlines() if line.startswith("#")}


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 120


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.choice.key}-{rule.other.key}")
def test_what_does_not_go_together_is_in_the_table(rule):
    _, _, rest = PAGES["docs/project/limits.md"].partition("## What does not go together")
    rows = [line.split(" | ") for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    names = f"`{rule.choice.key}", f"`{rule.other.key}"
    assert any(one in row[0] and other in row[1] for row in rows for one, other in (names, names[::-1]))


@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if "/" in (each.mark("file") or "") and each.language == "python"], ids=named
)
@pytest.mark.process
def test_a_file_that_is_added_to_a_package_passes_its_linter(block):
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


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/") and page not in INDEXES], ids=str)
def test_a_page_begins_with_the_question_that_it_answers(page):
    _, _, text = PAGES[page].partition("\n\n")
    first = re.split(r"(?<=[.?!])\s", re.sub(r"`[^`]*`", "name", text.partition("\n\n")[0]))[0]
    assert first.endswith("?"), first


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/guides/")])
def test_the_first_screen_of_a_guide_has_a_command(page):
    first = "\n".join(PAGES[page].splitlines()[:28])
    scripts = [text for _, language, text in FENCED.findall(first + "\n```\n") if language in ("sh", "bash")]
    assert scripts, first


def test_no_heading_of_the_reference_is_there_twice():
    found = [slug(line.lstrip("#")) for line in PAGES["docs/reference.md"].splitlines() if line.startswith("#")]
    assert sorted(found) == sorted(set(found))


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/reference.md"])
def test_prose_fits_120_columns(page):
    """Rows of tables, headings and blocks may be longer; the reference is written by a program."""
    lines = FENCED.sub("", PAGES[page]).splitlines()
    assert [line for line in lines if len(line) > 120 and not line.lstrip().startswith(("|", "#", "!["))] == []


def test_the_map_of_the_code_names_what_is_there():
    packages = "|".join(("anabranch", "serving", "learner", "replay", "ingest", "docs", "tests", "tools"))
    named = re.findall(rf"`((?:{packages})/[^`\s]*)`", PAGES["CONTRIBUTING.md"])
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


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
def test_toml_is_a_pipeline_or_a_part_of_one(block, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])  # where the folder of the page's classes is put
    write_files(block.page, tmp_path)
    whole = tomllib.loads(BASE)
    for section, value in tomllib.loads(block.text).items():
        whole[section] = whole.get(section, {}) | value if isinstance(value, dict) else value
    Pipeline.model_validate(without_secrets(whole), context={FOLDER: tmp_path})


def without_secrets(value):
    if not isinstance(value, dict):
        return value
    if value.keys() in ({"env"}, {"file"}):
        return "secret"
    return {key: without_secrets(inner) for key, inner in value.items()}


def test_commands_and_options_are_those_of_the_command_line():
    known = {
        name: {option for each in command.params for option in each.opts}
        for name, command in reference.commands().items()
    }
    # A command of a page's own package.
    added = re.findall(r'"anabranch\.commands"\]\n(\S+) = ', PAGES["docs/extend/command.md"])
    known |= {name: {"-c"} for name in added}
    groups = {name.split()[0] for name in known if " " in name}
    wrong = []
    for page, words in commands():
        name = " ".join(words[: 2 if words[0] in groups else 1])
        options = {word.partition("=")[0] for word in words if re.match(r"--?\w", word)}
        if name not in known or not options <= known[name] | {"--help"}:
            wrong.append(f"{page}: anabranch {' '.join(words)}")
    assert wrong == []


def commands():
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
    rows = [line for line in PAGES["docs/operate/monitor.md"].splitlines() if line.startswith("- `anabranch_")]
    assert sorted(METRIC.search(row)[0] for row in rows) == sorted(reference.metrics())


@pytest.mark.parametrize("page", PAGES)
def test_no_metric_is_named_that_does_not_exist(page):
    suffixes = ("_bucket", "_count", "_sum")
    found = {name for name in METRIC.findall(PAGES[page]) if not name.endswith("_")}
    assert [name for name in found if name not in reference.metrics() and not name.endswith(suffixes)] == []


def test_every_extra_that_users_take_is_on_the_page_on_installing():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = re.findall(r"^\| `([\w-]+)` \|", PAGES["docs/get-started/install.md"], re.MULTILINE)
    assert set(listed) == set(extras)


def test_every_outcome_of_an_event_is_in_the_glossary():
    _, _, rest = PAGES["docs/concepts/glossary.md"].partition("- **outcome:**")
    entry = rest.partition("\n- ")[0]
    assert {f"`{outcome.name.lower()}`" for outcome in Outcome} - set(re.findall(r"`\w+`", entry)) == {"`pending`"}


@pytest.mark.slow
def test_sentences_are_those_of_the_code():
    """The headings of the page of errors."""
    joined = re.sub(r'"\s*\n\s*f?"', "", SOURCES).replace('\\"', '"')
    sentences = re.findall(r"^### `([^`]{9,})`$", PAGES["docs/operate/troubleshoot.md"], re.MULTILINE)
    assert len(sentences) > 60
    unknown = []
    for sentence in sentences:
        # What differs is written as ..., or as the value of an example.
        pieces = re.split(
            r'\.\.\.|my_model|build|task "\w+"|\[[^\]]*\]|\{[^}]*\}|torch\.float32|\b3\b|amount', sentence
        )
        unknown += [f"{sentence}: {piece}" for piece in pieces if len(piece) > 4 and piece.strip(" ,:") not in joined]
    assert unknown == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark("run") == ""], ids=named)
@pytest.mark.process
def test_python_runs(block, tmp_path):
    write_files(block.page, tmp_path)
    run(block.text, tmp_path)


def test_what_strategies_are_worth_is_what_was_measured():
    """The guide gives the newest saved figures, and no older ones."""
    rows = newest(RESULTS / "forgetting.jsonl")
    page = (DOCS / "guides" / "strategies.md").read_text()
    guide = re.search(r"five seeds, through\s+Kafka;.*?Where nothing", page, re.DOTALL)
    names = ("none", "er_500", "derpp_500", "best_500", "er_200", "derpp_200")
    assert re.findall(r" (\d\d\.\d)\b", guide[0]) == [f"{rows[f'split_mnist_{name}'].value:.1f}" for name in names]


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
    trainer = Trainer(TrainingSetup(model, task, NoReplay(), schema, pipeline.learner, device, Precision("fp32", None)))
    decoded = FORMATS["json"](schema).decode((tmp_path / "events.jsonl").read_bytes().splitlines())
    assert list(decoded.rejects) == []
    right = [
        trainer.step(trainer.examples({name: column[begin : begin + 64] for name, column in decoded.columns.items()}))
        for begin in range(0, len(decoded.message), 64)
    ]
    assert np.mean([step.score / 64 for step in right[-50:]]) > 0.85


def environment_of(folder, bootstrap, topic):
    """Return an environment with the commands `anabranch` and `python`, for a pipeline that reads a topic.

    They are forked, and outlive a SIGKILL of the process that the shell has started.
    """
    commands = folder / "bin"
    commands.mkdir()
    for name, before in (("anabranch", ["-m", "anabranch"]), ("python", [])):
        (commands / name).write_text(forkserver.script(*before))
        (commands / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ANABRANCH__STREAM__BOOTSTRAP_SERVERS": bootstrap,
        "ANABRANCH__STREAM__TOPICS": json.dumps([topic]),
        "ANABRANCH__LEARNER__STATUS": "127.0.0.1:0",
        "ANABRANCH__SERVING__PORT": "0",
    }


def shell_in(environment, script, folder):
    done = subprocess.run(
        ["sh", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quickstart_ends_with_predictions(kafka, tmp_path):
    environment = environment_of(tmp_path, kafka.bootstrap, f"quickstart-{uuid.uuid4().hex}")

    def shell(script, folder):
        return shell_in(environment, script, folder)

    page = [block for block in BLOCKS if block.page == "docs/get-started/quickstart.md"]
    create, backtest, produce, ask = (block.text for block in page if block.mark("run") == "quickstart")
    (up,) = (block.text for block in page if block.mark("run") == "quickstart up")
    shell(create, tmp_path)
    folder = tmp_path / "digits"
    assert re.search(r"^ 3,[6-9]\d\d ", shell(backtest, folder), re.MULTILINE), "5 % are held out"
    assert shell(produce, folder).count("=1999") == 2
    with subprocess.Popen(up.split(), cwd=folder, env=environment, stderr=subprocess.DEVNULL) as pipeline:
        try:
            wait_until(lambda: _is_served(folder), every=0.2)
            answers = shell(ask, folder).splitlines()
        finally:
            pipeline.send_signal(signal.SIGINT)
    assert all(json.loads(answer).keys() == {"version", "prediction", "probabilities"} for answer in answers[:3])
    assert any(line.startswith("outcomes ") for line in answers)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pretrained_model_learns_from_texts_and_answers_them(kafka, make_topic, free_port, tmp_path, monkeypatch):
    name, port = "docs/guides/pretrained.md", free_port()
    environment = environment_of(tmp_path, kafka.bootstrap, make_topic()) | {"ANABRANCH__SERVING__PORT": str(port)}
    write_files(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_model.py", run_name="__main__")
    page = {block.mark("run"): block.text for block in BLOCKS if block.page == name}
    shell_in(environment, page["pretrained produce"].replace(" --create-topic", ""), tmp_path)
    ask = page["pretrained ask"].replace(":8000", f":{port}")
    with subprocess.Popen(
        page["pretrained up"].split(), cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    ) as up:
        try:
            wait_until(lambda: _is_served(tmp_path), every=0.2)
            reply = json.loads(shell_in(environment, ask, tmp_path))
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate()
    assert [(output["name"], output["shape"]) for output in reply["outputs"]] == [
        ("prediction", [2]),
        ("probabilities", [2, 2]),
        ("label", [2]),
    ]
    versions = Versions(tmp_path / "var" / "versions")
    newest = max(versions.numbers())
    base = bases_in(tmp_path / "var").file(versions.manifest(newest).base)
    assert all("lora" in key or key.startswith("classifier.") for key in versions.weights(versions.manifest(newest)))
    assert base.stat().st_size > 10_000


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_payments_are_scored_while_their_labels_are_late(kafka, tmp_path):
    """The day takes fifteen seconds. Labels may be ten late, so that a machine that stops for a while loses none."""
    prefix, copied = f"{uuid.uuid4().hex}-", tmp_path / "fraud"
    shutil.copytree(ROOT / "examples" / "fraud", copied)
    for file in copied.glob("*.*"):
        text = file.read_text(encoding="utf-8")
        names = [(f'"{name}', f'"{prefix}{name}') for name in ("payments", "chargebacks")]
        file.write_text(changed(text, *names, ("localhost:9092", kafka.bootstrap), ('wait = "5s"', 'wait = "10s"')))
    environment = environment_of(tmp_path, kafka.bootstrap, f"{prefix}payments")
    page = {block.mark("run"): block.text for block in blocks(page="docs/get-started/fraud.md")}
    said = shell_in(environment, page["fraud topics"], copied).splitlines()
    warned = [line for line in said if line.startswith("warning")]
    assert all("is in memory" in line for line in warned), "where the folder of tests is"
    assert said[-1] == ("1 warning" if warned else "nothing is wrong")
    frauds = (copied / "events.jsonl").read_text(encoding="utf-8").count('"known_at"')

    def labels():
        report = read_learner(copied / "var")
        return report.labels if report and report.labels and sum(report.labels.ended.values()) == 20_000 else None

    with subprocess.Popen(page["fraud up"].split(), cwd=copied, env=environment, stderr=subprocess.DEVNULL) as up:
        try:
            wait_until(lambda: read_learner(copied / "var"), every=0.2)
            shell_in(environment, f"{page['fraud send'].strip()} 15", copied)
            scores, alerts = shell_in(environment, page["fraud alerts"], copied).splitlines()
            late = wait_until(labels, lambda: f"labels of {read_learner(copied / 'var')}", every=0.2).labels
            screen = ""

            def judged():  # the newest version, of whose held-out events there are few measures at first
                nonlocal screen
                screen = shell_in(environment, page["fraud status"], copied)
                return re.search(r"recall_at_budget_1: .*held out 0\.", screen)

            wait_until(judged, lambda: f"a measure in {screen}", every=0.5)
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate()
    assert scores == "20,000 scores"
    assert re.fullmatch(r"the last two hours: \d+ alerts for 1,667 payments found \d+ of 21 frauds", alerts)
    assert late["matched"] + late.get("late", 0) == frauds
    assert late["matched"] > frauds / 2
    assert "judged by average_precision: gate.measures names it" in screen
    assert re.search(r"payments.scores: answered 20,000", screen)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_history_is_learned_and_then_the_topic(kafka, make_topic, produce, tmp_path):
    name, topic = "docs/guides/backfill.md", make_topic()
    # At the lowest priority, 50,000 rows take an hour next to other processes that are never idle.
    environment = environment_of(tmp_path, kafka.bootstrap, topic) | {"ANABRANCH__DEVICE_SHARING__POLICY": "exclusive"}
    write_files(name, tmp_path)
    page = {block.mark("run"): block.text for block in BLOCKS if block.page == name}
    assert "The history has 10 files with 50,000 rows, which fit [schema]." in shell_in(
        environment, page["backfill check"], tmp_path
    )

    def wait_for(events):
        def read_to_the_end():
            report = read_learner(tmp_path / "var")
            done = report is not None and report.backfill is not None and report.backfill.done
            return report if done and sum(report.outcomes.values()) >= events else None

        return wait_until(
            read_to_the_end, lambda: f"{events} events of {read_learner(tmp_path / 'var')}", 240, every=0.2
        )

    with subprocess.Popen(page["backfill up"].split(), cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as up:
        try:
            first = wait_for(50_000)
            screen = shell_in(environment, page["backfill status"], tmp_path)
            assert re.search(r"^history +read, 50,000 rows of 10 files *$", screen, re.MULTILINE)
            event = {"amount": 12.5, "hour": 3, "fraud": 0, "time": time.time()}
            produce(kafka.bootstrap, topic, [json.dumps(event).encode()] * 100)
            last = wait_for(50_100)
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate()
    assert (first.pid, first.started) == (last.pid, last.started), "without a restart"
    assert last.outcomes["trained"] + last.outcomes["held_out"] == 50_100
    assert last.partitions[f"{topic}:0"].finished == 100


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_drill_goes_on_without_a_lost_or_repeated_event(kafka, tmp_path):
    name, hosts = "docs/operate/disaster-recovery.md", [tmp_path / "first", tmp_path / "second"]
    environment = environment_of(tmp_path, kafka.bootstrap, f"drill-{uuid.uuid4().hex}")
    page = {block.mark("run"): block.text for block in BLOCKS if block.page == name}
    learn = page["drill learn"]

    def background(script):
        # Not forked, so that `kill -9` ends the learner itself.
        learner = f"setsid {shlex.quote(sys.executable)} -m anabranch learn"
        return script.replace("anabranch learn &", f"{learner} > learner.log 2>&1 < /dev/null &")

    def stored(folder, events):
        """Wait until so many events have an outcome, and a checkpoint with these is in the object store."""

        def checkpointed():
            report = read_learner(folder / "var")
            if report is None or sum(report.outcomes.values()) < events:
                return None
            there = decoded((tmp_path / "bucket" / "head.json").read_bytes(), BucketHead).checkpoints
            state = json.loads((folder / f"var/checkpoints/{report.checkpoint}/rank-0/state.json").read_text())
            counted = sum(sum(partition["outcomes"].values()) for partition in state["ledger"])
            return report if counted >= events and report.checkpoint in there else None

        return wait_until(checkpointed, (folder / "learner.log").read_text, every=0.2)

    try:
        shell_in(environment, page["drill first"], tmp_path)
        shell_in(environment, background(learn), hosts[0])
        first = stored(hosts[0], 400)
        assert "trained" in shell_in(environment, page["drill check"], hosts[0])
        shell_in(environment, page["drill lost"], hosts[0])
        shell_in(environment, background(page["drill again"]), hosts[1])
        last = stored(hosts[1], 800)
        shell_in(environment, page["drill check"], hosts[1])
        log = (hosts[1] / "learner.log").read_text()
        shell_in(environment, page["drill end"], hosts[1])
    finally:
        for host in hosts:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((host / "learner.pid").read_text()), signal.SIGKILL)
    assert sum(first.outcomes.values()) == 400
    assert sum(last.outcomes.values()) == 800
    assert last.replay_lost == 0
    assert last.steps > first.steps > 0
    assert last.generation > first.generation
    expected = re.search(r"```text\n(the learner of .*?)\n```", PAGES[name], re.DOTALL)[1]
    for line in expected.splitlines():
        assert re.search(".+".join(map(re.escape, re.split(r"file:\S+|\d+", line))), log), line


def _is_served(folder):
    report = read_report(folder / "var")
    return report is not None and report.ready


class TestLateLabels:
    """The producer of docs/guides/late-labels.md, on a broker."""

    def test_its_label_finds_its_event(self, kafka, make_topic, consume_all, tmp_path):
        page, topics = "docs/guides/late-labels.md", {name: make_topic() for name in ("payments", "chargebacks")}
        (block,) = (block for block in blocks(page=page) if block.mark("run") == "late labels")
        run(changed(block.text, ("localhost:9092", kafka.bootstrap), *topics.items()), tmp_path)
        write_files(page, tmp_path, *topics.items())
        pipeline = load_config(tmp_path / "pipeline.toml", {}).pipeline
        schema = Schema(pipeline.events, pipeline.stream.labels)
        rows = []
        for topic in topics.values():
            records = consume_all(kafka.bootstrap, topic, at_least=1)
            times, none = [record.timestamp for record in records], [None] * len(records)
            values, headers = [record.value for record in records], [[]] * len(records)
            messages = Messages(
                TopicPartition(topic, 0), range(len(records)), times, none, values, headers, len(records)
            )
            builder = BlockBuilder(schema, pipeline.stream, HoldOut(fraction=0, seed=0))
            rows.append(builder.assemble([Incoming(messages, 0, Position(0))]).columns)
        events, labels = rows
        assert events["outcome"].tolist() == [Outcome.WAITING] * 2
        assert labels["outcome"].tolist() == [Outcome.LABEL]
        assert labels["key_hash"].tolist() == events["key_hash"].tolist()[1:]


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

    def test_what_a_serializer_writes_can_be_read(self, registry, kafka, make_topic, consume_all, tmp_path):
        (block,) = (each for each in BLOCKS if each.mark("run") == "kafka avro")
        topic, at = make_topic(), ("http://localhost:8081", registry.url)
        run(changed(self.script(block, kafka, topic), at), tmp_path)
        write_files(block.page, tmp_path, at)
        pipeline = load_config(tmp_path / "pipeline.toml", {}).pipeline
        schemas = writer_schemas(pipeline.stream)
        (record,) = consume_all(kafka.bootstrap, topic, at_least=1)
        decoded = make_format(pipeline.stream, Schema(pipeline.events), schemas).decode([record.value])
        schemas.close()
        assert list(decoded.rejects) == []
        assert decoded.columns["feature.count"].tolist() == [0]
        assert decoded.columns["label"].tolist() == [0]

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
