"""`python -m anabranch.testing`: what docs/extend/ shows keeps every promise, and a class that breaks one is found."""

import ast
import itertools
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from anabranch import cli, testing
from anabranch.core import users_code
from anabranch.learner.settings.learner import OptimizerSettings
from anabranch.learner.train.optimizers import OPTIMIZERS
from anabranch.testing.__main__ import main
from anabranch.testing.checks import name_of
from anabranch.testing.optimizers import CHECKS
from tests.support.extend_pages import follow

CODE = """
import torch
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.settings.formats import FormatKind
from anabranch.learner.settings.strategies import StrategyKind
from anabranch.learner.strategies.base import MicroBatchLoss, Strategy, weighted
from anabranch.replay.reservoir.admission import Admission
from anabranch.replay.sampling.base import Choice, Sampler
from tests.support.shelf import Shelf, ShelfFactory

class Drifts(Strategy):
    kind = StrategyKind(replays=False)

    def __init__(self):
        self.seen = 0.0

    def loss(self, forward, new, old, step):
        self.seen += 1.0
        output = forward(new.features)
        losses = self.learner.task.loss(output, new.label_B) * self.seen
        return MicroBatchLoss(weighted(losses, new.weight_B, step.new), output.detach())

class Liar(Strategy):
    def loss(self, forward, new, old, step):
        output = forward(new.features)
        losses = self.learner.task.loss(output, new.label_B)
        return MicroBatchLoss(weighted(losses, new.weight_B, step.new), output.detach())

class Newest(Sampler):
    def sample(self, n, generator):
        return Choice(self._event_table.slots[:n])

class Counting(Admission):
    added = 0

    def priorities(self, candidates):
        found = super().priorities(candidates) / (1 + self.added)
        self.added += 1
        return found

class Raises(JsonFormat):
    def decode(self, values, headers=()):
        if b"" in values:
            raise ValueError("empty")
        return super().decode(values)

class Climbs(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, maximize=True)

class Takes(JsonFormat):
    def __init__(self, schema, delimiter: str = ","):
        super().__init__(schema)

class Keeps(Shelf):
    def erase(self, slots):
        pass

class Unread(Shelf):
    def read_into(self, rows, positions, slots, identity):
        return super().read_into(rows, positions, slots, identity) & False

class Amnesiac(ShelfFactory):
    def open_existing(self, contents):
        return self._new(self.slots)

class Keeper(ShelfFactory):
    kind = Keeps

class NeverRead(ShelfFactory):
    kind = Unread

class Alone:
    pass
"""
numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"conformance_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(name, *options)`: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*arguments):
        code = main([*arguments, "--folder", str(tmp_path)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "kind", "arguments"),
    [
        ("strategy", "SharedReplay", '{"share": 0.4}'),
        ("sampler", "Weekly", '{"days": 7}'),
        ("admission", "FreshClasses", '{"classes": 4, "hours": 24.0}'),
        ("format", "MessagePack", "{}"),
        ("tier", "HostTierFactory", "{}"),
    ],
)
def test_what_a_page_shows_keeps_every_promise(run, tmp_path, page, kind, arguments):
    code, out, err = run(f"{follow(page, tmp_path)}:{kind}", "--args", arguments)
    assert (code, err) == (0, "")
    _, *lines = out.splitlines()
    assert len(lines) >= 3
    assert all(line.strip().startswith(("ok ", "not promised ")) for line in lines)


@pytest.mark.slow
def test_a_tier_that_survives_restarts_keeps_every_promise(run):
    code, out, err = run("tests.support.shelf:ShelfFactory", "--args", '{"most": 4000}')
    assert (code, err) == (0, "")
    assert "not promised" not in out
    assert "ok  a store with it as the primary tier goes on from a checkpoint" in out


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_what_all_promise(name, check):
    check(OptimizerSettings(name=name, lr=0.01))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "promise", "why"),
    [
        ("Drifts", "goes on from a checkpoint bit for bit", "after a restart"),
        ("Liar", "replays what its samples bring", "the losses of old events are missing"),
        ("Newest", "samples follow from contents and step", "two steps have the same sample"),
        ("Counting", "adding again changes nothing", "priorities depend on more"),
        ("Raises", "good events survive bad neighbours", "ValueError: empty"),
        ("Climbs", "lowers the loss", "is lr right?"),
        ("Keeper", "has no row of an erased event", "erased rows are valid"),
        ("NeverRead", "a store with it as a cache has the same samples", "no row was read from it"),
        (
            "Amnesiac",
            "a store with it as the primary tier goes on from a checkpoint",
            "events are others after a restart",
        ),
    ],
)
def test_a_promise_that_is_broken_is_named_with_how(run, module, kind, promise, why):
    code, out, err = run(f"{module}:{kind}")
    assert (code, err) == (1, "")
    (line,) = (line for line in out.splitlines() if line.strip().startswith(f"broken  {promise}: "))
    assert why in line


@pytest.mark.parametrize(
    ("kind", "arguments", "sentence"),
    [
        ("Alone", "{}", "extends none of anabranch.learner.strategies.base.Strategy, "),
        ("Missing", "{}", "has no function or class Missing"),
        ("Takes", '{"sep": ";"}', "stream.format: {module}:Takes has no 'sep'; it takes delimiter"),
        ("Liar", '{"share": 1}', "learner.strategy: {module}:Liar has no 'share'; it takes no arguments"),
        ("Newest", '{"days": 1}', "replay.sampling: {module}:Newest has no 'days'; it takes no arguments"),
        ("Amnesiac", '{"rows": 1}', "replay.tiers.checked: {module}:Amnesiac has no 'rows'; it takes most"),
        ("Amnesiac", '{"bytes": 1}', "refuses tiers.checked.bytes = 1: Input should be greater than or equal to 4096"),
        ("Climbs", '{"momentum": 1}', "learner.optimizer: {module}:Climbs has no 'momentum'; it takes lr"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_sentence(run, module, kind, arguments, sentence):
    code, out, err = run(f"{module}:{kind}", "--args", arguments)
    assert (code, out) == (2, "")
    assert sentence.format(module=module) in err
    assert err.count("\n") == 1


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "python -m anabranch.testing my_code:MyStrategy\n" in capsys.readouterr().out


def test_no_check_needs_pytest():
    files = sorted(Path(testing.__path__[0]).glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert modules
    assert not {name for name in modules if name.partition(".")[0] in ("pytest", "hypothesis", "tests")}


def test_the_command_of_the_page_runs_and_is_in_the_help(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    found = EntryPoint("topics-of", f"{follow('command', tmp_path)}:topics_of", cli.COMMANDS)
    absent = EntryPoint("absent", "absent_module:absent", cli.COMMANDS)
    monkeypatch.setattr(users_code, "entry_points", lambda group: [found, absent][: 2 * (group == found.group)])
    users_code.entry_points_of.cache_clear()
    (tmp_path / "pipeline.toml").write_text(
        'name = "digits"\nstream = {topics = ["clicks", "views"]}\nmodel = {factory = "m:build"}\n'
        'schema = {features = {x = {dtype = "float32"}}, label = {name = "y", classes = 2}}\n'
    )
    assert cli.main(["topics-of", "-c", str(tmp_path / "pipeline.toml")]) == 0
    assert capsys.readouterr().out == "clicks\nviews\n"
    assert cli.main(["--help"]) == 0
    assert "Of the package my_command." in capsys.readouterr().out
    assert cli.main(["absent"]) == 2
    assert "absent: no module named absent_module" in capsys.readouterr().err
    users_code.entry_points_of.cache_clear()
