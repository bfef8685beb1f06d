"""The linter of words, and tools/count_hops.py, on a program whose route is known and on a training step."""

import importlib.util
import sys
import threading

import pytest

from tools import check_words
from tools.check_words import Word, load, search
from tools.count_hops import HopCounter, training_steps

CUT = Word("cut", "cuts?|cutters?", "checkpoint", enforced=True, allow=(r"\bcut off\b",), allow_files=("*/film.py",))


def found(word, path, text):
    path.write_text(text, encoding="utf-8")
    return [(each.line, each.text) for each in search([word], [path])]


@pytest.mark.parametrize("enforced", [True, False])
def test_an_enforced_word_fails_and_is_named_with_its_replacement(enforced, tmp_path, monkeypatch, capsys):
    (tmp_path / "words.toml").write_text(
        f'[[word]]\nname = "cut"\npattern = "cuts?"\nuse = "checkpoint"\nenforced = {str(enforced).lower()}\n'
    )
    page = tmp_path / "page.md"
    page.write_text("A restart resumes\nfrom the last cut.\n")
    monkeypatch.setattr(check_words, "WORDS", tmp_path / "words.toml")
    code = check_words.main([str(page)])
    assert (code, capsys.readouterr().out) == ((1, f"{page}:2: cut -> use checkpoint\n") if enforced else (0, ""))


@pytest.mark.parametrize("text", ["the Cut", "last_cut = 1", "CutSettings", "lastCut", "CUTS = 2", "cut_every", "cut2"])
def test_a_word_is_found_in_prose_and_within_identifiers(text, tmp_path):
    assert len(found(CUT, tmp_path / "one.py", text)) == 1


@pytest.mark.parametrize("text", ["cute", "acute", "execute", "CUTE = 1", "AcuteAngle", "cut off by the broker"])
def test_parts_of_other_words_and_what_is_allowed_pass(text, tmp_path):
    assert found(CUT, tmp_path / "one.py", text) == []


def test_a_phrase_is_found_across_the_end_of_a_line(tmp_path):
    word = Word("give way", "gives way", "yield", enforced=True)
    assert found(word, tmp_path / "one.md", "Training gives\nway to requests.") == [(1, "gives\nway")]


def test_files_of_another_kind_and_allowed_ones_pass(tmp_path):
    assert found(CUT, tmp_path / "film.py", "cut") == []
    assert found(CUT, tmp_path / "image.png", "cut") == []
    assert found(Word("cut", "cut", "checkpoint", enforced=True, where="docs"), tmp_path / "one.py", "cut") == []


def test_the_list_loads_and_its_names_are_unique():
    words = load()
    assert len({word.name for word in words}) == len(words)
    assert all(word.pattern == word.pattern.lower() for word in words), "it is searched in lower case first"
    assert [match for word in words for match in word.find("")] == []


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
