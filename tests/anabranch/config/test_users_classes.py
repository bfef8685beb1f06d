"""Settings that name a class: ours by name, the user's by import string or entry point, and a sentence for others."""

import itertools
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from anabranch.command import ConfigFile
from anabranch.commands.config import check_config
from anabranch.config.loader import Config, load_config
from anabranch.core import users_code
from anabranch.core.errors import SettingsError
from anabranch.core.users_code import build, name_of

SETTINGS = """
name = "digits"
[stream]
topics = ["events"]
[schema.features]
x = {dtype = "float32", shape = [64]}
[schema.label]
name = "y"
classes = 10
[model]
factory = "my_model:build"
"""
CODE = """
from anabranch.ingest.formats.base import Format
from anabranch.ingest.settings.formats import FormatKind
from anabranch.learner.settings.strategies import StrategyKind
from anabranch.learner.strategies.base import Strategy
from anabranch.replay.tiers.tier import TierFactory
import torch

class Mine(Strategy):
    kind = StrategyKind(replays=False, needs_whole=True, copies=3)

class Lines(Format):
    kind = FormatKind(several=True)

class Whole(torch.optim.SGD):
    needs_whole = True

class Rows(TierFactory):
    pass

class Odd(Strategy):
    kind = "replays"

def function():
    pass

class Alone:
    pass
"""
STRATEGY, FORMAT = "anabranch.learner.strategies.base.Strategy", "anabranch.ingest.formats.base.Format"
numbers = itertools.count()
Load = Callable[..., Config]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the config's folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"users_classes_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


@pytest.fixture
def load(tmp_path):
    def load(*assignments):
        (tmp_path / "pipeline.toml").write_text(SETTINGS)
        return load_config(tmp_path / "pipeline.toml", {}, assignments=assignments)

    return load


def test_the_facts_of_a_class_in_the_configs_folder_are_known(load, module):
    pipeline = load(f"learner.strategy={module}:Mine", f"stream.format={module}:Lines").pipeline
    assert (pipeline.learner.strategy.kind.copies, pipeline.stream.format_kind.several) == (3, True)
    assert not pipeline.learner.strategy.kind.replays


def test_a_class_has_the_conflicts_that_its_facts_make(load, module):
    with pytest.raises(SettingsError, match=f'graphs = true does not go with learner.strategy = "{module}:Mine"'):
        load(f"learner.strategy={module}:Mine", "learner.graphs=true")
    with pytest.raises(SettingsError, match=f'optimizer = "{module}:Whole" does not go with learner.sharding = "fsdp"'):
        load(f"learner.optimizer.name={module}:Whole", "learner.sharding=fsdp")
    assert load("learner.optimizer.name=torch.optim:RAdam", "learner.sharding=fsdp")


def test_an_entry_point_of_an_installed_package_is_a_name(load, module, monkeypatch):
    found = EntryPoint("mine", f"{module}:Mine", "anabranch.strategies")
    monkeypatch.setattr(users_code, "entry_points", lambda group: [found][: group == found.group])
    users_code.entry_points_of.cache_clear()
    assert load("learner.strategy=mine").pipeline.learner.strategy.kind.copies == 3
    with pytest.raises(SettingsError, match=r"an entry point of anabranch\.formats"):
        load("stream.format=mine")
    users_code.entry_points_of.cache_clear()


@pytest.mark.parametrize("key", ["learner.strategy", "learner.optimizer.name", "stream.format"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{module}:function", "{module}:function is a function, not a class"),
        ("{module}:Alone", "{module}:Alone does not extend "),
        ("{module}:Missing", "{module}.py has no function or class Missing"),
        ("absent_module:Mine", "no module named absent_module in {folder} or on the Python path"),
        ("Mine", 'an import string such as "my_code:MyClass", or an entry point of anabranch.'),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key(load, module, tmp_path, key, name, sentence):
    known: dict[str, Any] = {"module": module, "folder": tmp_path}
    name = name.format(**known)
    with pytest.raises(SettingsError) as caught:
        load(f"{key}={name}")
    said = str(caught.value)
    assert said.startswith(f"--set {key}: {key} = '{name}': ")
    assert sentence.format(**known) in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            '{{factory = "{module}:Alone", bytes = "1MB"}}',
            "{module}:Alone does not extend anabranch.replay.tiers.tier.T",
        ),
        ('{{factory = "absent_module:Mine", bytes = "1MB"}}', "no module named absent_module in {folder}"),
        ('{{factory = "Mine", bytes = "1MB"}}', "'Mine': write an import string such as "),
        ('{{factory = "{module}:Rows"}}', "replay.tiers.mine.bytes"),
    ],
)
def test_a_tier_that_cannot_be_used_is_one_sentence_with_the_key(load, module, tmp_path, section, sentence):
    known: dict[str, Any] = {"module": module, "folder": tmp_path}
    with pytest.raises(SettingsError) as caught:
        load(f"replay.tiers.mine={section.format(**known)}")
    assert sentence.format(**known) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["disk", "device", "Mine"])
