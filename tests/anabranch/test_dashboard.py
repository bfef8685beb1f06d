"""The dashboard of a live pipeline, the demo's, in headless Chromium: its figures are those of `/api/status`."""

import contextlib
import json
import re
import signal
import subprocess
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from tests import forkserver
from tests.support.ports import first_free_port
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(300)]

NARROW = 360


@pytest.fixture(scope="module")
def live(browser, tmp_path_factory):
    """The URL of a demo that runs until the module's last test has ended, at a rate that costs a tenth of a core."""
    with forkserver.start(
        ["-m", "anabranch", "demo", "--headless", "--rate", "100", "--port", str(first_free_port())],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path_factory.mktemp("demo"),
        start_new_session=True,
    ) as process:
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if re.search(r" ([5-9]\d\d|\d+,\d+) events", line):
                    break
            (url,) = re.findall(r"the dashboard is at (http://\S+)", "".join(said))
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE_SECONDS)
            process.kill()


@pytest.fixture
def watched(browser):
    """A page that may complain of nothing and ask no other origin."""
    page = browser.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    origins = {urlsplit(url).netloc for url in asked if not url.startswith("data:")}
    page.close()
    assert complaints == []
    assert len(origins) == 1


def shown_with_its_status(page):
    """Return a reply of `/api/status` and the figures that the page has sampled from it.

    The page is given this one reply until it asks again, so that its figures are of no later one.
    """
    taken = httpx.get(urljoin(page.url, "/api/status"), timeout=PATIENCE_SECONDS).json()
    page.route("**/api/status", lambda route: route.fulfill(json=taken))
    for _ in range(3):  # one may have been on its way, and one is sampled when the next is asked for
        with page.expect_response("**/api/status"):
            pass
    figures = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('[data-figure], #sentence')]"
        ".map(node => [node.dataset.figure ?? node.id, node.textContent]))"
    )
    page.unroute("**/api/status")
    if not re.search(r"\d", figures["lag"]):  # the reply was of a learner that is late, on a busy machine
        return shown_with_its_status(page)
    return taken, figures


def number(text):
    return float(re.sub(r"[^0-9.]", "", text))


def test_its_figures_are_those_of_the_status_and_change_by_themselves(live, watched):
    watched.goto(live)
    for figure in ("accuracy_now", "accuracy_old", "accuracy_worst", "accuracy_baseline_old", "freshness_p99"):
        watched.locator(f"[data-figure={figure}]").filter(has_text=re.compile(r"\d")).wait_for(timeout=60_000)
    status, figures = shown_with_its_status(watched)
    learner, serving = status["learner"], status["serving"]
    for window in ("now", "old", "worst"):
        assert number(figures[f"accuracy_{window}"]) == pytest.approx(100 * learner["accuracy"][window], abs=0.051)
    assert number(figures["accuracy_baseline_old"]) == pytest.approx(
        100 * status["baseline"]["accuracy"]["old"], abs=0.051
    )
    assert number(figures["steps"]) == learner["steps"]
    assert number(figures["rows_new"]) == pytest.approx(learner["rates"]["rows_new"], abs=0.51)
    assert number(figures["requests"]) == sum(serving["requests"].values())
    assert figures["errors"] == "0 errors"
    assert number(figures["lag"]) == sum(partition["pending"] for partition in learner["partitions"].values())
    assert figures["versions"].startswith(f"{learner['versions_published']:,} published")
    for name, node in (("freshness_p99_seconds", "freshness_p99"), ("request_p50_seconds", "request_p50")):
        unit = 1000 if figures[node].endswith("ms") else 1
        assert number(figures[node]) == pytest.approx(unit * serving[name], rel=0.01)
    outcomes = {
        row.get_attribute("data-outcome"): number(row.locator("td").first.text_content())
        for row in watched.locator("#outcomes tbody tr").all()
    }
    assert set(outcomes) == set(learner["outcomes"])
    assert figures["sentence"] == status["health"]["sentence"]
    assert status["health"]["state"] == "well"
    url = urljoin(live, "/api/status")
    wait_until(lambda: httpx.get(url, timeout=PATIENCE_SECONDS).json()["learner"]["steps"] > learner["steps"])
    later, changed = shown_with_its_status(watched)
    assert later["learner"]["steps"] > learner["steps"]
    assert number(changed["steps"]) > number(figures["steps"])


