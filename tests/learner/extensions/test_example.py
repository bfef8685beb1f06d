"""The extension of docs/extend/extension.md: one folder and one line, and a real learner has it everywhere."""

import contextlib
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from anabranch.core.shutdown import Deadline
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner import assembly
from anabranch.learner.assembly import Assembly, between_steps
from anabranch.learner.checkpoints.format import EXTENSION
from anabranch.learner.extension import Extension
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.status.report import read_report
from anabranch.replay.erasure.erased_events import ByKey
from tests.learner.learner_bench import NAME, ROWS, OpenStream
from tests.learner.learner_spec import learner_spec

PAGE = (Path(__file__).parents[3] / "docs" / "extend" / "extension.md").read_text(encoding="utf-8")
BLOCKS = 6
PERSON = np.uint64(7)
FACTORY = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))\n"


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """Do what the page says."""
    (file,) = re.findall(r"<!-- file: (\S+)\.py -->\n```python\n", PAGE)
    (code, line) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 120
    assert len(line.splitlines()) == 1
    module = ModuleType(file.replace("/", "."))
    exec(compile(code, file, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__.rpartition(".")[0], ModuleType(module.__name__.rpartition(".")[0]))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(assembly, "ALWAYS", eval(f"({line})"))


def columns_of(columns):
    """Half an hour from event to event; the events of one person at offsets that 5 divides."""
    columns["time_ms"] = columns["offset"] * 1_800_000 + 1
    columns["key_hash"] = np.where(columns["offset"] % 5 == 0, PERSON, columns["offset"].astype(np.uint64) + 100)


@contextlib.contextmanager
def learner(folder, schema, blocks):
    (folder / "model_of_example.py").write_text(FACTORY)
    stop = threading.Event()
    stream = OpenStream(schema, blocks, stop)
    stream.change = columns_of
    spec = learner_spec(folder, schema.settings, ModelSettings(factory="model_of_example:build"))
    with contextlib.ExitStack() as stack:
        built = Assembly(spec, stop, None, stack)
        assert built.build(cast("BlockReader", stream))
        built.loop.begin(stop, ())
        yield built


def hours(built):
    built.reporter.report()
    report = read_report(built.spec.state_dir)
    assert report is not None
    counted: dict[str, int] = report.extensions["hours_of_day"]["events"]
    registry: CollectorRegistry = built._registry
    for hour, count in counted.items():
        assert registry.get_sample_value("hours_of_day_events", {"hour": hour}) == count
    return counted


@pytest.mark.process
def test_an_extension_counts_reports_is_in_checkpoints_and_erases(tmp_path, schema, monkeypatch):
    with learner(tmp_path, schema, BLOCKS) as built:
        built.loop.run(built.stop, between_steps(built.loop, built.tasks()))
        counted = hours(built)
        trained = built.loop.ledger.totals.outcomes["trained"]
        assert sum(counted.values()) == trained
        assert set(counted) == {f"{hour:02}" for hour in range(min(24, BLOCKS * ROWS // 2))}
        built.loop.finish(Deadline(built.spec.learner.stop_timeout))
        checkpoints = built.parts.checkpointer._checkpoints
        newest = max(checkpoints.numbers())
        assert PERSON in kept_in(checkpoints, newest)

    with learner(tmp_path, schema, BLOCKS) as built:
        assert hours(built) == counted, "it goes on from the checkpoint"
        erasure = built.parts.erasure
        erasure._log.append(
            [ByKey(time=1.0, by="command", key_hash=f"{PERSON:016x}", up_to={f"{NAME.topic}#0[0]": 9999})]
        )
        built.loop._register_partitions()
        erasure.poll()
        assert sum(hours(built).values()) < trained
        left = hours(built)
        built.loop.finish(Deadline(built.spec.learner.stop_timeout))
        for number in built.parts.checkpointer._checkpoints.numbers():
            assert PERSON not in kept_in(built.parts.checkpointer._checkpoints, number)

    closed = list[str]()
    monkeypatch.setattr(Extension, "close", lambda each: closed.append(each.name))
    with learner(tmp_path, schema, BLOCKS) as built:
        assert hours(built) == left
    assert closed == ["hours_of_day"]


def kept_in(checkpoints, number):
    tensors, _ = checkpoints.open(checkpoints.manifest(number))
    part = tensors.get(f"{EXTENSION}hours_of_day")
    return [] if part is None else part["key_hash"].numpy().tolist()
