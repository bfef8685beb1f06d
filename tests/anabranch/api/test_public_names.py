"""The names of `anabranch` and their signatures change only with its version."""

import importlib
import inspect

import pytest

import anabranch

NAMES = {
    "AnabranchError": {"": "an error"},
    "Client": {
        "": "(url, token='', *, model=None, schema=None, timeout=60.0, ca=None)",
        "close": "()",
        "predict": "(data)",
    },
    "Learner": {
        "": "(model, schema, strategy='er', optimizer='adamw', replay=None, task=None, seed=0, settings=None)",
        "close": "()",
        "learn": "(data)",
        "load": "(path)",
        "measures": "()",
        "model": "property",
        "predict": "(data)",
        "save": "(path)",
    },
    "Model": {"": "(version, deployment)", "forward": "(*features, **named)", "predict": "(data)"},
    "Pipeline": {
        "": "(config)",
        "backtest": "(data, *, every=None, label_time=None)",
        "client": "(timeout=60.0)",
        "from_toml": "(path='pipeline.toml', assignments=())",
        "load": "(version='served')",
        "run": "()",
        "schema": "property",
        "settings": "property",
        "start": "()",
        "status": "()",
        "stop": "()",
    },
    "ReplayBuffer": {
        "": "(capacity, schema=None, admission='reservoir', sampling='uniform', path=None, seed=0, settings=None)",
        "add": "(data)",
        "as_dataset": "(batch_size=None)",
        "close": "()",
        "sample": "(n)",
        "save": "()",
    },
    "Schema": {"": "(settings)", "infer": "(data, label, *, key=None)"},
    "backtest": {
        "": "(data, model, schema, strategy='er', optimizer='adamw', replay=None, task=None, seed=0, settings=None, *, "
        "every=None, label_time=None)"
    },
    "load": {"": "(source, version='served', *, pipeline=None)"},
}
"""By name of the API: the constructor or function, as the empty name, and methods that it does not inherit."""


def signature(member):
    found = inspect.signature(member)
    parameters = [each.replace(annotation=each.empty) for each in found.parameters.values() if each.name != "self"]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def test_the_public_names_and_signatures_are_frozen():
    found = {}
    for name in anabranch.__all__:
        member = getattr(anabranch, name)
        is_class, is_error = isinstance(member, type), isinstance(member, type) and issubclass(member, Exception)
        found[name] = {"": "an error" if is_error else signature(member)}
        for each in vars(member) if is_class and not is_error else ():
            if not each.startswith("_"):
                is_property = isinstance(vars(member)[each], property)
                found[name][each] = "property" if is_property else signature(getattr(member, each))
    assert found == NAMES


def test_each_name_is_listed_and_documented():
    assert set(anabranch.__all__) <= set(dir(anabranch))
    for name in anabranch.__all__:
        assert inspect.getdoc(getattr(anabranch, name)), name
    with pytest.raises(AttributeError, match="Lerner"):
        _ = anabranch.Lerner
    assert importlib.import_module("anabranch.api").__doc__
