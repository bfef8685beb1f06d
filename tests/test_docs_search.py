"""The search of the docs site, in a browser: what somebody types leads to the page that answers it."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BOX = ".md-search__input"
RESULTS = ".md-search-result__link"

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        """Requests are not reported."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def tab(browser, site):
    """A page of the site with its search open."""
    tab = browser.new_page()
    tab.goto(f"{site}/index.html")
    tab.evaluate("document.querySelector('#__search').click()")
    yield tab
    tab.close()


def found(tab, typed):
    """Return the titles of the first five results: pages, each followed by its sections."""
    for text, state in (("", "detached"), (typed, "attached")):  # the results of another test go first
        tab.fill(BOX, text)
        tab.press(BOX, "End")  # the page listens to keys
        tab.wait_for_selector(RESULTS, state=state, timeout=60_000)
    titles = "links => links.slice(0, 5).map(link => link.querySelector('h1, h2')?.textContent ?? '')"
    return list(tab.eval_on_selector_all(RESULTS, titles))


@pytest.mark.parametrize(
    ("typed", "heading"),
    [
        ("no Kafka broker can be reached at localhost:9092", "no Kafka broker can be reached at ...: ..."),
        # Names in quotation marks are left out, as docs/README.md asks: pages with examples are full of them.
        ("topic does not exist on localhost:9092; create it", 'topic "..." does not exist on ...; create it, ...'),
        (
            "serving.port = 8000 is taken on 127.0.0.1: stop the program that has it",
            "serving.port = ... is taken on ...: stop the program that has it, ...",
        ),
        ("checkpoint 12 was made under another [schema]", "checkpoint ... was made under another [schema]"),
        (
            "no version has passed the gate since 14:02",
            "no version has passed the gate since ...: ...; serve one by hand, or check the events since then",
        ),
        ("another learner is at work in /home/you/parcels/var", "another learner is at work in ..."),
        ("no module named my_model", "no module named ..."),
    ],
)
def test_the_first_result_of_a_common_error_is_its_fix(tab, typed, heading):
    assert found(tab, typed)[:2] == ["Troubleshoot", heading]


@pytest.mark.parametrize(
    ("typed", "title"),
    [
        ("avro", "Avro, Protobuf and Schema Registry"),
        ("late labels", "Late labels"),
        ("fraud", "Late labels"),
        ("gpu", "GPUs"),
        ("unlearn", "Undo: unlearn events"),
    ],
)
def test_a_word_leads_to_its_guide_first(tab, typed, title):
    assert found(tab, typed)[0] == title


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("the Kafka broker at localhost:9092 does not answer", "the Kafka broker at ... does not answer"),
        ("no version can be served yet", "no version can be served yet"),
        ("the model fails on a single event", "the model fails on a single event, ..."),
        ("restore a checkpoint", "How do I restore a checkpoint?"),
        ("GDPR delete customer", "How do I erase a person's data (GDPR)?"),
        ("log level json", "How do I raise the log level, or get JSON logs?"),
    ],
)
def test_what_is_typed_leads_to_its_answer(tab, typed, expected):
    assert expected in found(tab, typed)
