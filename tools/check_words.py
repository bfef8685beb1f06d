"""Find the words of tools/words.toml, which are not written here any more, and say what to write instead.

    python tools/check_words.py                exit code 1 where an enforced word is found
    python tools/check_words.py --all          count every word, enforced or not
    python tools/check_words.py --word cut     print where one word is found, enforced or not

Paths that follow are read instead of the files of the repository.
"""

import argparse
import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "tools" / "words.toml"
LEFT_OUT = {"tools/words.toml", "tools/check_words.py", "tests/test_tools.py"}  # they have to name the words
SHOWN = ("*.json", "*.svg", "*.txt", "*.tpl", "*.env.example")
CODE = ("*.py", "*.html", "*.js", "*.css", "*.toml", "*.yaml", "*.yml", "*Makefile", "*Dockerfile", ".ci/run", *SHOWN)
FILES = {"code": CODE, "docs": ("*.md",), "both": (*CODE, "*.md")}

# A word begins and ends where one does in prose, in snake_case, in CamelCase and in UPPER_CASE.
BEGIN = r"(?:(?<![A-Za-z])|(?<=[a-z0-9])(?=[A-Z]))"
END = r"(?:(?<=[A-Z])(?![A-Za-z])|(?<![A-Z])(?![a-z]))"


@dataclass(frozen=True)
class Word:
    """An entry of words.toml, which explains the fields."""

    name: str
    pattern: str
    use: str
    enforced: bool
    where: Literal["code", "docs", "both"] = "both"
    allow: Sequence[str] = ()
    allow_files: Sequence[str] = ()

    @cached_property
    def expressions(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The pattern in lower case, and between the borders of a word, in either case."""
        pattern = self.pattern.replace(" ", r"\s+")
        return re.compile(pattern), re.compile(f"{BEGIN}(?i:{pattern}){END}")

    def is_for(self, path: str) -> bool:
        """Return whether the files of this path are searched for it."""
        allowed = any(fnmatch.fnmatchcase(path, glob) for glob in self.allow_files)
        return not allowed and any(fnmatch.fnmatchcase(path, glob) for glob in FILES[self.where])

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield where it is found in a text, except within what `allow` matches."""
        anywhere, words = self.expressions
        if not anywhere.search(text.lower()):  # 30 times as fast
            return
        found = list(words.finditer(text))
        allowed = [each.span() for one in self.allow if found for each in re.finditer(one, text, re.IGNORECASE)]
        for each in found:
            if not any(begin <= each.start() < end for begin, end in allowed):
                yield each


class Found(NamedTuple):
    """A word at a line of a file."""

    path: str
    line: int
    text: str
    word: Word


def load() -> list[Word]:
    """Return the words of words.toml; raises TypeError when an entry lacks a field or has an unknown one."""
    entries = tomllib.loads(WORDS.read_text(encoding="utf-8"))["word"]
    return [Word(**entry) for entry in entries]


def files() -> list[Path]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for name in names if name and name not in LEFT_OUT and (path := ROOT / name).is_file()]


def search(words: Sequence[Word], paths: Iterable[Path]) -> Iterator[Found]:
    """Yield each occurrence of each word, file by file."""
    for path in paths:
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
        if searched := [word for word in words if word.is_for(name)]:
            text = path.read_text(encoding="utf-8")
            found = [Found(name, text.count("\n", 0, m.start()) + 1, m[0], w) for w in searched for m in w.find(text)]
            yield from sorted(found, key=lambda each: each.line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    known = load()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="count every word")
    parser.add_argument("--word", choices=[each.name for each in known], metavar="NAME", help="print one word")
    parser.add_argument("paths", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    words = [word for word in known if options.all or word.name == options.word or (word.enforced and not options.word)]
    found = list(search(words, [path.resolve() for path in options.paths] or files()))
    if options.all:
        for word in words:
            paths = [each.path for each in found if each.word is word]
            state = "enforced" if word.enforced else "ready" if not paths else ""
            print(f"{len(paths):6} in {len(set(paths)):3} files  {state:8}  {word.name} -> use {word.use}")
        return 0
    for each in found:
        print(f"{each.path}:{each.line}: {' '.join(each.text.split())} -> use {each.word.use}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
