"""Hooks of MkDocs: a page may link to files outside docs/, as it does on GitHub.

The pages of `PAGES` become pages of the site. Any other file that a page links to is copied to `files/`, as text.
`BOOST` weights pages in the search.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages at the root of the repository, and where the site has them: nav of mkdocs.yml names the latter."""
SOURCES = {uri: name for name, uri in PAGES.items()}

BOOST = {
    "operate/troubleshoot.md": 2.0,
    "faq.md": 1.5,
    "operate/": 1.5,
    "adr/": 0.3,
    "benchmarks.md": 0.3,
    "reference/python-api.md": 0.3,
    "changelog.md": 0.3,
    "contributing.md": 0.3,
}
"""The weight of pages in the search, by the beginning of their path; the first that fits counts, else 1. Long pages
repeat the words of an error more often than the page with its fix."""

TARGET = re.compile(r'(\]\(|\b(?:href|src|srcset)=")([^)\s"#]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root to the site."""
    for name, uri in PAGES.items():
        files.append(_generated(config, uri, ROOT / name))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with its links to other files of the repository as links within the site."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for path, boost in BOOST.items() if uri.startswith(path)), 1.0)}
    source = SOURCES.get(uri, f"docs/{uri}")

    def within_site(found: re.Match[str]) -> str:
        start, link = found.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if "://" in link or not (ROOT / path).is_file():
            return found[0]  # left to MkDocs, which warns about what leads nowhere
        return start + posixpath.relpath(_uri(path, files, config), posixpath.dirname(uri) or ".")

    return TARGET.sub(within_site, markdown)


def _uri(path: str, files: Files, config: MkDocsConfig) -> str:
    """Return where the site has a file of the repository, after a copy of it where it has none yet."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    uri = f"files/{path}.txt"  # a browser shows it, whatever its suffix was
    if files.get_file_from_path(uri) is None:
        files.append(_generated(config, uri, ROOT / path))
    return uri


def _generated(config: MkDocsConfig, uri: str, path: Path) -> File:
    return File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED)