def test_everything_on_it_comes_from_the_status_and_the_history(live, watched):
    status = httpx.get(live + "api/status", timeout=PATIENCE_SECONDS).json()
    status["learner"]["outcomes"] = {
        "trained": 11,
        "stored_only": 22,
        "held_out": 33,
        "dead_lettered": 44,
        "skipped": 55,
    }
    status["learner"]["skipped"] = {"unlabelled": 55}
    status["learner"]["partitions"]["events:0"]["pending"] = 4321
    status["learner"]["replay_rows"] = {"device": 5, "disk": 70}
    status["learner"]["replay_bytes"] = {"device": 500_000, "disk": 7_000_000}
    status["learner"]["replay_bounds"] = {"device": 1_000_000, "disk": 20_000_000}
    status["serving"]["requests"] = {"200": 90, "503": 8, "400": 1}
    status["health"] = {"state": "unhealthy", "sentence": "the disk is full", "problems": ["the disk is full"]}
    status["versions"] = [
        {"number": 9, "time": status["time"] - 5, "step": 70, "metrics": {"old": 0.5}, "verdict": "fail",
         "fate": "refused", "reason": "worse on old data"},
    ]  # fmt: skip
    watched.route("**/api/status", lambda route: route.fulfill(body=json.dumps(status)))
    watched.goto(live)
    watched.wait_for_function("() => document.body.dataset.state === 'unhealthy'")
    assert watched.text_content("#sentence") == "The disk is full"
    assert watched.text_content("[data-figure=read]") == "165"
    assert watched.text_content("[data-outcome=skipped]").startswith("skipped: unlabelled55")
    assert watched.get_attribute("[data-outcome=dead_lettered] td", "class") == "num bad"
    assert watched.text_content("[data-figure=errors]") == "9 errors"
    assert "4,321" in watched.text_content("[data-partition='events:0']")
    assert "7 MB of 20 MB" in watched.text_content("[data-tier=disk]")
    rows = watched.locator("#versions tbody tr").all_text_contents()
    assert rows[0].split() == ["95", "s7050.0", "%✕failrefusedPromotePinReject"]
    assert rows[1] == "worse on old data"


def test_the_cursor_follows_the_arrow_keys_and_the_pointer(live, watched):
    watched.goto(live)
    shown_with_its_status(watched)
    chart = watched.locator("#chart")
    chart.focus()
    watched.keyboard.press("Home")
    first = chart.get_attribute("aria-valuetext")
    assert watched.is_visible(".tip")
    for _ in range(300):  # in the first seconds nothing is learned yet, or by the baseline alone
        watched.keyboard.press("ArrowRight")
        text = chart.get_attribute("aria-valuetext")
        if known := re.search(r"^\d\d:\d\d:\d\d: .*now [\d.]+ %", text):
            break
    assert text != first
    assert known, text
    watched.keyboard.press("Escape")
    assert not watched.is_visible(".tip")
    box = chart.bounding_box()
    watched.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 50)
    assert watched.is_visible(".tip")


def test_the_range_is_chosen_with_the_keyboard(live, watched):
    watched.goto(live)
    shown_with_its_status(watched)
    watched.focus("#ranges input:checked")
    watched.keyboard.press("ArrowRight")
    assert watched.evaluate("() => document.querySelector('#ranges input:checked').parentElement.textContent") == "1 h"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_its_texts_have_contrast_in_both_themes(live, watched, scheme):
    watched.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    watched.set_viewport_size({"width": NARROW, "height": 740})
    watched.goto(live)
    shown_with_its_status(watched)
    assert watched.evaluate("() => document.documentElement.scrollWidth") <= NARROW
    contrasts = watched.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}


CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const linear = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const ground = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour === 'rgba(0, 0, 0, 0)' && node.parentElement ? ground(node.parentElement) : colour;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = {};
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement, words = texts.currentNode.textContent.trim();
    if (!words || !node.checkVisibility() || node.closest('script')) continue;
    const style = getComputedStyle(node), fore = node.closest('svg') ? style.fill : style.color;
    const [a, b] = [luminance(fore), luminance(ground(node))].sort((x, y) => y - x);
    found[words] = (a + 0.05) / (b + 0.05);
  }
  return found;
}"""
"""Returns the contrast of every visible text with what is behind it, by the text (WCAG 2, success criterion 1.4.3)."""
