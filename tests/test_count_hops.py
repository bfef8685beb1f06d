"""tools/count_hops.py counts changes of module, in a program whose route is known and in a training step."""

import importlib.util
import sys
import threading

import pytest

from tools.count_hops import HopCounter, training_steps

ONE = """
import two

def outer():
    two.inner()
    two.inner()
    local()
    two.inner()

def local():
    len("a call of a function in C")
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The module `one` of a package, which calls another one of it, and the package's folder."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "one.py").write_text(ONE)
    (folder / "two.py").write_text("def inner():\n    pass\n")
    for name in ("two", "one"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module, folder


def test_a_hop_is_a_call_of_another_module_than_the_one_before(toy):
    module, folder = toy
    with HopCounter([folder]) as counter:
        module.outer()
        counter.end_step()
        module.local()
        counter.end_step()
    first, second = counter.steps
    assert first.called == [f"package/{name}" for name in ("one", "two", "two", "one", "two")]
    assert first.route == [f"package/{name}" for name in ("one", "two", "one", "two")]
    assert (first.hops, first.hops_with_returns, first.modules) == (3, 6, 2)
    assert (second.called, second.hops) == (["package/one"], 0)


def test_other_threads_and_other_modules_are_not_counted(toy):
    module, folder = toy
    with HopCounter([folder / "elsewhere"]) as elsewhere:
        module.outer()
        elsewhere.end_step()
    with HopCounter([folder]) as counter:
        thread = threading.Thread(target=module.outer)
        thread.start()
        thread.join()
        counter.end_step()
    assert elsewhere.steps[0].called == counter.steps[0].called == []


def test_a_training_step_is_counted_from_its_batch_to_its_end(tmp_path):
    steps = training_steps(3, tmp_path)
    assert len(steps) == 3
    for step in steps:
        assert step.route[0] == "anabranch/learner/loop/training_loop"
        assert {
            f"anabranch/{each}" for each in ("learner/loop/training_loop", "learner/train/trainer", "replay/store")
        } <= set(step.called)
        assert step.hops <= step.hops_with_returns < 2 * len(step.called)