def test_a_tier_needs_a_name_of_its_own(load, module, name):
    with pytest.raises(SettingsError, match="no name of our tiers"):
        load(f'replay.tiers.{name}={{factory = "{module}:Rows", bytes = "1MB"}}')


def test_tiers_are_ordered_as_they_are_written_and_faster_than_ours(load, module):
    tiers = [f'replay.tiers.{name}={{factory = "{module}:Rows", bytes = "1MB", depth = 3}}' for name in ("b", "a")]
    replay = load(*tiers).pipeline.replay
    assert ([*replay.slower], replay.primary) == (["tiers.b", "tiers.a"], "tiers.a")
    assert replay.tiers["a"].model_extra == {"depth": 3}
    replay = load(*tiers, 'replay.disk={bytes = "1MB"}').pipeline.replay
    assert ([*replay.slower], replay.primary) == (["tiers.b", "tiers.a", "disk"], "disk")


def test_config_check_has_the_fault_of_the_key(load, tmp_path):
    load()
    checked = check_config(ConfigFile(tmp_path / "pipeline.toml", ["stream.format=absent_module:Mine"]))
    assert [fault["key"] for fault in checked["faults"]] == ["stream.format"]


def test_a_module_that_fails_is_named_with_its_line(load, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "users_classes_broken.py").write_text("\n\n1 / 0\n")
    with pytest.raises(SettingsError, match=r"importing .*_broken fails: ZeroDivisionError: .*_broken\.py, line 3\)$"):
        load("learner.strategy=users_classes_broken:Mine")


def test_facts_that_are_none_are_refused(load, module):
    with pytest.raises(SettingsError, match=f'"{module}:Odd": its attribute kind is a str, not a StrategyKind'):
        load(f"learner.strategy={module}:Odd")


def test_arguments_for_a_format_of_ours_are_refused(load):
    with pytest.raises(SettingsError, match='format_args are for your own format, and format = "json" takes none'):
        load("stream.format_args={delimiter=';'}")


class Takes:
    def __init__(self, given, delimiter=",", rows=1, strict=False, other=None):
        if delimiter == "":
            raise ValueError("delimiter is empty")
        self.found = 1 // (rows - 3), given, delimiter, strict, other


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sep": ";"}, "stream.format: m:T has no 'sep'; it takes delimiter, rows, strict, other"),
        ({"delimiter": 3}, "stream.format: m:T refuses delimiter = 3: it has to be a string"),
        ({"rows": 0}, "stream.format: m:T refuses rows = 0: it has to be a whole number of at least 1"),
        ({"strict": 1}, "stream.format: m:T refuses strict = 1: it has to be true or false"),
        ({"delimiter": ""}, "stream.format: m:T refuses {'delimiter': ''}: delimiter is empty"),
        ({"rows": 3}, "stream.format: m:T fails with {'rows': 3}: ZeroDivisionError: "),
        ({"given": 3}, "stream.format: m:T has no 'given'"),
    ],
)
def test_arguments_that_do_not_fit_a_class_are_one_sentence(arguments, sentence):
    with pytest.raises(SettingsError) as caught:
        build("stream.format", "m:T", Takes, arguments, 7)
    assert str(caught.value).startswith(sentence)


def test_a_class_gets_what_it_is_given_and_its_arguments():
    assert build("stream.format", "m:T", Takes, {"delimiter": ";", "other": [1]}, 7).found == (-1, 7, ";", False, [1])


def test_a_checkpoint_has_the_import_string_of_a_class_that_is_not_ours():
    assert name_of(Takes) == f"{__name__}:Takes"
    assert name_of(Config) == "Config"
