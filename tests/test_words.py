"""The linter of words: what it finds, what it says, and what it lets pass."""

import pytest

from tools import check_words
from tools.check_words import Word, load, search

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
