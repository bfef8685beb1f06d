"""The dashboard: the page as HTTP sends it, what feeds it, and how Chromium shows it in every state."""

import base64
import dataclasses
import hashlib
import itertools
import os
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import torch
from pydantic import ValidationError

from anabranch.learner.device.reading import DeviceReport
from anabranch.learner.object_storage.fleet import FleetRollout, FleetServer, RolloutFile, read_servers, write_server
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.status.report import (
    BackfillReport,
    BaselineReport,
    ClassReport,
    DeviceHealthReport,
    LabelReport,
    LearnerReport,
    MeasureReport,
    PartitionReport,
    SliceReport,
    UndoReport,
    write_report,
)
from anabranch.serving.dashboard.status import SERIES
from anabranch.serving.fleet import overview
from anabranch.serving.rollout.commands import COMMANDS
from anabranch.serving.settings import ServingSettings

TOKENS = {"read": "lesen", "admin": "verwalten"}


def learner_report(**changes):
    members: dict[str, Any] = {"pid": 1, "generation": 1, "started": time.time() - 60, "time": time.time(), "steps": 7}
    return LearnerReport(**members | changes)


@pytest.mark.slow
def test_the_page_is_one_file_under_a_policy_that_lets_in_nothing_else(numbers, served):
    with served(numbers, ready=False) as server:
        page = httpx.get(server.url + "/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-cache"
        assert page.headers["x-frame-options"] == "DENY"
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        for tag, directive in (("style", "style-src"), ("script", "script-src")):
            (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert policy[directive] == f"'sha256-{digest}'"
        assert re.findall(r"(?:src|href)=\"(?!#|data:|api/|metrics|openapi.json)", page.text) == []
        assert " style=" not in page.text
        again = httpx.get(server.url + "/", headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == page.headers["etag"]


@pytest.mark.slow
def test_the_page_needs_no_token_and_its_figures_do(numbers, served):
    with served(numbers, ready=False, tokens=TOKENS) as server:
        assert httpx.get(server.url + "/").status_code == 200
        for path in ("/api/status", "/api/history"):
            assert httpx.get(server.url + path).status_code == 401
            assert httpx.get(server.url + path, headers={"Authorization": "Bearer lesen"}).status_code == 200


@pytest.mark.slow
def test_status_lists_the_versions_with_what_became_of_them(numbers, served, eventually, tmp_path):
    numbers.publish(1)
    with served(numbers) as server:
        numbers.publish(2)
        eventually(lambda: server.report().version == 2)
        numbers.publish(3, verdict="fail")
        misfit = numbers.publish(4, weights={"other": torch.zeros(3)})
        torn = Path(shutil.copytree(misfit, tmp_path / "torn"))
        (torn / "manifest.json").write_text("{")
        torn.rename(misfit.with_name("5"))  # torn from the start: serving reads a manifest once
        eventually(lambda: {4, 5} <= set(server.report().refused))
        versions = httpx.get(server.url + "/api/status").json()["versions"]
        fates = {version["number"]: (version["verdict"], version["fate"]) for version in versions}
        assert list(fates) == [5, 4, 3, 2, 1]
        assert fates == {
            5: (None, "refused"),
            4: ("inconclusive", "refused"),
            3: ("fail", "refused"),
            2: ("inconclusive", "served"),
            1: ("inconclusive", "swapped"),
        }
        assert "manifest.json cannot be read" in versions[0]["reason"]
        for number in range(6, 40):
            numbers.publish(number)
        eventually(lambda: server.report().version == 39)
        versions = httpx.get(server.url + "/api/status").json()["versions"]
        listed = [version["number"] for version in versions]
        assert listed[:6] == list(range(39, 33, -1)), "the newest"
        assert {5, 4, 3} <= set(listed), "those that were refused"
        assert listed == sorted(listed, reverse=True)
        assert len(listed) < 15, "the others are thinned"
        assert {version["fate"] for version in versions if version["number"] > 5} <= {"served", "swapped", "superseded"}


@pytest.mark.slow
def test_status_names_what_was_pinned_and_what_was_rolled_back(numbers, served, eventually):
    for number in (1, 2):
        numbers.publish(number)
    numbers.publish(3, verdict="fail", reasons=["worse on old events"])

    def fates():
        versions = httpx.get(server.url + "/api/status").json()["versions"]
        return {version["number"]: (version["fate"], version["reason"]) for version in versions}

    with served(numbers) as server:
        assert httpx.post(server.url + "/api/versions/3:promote").status_code == 200
        assert httpx.post(server.url + "/api/versions/3:reject").status_code == 200
        assert fates()[3] == ("rolled back", "worse on old events")
        assert httpx.post(server.url + "/api/versions/1:pin").status_code == 200
        assert fates()[1][0] == "pinned"


@pytest.mark.slow
def test_history_begins_with_the_server_and_returns_only_new_points(numbers, served, eventually, tmp_path):
    numbers.publish(1)
    (tmp_path / "baseline").mkdir()
    write_report(numbers.deployment.state_dir, learner_report(accuracy={"now": 0.5}, rates={"steps": 2.0}))
    write_report(tmp_path / "baseline", learner_report(accuracy={"old": 0.25}))
    with served(numbers, baseline=str(tmp_path / "baseline")) as server:

        def history(**params):
            return httpx.get(server.url + "/api/history", params=params).json()

        points = eventually(lambda: (found := history()) and len(found["time"]) > 1 and found)
        assert points["step"] == 1
        assert points["time"] == sorted(points["time"])
        assert sorted(points["series"]) == sorted(SERIES)
        assert [(event["kind"], event["text"]) for event in points["events"]] == [("swap", "Version 1 was swapped in.")]
        assert {len(column) for column in points["series"].values()} == {len(points["time"])}
        assert points["series"]["now"][0] == 0.5
        assert points["series"]["old"][0] is None
        assert points["series"]["baseline_old"][0] == 0.25
        assert history(since=points["time"][-1])["time"][0] == points["time"][-1]
        assert len(history(step=120)["time"]) <= 2
        assert httpx.get(server.url + "/api/status").json()["baseline"]["accuracy"] == {"old": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize("query", ["step=7", "since=nan", "since=-1", "step=x", "since=1e9"])
def test_a_wrong_question_to_the_history_is_a_400(numbers, served, query):
    with served(numbers, ready=False) as server:
        response = httpx.get(f"{server.url}/api/history?{query}")
        assert response.status_code == 400
        assert "step one of (1, 10, 120)" in response.json()["error"]


def sentence(page):
    said: str = page.text_content("#sentence")
    return said


def await_sentence(page, start):
    page.wait_for_function("s => document.getElementById('sentence').textContent.startsWith(s)", arg=start)


def test_in_a_browser_a_start_an_unhealthy_part_and_a_lost_server_are_shown(browser, numbers, served):
    page = browser.new_page()
    with served(numbers, ready=False) as server:
        page.goto(server.url)
        await_sentence(page, "No learner has reported yet")
        assert "not reported yet" in page.text_content("#chart")
        numbers.publish(1)
        write_report(numbers.deployment.state_dir, learner_report(problems=["the broker is gone", "the disk is full"]))
        await_sentence(page, "2 things are wrong.")
        assert page.locator("#problems li").all_text_contents() == [
            "Learner: the broker is gone",
            "Learner: the disk is full",
        ]
        write_report(numbers.deployment.state_dir, learner_report(accuracy={"now": 0.5, "old": 0.25}))
        await_sentence(page, "All is well.")
        assert page.locator("#problems li").count() == 0
    await_sentence(page, "The server does not answer.")
    assert re.match(r"What is below is \d+ s old", page.text_content("#meta"))
    assert page.get_attribute("body", "data-state") == "lost"
    page.wait_for_function("() => Number(getComputedStyle(document.getElementById('main')).opacity) < 0.5")
    page.close()


def test_in_a_browser_the_token_is_asked_for_and_kept_for_the_tab_alone(browser, numbers, served):
    numbers.publish(1)
    write_report(numbers.deployment.state_dir, learner_report())
    with served(numbers, tokens=TOKENS) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("#token-form:visible")
        page.keyboard.type("falsch")  # the field has the focus
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.getElementById('refusal').textContent.includes('does not know')")
        page.fill("#token", "lesen")
        page.keyboard.press("Enter")
        await_sentence(page, "All is well.")
        assert not page.is_visible("#token-form")
        assert page.evaluate("[sessionStorage.token, localStorage.length, document.cookie]") == ["lesen", 0, ""]
        page.reload()
        await_sentence(page, "All is well.")
        assert "token" not in page.url
        page.close()


def test_in_a_browser_the_head_has_the_links_of_the_settings(browser, numbers, served):
    links = {"Docs": "https://docs.example.com/", "<b>Grafana": "http://localhost:3000/d/a?b=1&c='"}
    with served(numbers, ready=False, links=links) as server:
        assert httpx.get(server.url + "/api/status").json()["links"] == links
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "No learner has reported yet")
        shown = "links => Object.fromEntries(links.map(link => [link.textContent, link.getAttribute('href')]))"
        assert page.eval_on_selector_all("#links a", shown) == links
        page.close()


@pytest.mark.parametrize("address", ["javascript:alert(1)", "data:text/html,x", "//example.com", "https://a b", ""])
def test_a_link_is_an_address_of_the_web(address):
    with pytest.raises(ValidationError, match="must begin with http"):
        ServingSettings.model_validate({"links": {"Docs": address}})


def test_in_a_browser_regression_shows_the_error(browser, numbers, served):
    numbers.publish(1)
    write_report(numbers.deployment.state_dir, learner_report(error={"now": 3.25, "old": 4.5}))
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "All is well.")
        assert page.text_content("#hero-title") == "Absolute error"
        assert page.text_content("[data-figure=accuracy_now]") == "3.25"
        assert page.locator("[data-line=worst]").count() == 0
        page.close()


def test_in_a_browser_the_head_says_how_the_model_compares_and_how_far_it_is_behind(browser, numbers, served):
    numbers.publish(1)
    constant = BaselineReport(
        rule="always answering 0",
        scores={"now": 0.994, "overall": 0.9938, "old": 0.9945},
        comparison="worse than always answering 0 by 0.2 points",
        worse=True,
    )
    last = BaselineReport(
        rule="the last label", scores={"now": 0.988}, comparison="better than the last label by 0.4 points"
    )
    report = learner_report(
        outcomes={"trained": 5000},
        accuracy={"now": 0.992, "old": 0.9921, "worst": 0.0},
        baselines={"constant": constant, "last_label": last},
        lag_seconds=425.0,
    )
    write_report(numbers.deployment.state_dir, report)
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(
            page, "What is served is 7 minutes behind the stream. The model is worse than always answering 0."
        )
        facts = page.text_content("#meta")
        assert "now worse than always answering 0 by 0.2 points, better than the last label by 0.4 points" in facts
        assert "behind" not in facts, "the sentence says it"
        lags = "[3, 59, 61, 425, 7300, 2e5].map(s => behind({ lag_seconds: s, lag_age_seconds: 1 }, {}))"
        words = ["less than 10 seconds", "59 seconds", "1 minute", "7 minutes", "2 hours", "2 days"]
        assert page.evaluate(lags) == [f"{each} behind" for each in words]
        late = "reads => behind({ lag_seconds: 0, backfill: { done: !reads } }, { freshness_p50_seconds: 61 })"
        assert page.evaluate(late, False) == "1 minute behind"
        assert page.evaluate(late, True) == "less than 10 seconds behind", "a history is old by its nature"
        assert page.evaluate("behind({ lag_seconds: 0, lag_age_seconds: 11 }, {})") == "how far behind is not known"
        assert "always answering 0: 0.994" in page.text_content("#legend")
        assert page.locator("#classes").is_hidden()
        assert page.locator("#slices").is_hidden()
        windows = {"now": 0.0312, "held_out": 0.24}
        lower, upper, least = ({each: value * factor for each, value in windows.items()} for factor in (0.5, 2, 0.25))
        measure = MeasureReport(windows, lower, upper, least)
        classes = {"0": {"support": 4806, "found": 4800, "answered": 4990, "recall": 0.9988, "precision": 0.9619}}
        classes["fraud"] = {"support": 194, "found": 1, "answered": 2, "recall": 1 / 194, "precision": 0.5}
        classes["chargeback"] = {"support": 0, "found": 0, "answered": 0, "recall": None, "precision": None}
        slices = {"country = DE": SliceReport(rows=900, accuracy=0.99, constant=0.98, compared=True, drop=0.001)}
        slices["amount: quarter 1"] = SliceReport(rows=12, values="up to 9.5", accuracy=0.75)
        slices["country = FR"] = SliceReport(
            rows=60, accuracy=0.9, constant=0.95, compared=True, drop=0.08, upper=0.1, worse=True
        )
        slices = msgspec.to_builtins(slices)
        status = httpx.get(server.url + "/api/status").json()
        status["task"] = "classification"
        status["learner"] |= {
            "measure": "average_precision",
            "measures": {"average_precision": msgspec.to_builtins(measure)},
            "newest_classes": classes,
            "slices": slices,
        }
        status["versions"][0] |= {
            "metrics": {"average_precision": 0.24, "old": 0.98},
            "constant": {"average_precision": 0.06, "old": 0.99},
        }
        status["health"]["silent"] = False
        page.route("**/api/status", lambda route: route.fulfill(json=status))
        page.locator("#hero-title").filter(has_text="Average precision").wait_for()
        facts = page.text_content("#meta")
        assert "held out average precision 0.24, constant 0.06" in facts
        assert "now by accuracy worse than always answering 0 by 0.2 points" in facts
        assert page.text_content("[data-figure=accuracy_measure_now]") == "0.0312"
        assert "held-out events, 0.12 to 0.48; constant: 0.06" in page.text_content("#legend")
        assert "now 99.2 %" in page.text_content("#training")
        assert page.text_content("[data-figure=worst]") == "worst: fraud, 1 of 194 found"
        rows = [row.locator("th, td").all_text_contents() for row in page.locator("#classes-rows tr").all()]
        assert rows == [
            ["fraud", "194", "50.0 %", "0.5 %"],
            ["0", "4,806", "96.2 %", "99.9 %"],
            ["chargeback", "0", *2 * ["\N{EN DASH}"]],
        ]
        rows = [row.locator("th, td").all_text_contents() for row in page.locator("#slices-rows tr").all()]
        assert rows == [
            ["country = FR", "60", "90.0 %", "95.0 %", "0.0800"],
            ["amount: quarter 1 (up to 9.5)", "12", "75.0 %", *2 * ["\N{EN DASH}"]],
            ["country = DE", "900", "99.0 %", "98.0 %", "0.0010"],
        ]
        assert page.text_content("[data-figure=slices-few]") == "1 of 3 not compared"
        assert page.text_content("#score-name") == "Average precision"
        cell = page.locator("#versions [data-hint]").first
        assert cell.text_content() == "0.24"
        assert cell.get_attribute("data-hint") == "One answer for all these events has 0.06."
        page.close()


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 800), (390, 844)])
def test_in_a_browser_nothing_is_small_clipped_or_overlapped(browser, numbers, served, eventually, width, height):
    numbers.publish(1)
    partition = PartitionReport(start=0, end=9, finished=3, passed=0, gaps=0, removed=0, pending=6, trained_through=2)
    constant = BaselineReport(
        rule="always answering 0", scores={"now": 0.994, "old": 0.9945}, comparison="worse than always answering 0"
    )
    found = ClassReport(support=1234, found=1200, answered=1300, recall=0.9724, precision=0.9231)
    report = learner_report(
        outcomes={"trained": 5000, "stored_only": 10, "held_out": 200, "skipped": 3, "dead_lettered": 1},
        accuracy={"now": 0.992, "old": 0.9921, "worst": 0.0},
        baselines={"constant": constant},
        newest_classes={"fraud": found, "chargeback": found},
        slices={
            "amount: quarter 1": SliceReport(rows=12345, values="up to 9.5", accuracy=0.75, constant=0.71, drop=0.08)
        },
        lag_seconds=425.0,
        partitions={"orders-of-the-whole-company:0": partition, "events:1": partition},
        rates={"rows_new": 12345.6, "rows_replay": 37037.0, "steps": 123.4},
        replay_rows={"device": 50, "disk": 700},
        replay_bytes={"device": 5_000, "disk": 70_000},
        replay_bounds={"device": 10_000, "disk": 140_000},
        warnings=["on new events the model is worse than the last label by 1.9 points"],
    )
    write_report(numbers.deployment.state_dir, report)
    with served(numbers, baseline=str(numbers.deployment.state_dir)) as server:
        numbers.publish(2, reasons=["1999 of 3500 held-out events, fewer than gate.min_rows"])
        eventually(lambda: server.report().version == 2)
        numbers.publish(3, verdict="fail", reasons=["worse on old events by more than gate.tolerance"])
        status = eventually(
            lambda: (
                (found := httpx.get(server.url + "/api/status").json())["versions"][0]["fate"] == "refused" and found
            )
        )
        status["health"] = {"state": "attention", "sentence": "A long sentence. " * 7, "problems": [], "silent": False}
        status["task"] = "classification"
        status["serving"] |= {"freshness_p50_seconds": 90.5, "freshness_p99_seconds": 754.0}
        page = browser.new_page(viewport={"width": width, "height": height})
        page.route("**/api/status", lambda route: route.fulfill(json=status))
        page.goto(server.url)
        page.locator("#meta", has_text="7 minutes behind").wait_for()
        for table in ("#classes", "#slices"):
            page.wait_for_selector(table, state="visible")
        assert page.evaluate(LAYOUT) == {"small": [], "clipped": [], "overlapping": [], "unreachable": []}
        if width == 1440:
            bottoms = page.eval_on_selector_all(
                ".tiles .remark", "all => all.map(e => e.getBoundingClientRect().bottom)"
            )
            assert len(bottoms) == 5
            assert max(bottoms) <= height, "the first fold has the small charts"
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for kind, colours in page.evaluate(COLOURS).items():
                assert too_near(colours) == [], f"{kind} in {scheme}"
            if os.environ.get("SHOTS"):
                page.screenshot(path=f"{os.environ['SHOTS']}/{width}-{scheme}.png", full_page=True)
        act(page, 1, "promote")
        assert page.evaluate(LAYOUT)["small"] == []
        page.close()


LAYOUT = """() => {
  const hidden = ".skip, .unseen, script, style";
  const all = (selector) => [...document.querySelectorAll(selector)].filter(
    (one) => one.checkVisibility() && !one.closest(hidden));
  const small = all("a, button, summary, input, [data-help], [data-hint]").filter((one) => {
    const { width, height } = one.getBoundingClientRect();
    return height < 23.9 || (width < 23.9 && !one.matches("[data-help], [data-hint]"));
  }).map((one) => one.textContent.trim() || one.id || one.value);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), boxes = [], clipped = [];
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement, range = document.createRange();
    if (!node.data.trim() || !parent.checkVisibility() || parent.closest(`${hidden}, dialog`)) continue;
    range.selectNodeContents(node);
    for (const { left, right, top, bottom } of range.getClientRects()) {
      const box = { text: node.data, node, left, right, top, bottom };
      if (left < 0 || right > innerWidth) clipped.push(node.data);
      for (let host = parent; host !== document.body; host = host.parentElement) {
        const scrolls = !(host instanceof SVGElement) && getComputedStyle(host).overflowX !== "visible";
        if (!scrolls && !host.matches("section")) continue;
        const limit = host.getBoundingClientRect();
        if (left < limit.left - 1 || right > limit.right + 1) clipped.push(node.data);
        if (scrolls) box.top = Math.max(top, limit.top);
        if (scrolls) box.bottom = Math.min(bottom, limit.bottom);
      }
      boxes.push(box);
    }
  }
  const common = (one, other, from, to) => Math.min(one[to], other[to]) - Math.max(one[from], other[from]);
  const overlapping = boxes.flatMap((one, i) => boxes.slice(i + 1)
    .filter((other) => other.node !== one.node)
    .filter((other) => common(one, other, "left", "right") > 1 && common(one, other, "top", "bottom") > 2)
    .map((other) => `${one.text} | ${other.text}`));
  const unreachable = all("#versions button").filter((button) => {
    button.scrollIntoView({ block: "center" });
    const { x, y, width, height } = button.getBoundingClientRect();
    return document.elementFromPoint(x + width / 2, y + height / 2) !== button;
  }).map((button) => button.ariaLabel);
  scrollTo(0, 0);
  return { small, clipped, overlapping, unreachable };
}"""
"""Returns targets that a pointer can miss (WCAG 2.2, success criterion 2.5.8), and texts that leave their section
or the page, or overlap others."""

COLOURS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const of = (selector, property) => Object.fromEntries([...document.querySelectorAll(selector)].map(
    (one) => [one.getAttribute("class"), rgb(getComputedStyle(one)[property])]));
  return { outcomes: of("#outcomes .key", "backgroundColor"), lines: of("#legend .curve:not(.worst)", "stroke") };
}"""
"""Returns the colours of outcomes and of lines; the line of the worst class is dashed."""


def too_near(colours):
    """Return the pairs of colours that are hard to distinguish, with or without colour blindness.

    Oklab's distance (Ottosson 2020), after the simulation of Machado, Oliveira and Fernandes (2009) at full severity.
    """
    assert len(colours) >= 3
    encoded = torch.tensor(list(colours.values())) / 255
    linear = torch.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    pairs, near = list(itertools.combinations(range(len(colours)), 2)), []
    for deficiency, matrix in COLOUR_BLINDNESS.items():
        seen = (linear @ torch.tensor(matrix).T).clamp(0, 1)
        lab = (seen @ torch.tensor(TO_LMS).T) ** (1 / 3) @ torch.tensor(TO_LAB).T
        distance = torch.cdist(lab, lab)
        near += [(deficiency, *(list(colours)[k] for k in pair)) for pair in pairs if distance[pair] < 0.1]
    return near


COLOUR_BLINDNESS = {
    "none": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
TO_LMS = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
TO_LAB = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]


def test_in_a_browser_the_shadow_is_shown_while_there_is_a_candidate(browser, numbers, served, body_of):
    numbers.publish(1)
    write_report(numbers.deployment.state_dir, learner_report(error={"now": 3.25, "old": 4.5}))

    def await_shadow(words):
        shadow = "[...document.querySelectorAll('#parts dt')].find(dt => dt.textContent === 'Shadow')?.nextSibling"
        page.wait_for_function(f"words => ({shadow}?.textContent ?? null) === words", arg=words)

    with served(numbers, shadow=1.0) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "All is well.")
        await_shadow(None)
        numbers.publish(5, verdict="fail")
        await_shadow("version 5, nothing compared yet")
        assert httpx.post(server.infer, json=body_of(3)).status_code == 200
        await_shadow("version 5 disagrees by 4, over 3 rows")
        numbers.publish(6, weights={"other": torch.zeros(3)}, verdict="fail")
        numbers.publish(7)
        await_shadow(None)
        page.close()


HOSTILE = '<img src=x onerror="window.hurt=1"></script><script>window.hurt=1</script>\'"`${hurt=1}&lt;'


def test_in_a_browser_hostile_names_and_sentences_are_words(browser, numbers, served):
    numbers.publish(1)
    torn = numbers.publish(2) / "manifest.json"
    torn.write_text(HOSTILE)
    partition = PartitionReport(start=0, end=9, finished=3, passed=0, gaps=0, removed=0, pending=6, trained_through=2)
    report = learner_report(
        problems=[HOSTILE, "b"],
        partitions={HOSTILE: partition, "events:1": partition},
        skipped={HOSTILE: 4},
        outcomes={"skipped": 4},
        replay_rows={HOSTILE: 5},
        replay_bytes={HOSTILE: 5},
        replay_capacity=10,
        accuracy={"now": 0.5, HOSTILE: 0.5},
    )
    write_report(numbers.deployment.state_dir, report)
    with served(numbers) as server:
        page = browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        status = httpx.get(server.url + "/api/status").json() | {"name": HOSTILE}
        status["versions"][0]["reason"] = HOSTILE
        page.route("**/api/status", lambda route: route.fulfill(json=status))
        page.goto(server.url)
        await_sentence(page, "2 things are wrong.")
        assert page.locator("#problems li").first.text_content() == f"Learner: {HOSTILE}"
        assert page.text_content("#pipeline") == HOSTILE
        assert page.locator("#partitions tbody th").first.text_content() == HOSTILE
        assert HOSTILE in page.text_content("#versions .reason")
        assert HOSTILE in page.text_content("#tiers")
        assert page.evaluate("[window.hurt, document.images.length, document.scripts.length]") == [None, 0, 1]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert complaints == []
        page.close()


def test_in_a_browser_the_figures_of_a_silent_learner_are_not_those_of_now(browser, numbers, served):
    numbers.publish(1)
    rates = {"rows_new": 300.0, "rows_replay": 900.0, "steps": 10.0}
    write_report(numbers.deployment.state_dir, learner_report(time=time.time() - 40, rates=rates))
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "The learner does not report")
        assert page.text_content("[data-figure=rows_new]") == page.text_content("[data-figure=lag]") == "\N{EN DASH}"
        assert re.search(r"last report of the learner 4\d s ago", page.text_content("#meta"))
        page.close()


def test_in_a_browser_lag_that_is_old_is_not_that_of_now(browser, numbers, served):
    numbers.publish(1)
    partition = PartitionReport(start=0, end=9, finished=9, passed=0, gaps=0, removed=0, pending=0, trained_through=8)
    report = learner_report(partitions={"events:0": partition}, lag_age_seconds=64.0)
    write_report(numbers.deployment.state_dir, report)
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "All is well")
        assert page.text_content("[data-figure=lag]") == "\N{EN DASH}"
        assert re.search(r"0 as of .* ago", page.text_content("[data-figure=behind]"))
        page.close()


def with_fleet(numbers, bucket):
    """A deployment whose object store has the reports of three servers."""
    storage = StorageSettings(url=f"file://{bucket}")
    figures: dict[str, dict[str, Any]] = {
        "a": {"version": 2, "refused": {1: "a long reason"}},
        "b": {"version": 3},
        "c": {"version": 2, "time": 0.0},
    }
    for name, members in figures.items():
        report = {"id": name, "beat": 1, "time": time.time() + 3600, "address": HOSTILE, "ready": True, **members}
        write_server(storage.bucket, FleetServer(**report))
    RolloutFile(storage.bucket).replace(FleetRollout(stable=2, canary=3, canaries=["b"]))
    return dataclasses.replace(numbers, deployment=dataclasses.replace(numbers.deployment, fleet=storage))


@pytest.mark.slow
def test_status_has_the_servers_of_the_fleet_and_says_when_they_cannot_be_read(
    numbers, served, eventually, tmp_path, monkeypatch
):
    monkeypatch.setattr("anabranch.serving.fleet.overview.REPORT_EVERY", timedelta(0))
    with served(with_fleet(numbers, tmp_path / "bucket"), ready=False) as server:
        fleet = eventually(lambda: httpx.get(server.url + "/api/status").json()["fleet"])
        assert [(each["id"], each["version"], each["silent"]) for each in fleet["servers"]] == [
            ("a", 2, False),
            ("b", 3, False),
            ("c", 2, True),
        ]
        assert (fleet["rollout"]["canaries"], fleet["problem"]) == (["b"], None)
        assert fleet["servers"][0]["refused"] == {}, "of a thousand servers they would be megabytes, at each poll"
        (tmp_path / "bucket" / "rollout.json").write_text("{")
        problem = eventually(lambda: httpx.get(server.url + "/api/status").json()["fleet"]["problem"])
        assert problem.startswith("the servers of the fleet cannot be read: ")


def test_no_server_is_silent_because_reading_the_reports_of_all_takes_long(tmp_path, monkeypatch):
    storage, now = StorageSettings(url=f"file://{tmp_path}/bucket"), [1000.0]
    write_server(storage.bucket, FleetServer(id="a", beat=1, time=999.0, address="", ready=True))

    def read_slowly(bucket):
        now[0] += 60
        return read_servers(bucket)

    monkeypatch.setattr(overview, "read_servers", read_slowly)
    monkeypatch.setattr(overview, "time", SimpleNamespace(time=lambda: now[0]))
    fleet = overview.read_fleet(storage)
    assert [fleet.is_silent(each) for each in fleet.servers] == [False]


def test_in_a_browser_the_servers_of_a_fleet_have_their_versions(browser, numbers, served, tmp_path):
    numbers.publish(1)
    write_report(numbers.deployment.state_dir, learner_report())
    with served(with_fleet(numbers, tmp_path / "bucket")) as server:
        page = browser.new_page(viewport={"width": 360, "height": 740})
        page.goto(server.url)
        page.wait_for_selector("#fleet:not([hidden])")
        assert page.text_content("[data-figure=fleet]") == "1 with version 3, 1 with version 2"
        rows = page.locator("#servers tbody tr").all()
        cells = [[cell.text_content() for cell in row.locator("th, td").all()] for row in rows]
        assert [row[:3] for row in cells] == [
            ["a", "2", "0"],
            ["b (canary)", "3", "0"],
            ["c", "2", "\N{EN DASH}"],
        ]
        assert [row[-1].partition(" for ")[0] for row in cells] == ["ready", "ready", "silent"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


def test_in_a_browser_the_history_is_shown_until_its_end(browser, numbers, served):
    numbers.publish(1)
    backfill = BackfillReport(
        topics=["history", "history.2"],
        rows_read=4_300_000,
        rows=10_000_000,
        files_read=4,
        files=1000,
        file=f"year=2026/{HOSTILE}.parquet",
        rate=812_345.6,
        seconds_left=430.2,
    )
    partition = PartitionReport(start=0, end=9, finished=9, passed=0, gaps=0, removed=0, pending=0, trained_through=8)
    files = (msgspec.structs.replace(partition, files=1000, history=number) for number in (1, 2))
    partitions = dict(zip(("history", "history.2", "events:0"), (*files, partition), strict=True))
    write_report(numbers.deployment.state_dir, learner_report(backfill=backfill, partitions=partitions))
    with served(numbers) as server:
        page = browser.new_page(viewport={"width": 360, "height": 740})
        page.goto(server.url)
        await_sentence(page, "All is well.")
        shown = {name: page.text_content(f"[data-figure=backfill_{name}]") for name in ("read", "left", "rows", "file")}
        assert shown == {
            "read": "43.0 %",
            "left": "7 min 10 s left",
            "rows": "4,300,000 of 10,000,000 rows, 812,346 rows/s",
            "file": f"file 5 of 1,000: {backfill.file}",
        }
        bar = page.locator("#backfill-bar")
        assert bar.get_attribute("aria-valuenow") == "43"
        width = "e => e.firstElementChild.getBoundingClientRect().width / e.getBoundingClientRect().width"
        assert bar.evaluate(width) == pytest.approx(0.43, abs=0.01)
        assert page.locator("#partitions tbody th").all_text_contents() == ["events:0"]
        assert page.text_content("[data-figure=partitions]") == "1 partition"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        done = msgspec.structs.replace(backfill, rows_read=10_000_000, files_read=1000, done=True)
        write_report(numbers.deployment.state_dir, learner_report(backfill=done, partitions=partitions))
        page.wait_for_selector("#backfill", state="hidden")
        assert "History10,000,000 rows of 1,000 files were read" in page.text_content("#training")
        write_report(
            numbers.deployment.state_dir, learner_report(backfill=msgspec.structs.replace(done, files=1, files_read=1))
        )
        page.locator("#training", has_text="10,000,000 rows of 1 file were read").wait_for()
        page.close()


def test_in_a_browser_a_cache_is_not_counted_twice_and_two_hundred_partitions_fit_the_page(browser, numbers, served):
    numbers.publish(1)
    partitions = {
        f"events:{number}": PartitionReport(
            start=0, end=110, finished=100, passed=0, gaps=0, removed=0, pending=10 + number, trained_through=99
        )
        for number in range(200)
    }
    report = learner_report(
        partitions=partitions,
        outcomes={"trained": 200_000},
        rates={"rows_new": 1000.0},
        replay_rows={"device": 50, "disk": 700},
        replay_bytes={"device": 5_000, "disk": 70_000},
        replay_bounds={"device": 10_000, "disk": 140_000},
        replay_capacity=1000,
        replay_lost=3,
    )
    write_report(numbers.deployment.state_dir, report)
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "All is well.")
        assert page.text_content("[data-figure=replay]") == "700 of 1,000 events"
        assert page.text_content("[data-tier=device] p").startswith("device, a cache of disk")
        assert page.text_content("#lost") == "3 events were lost by a tier"
        assert page.text_content("[data-figure=behindmost]") == "events:199 lags most, by 209"
        assert page.text_content("[data-figure=lag]") == "21,900"
        # Ten events a message: 219,000 events at 1,000 a second.
        assert page.text_content("[data-figure=behind]") == "about 3 min 39 s at this rate"
        assert page.evaluate("document.getElementById('partitions').parentElement.clientHeight") < 200
        page.close()


def test_in_a_browser_a_clock_that_is_set_back_begins_new_lines(browser, numbers, served):
    numbers.publish(1)
    write_report(numbers.deployment.state_dir, learner_report())
    with served(numbers) as server:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        await_sentence(page, "All is well.")
        page.evaluate("points.time = [4e9]")
        page.wait_for_function("() => points.time.length && points.time.at(-1) < 3e9")
        assert any(url.endswith("since=4000000000") for url in asked)
        page.close()


def test_in_a_browser_the_theme_is_remembered(browser, numbers, served):
    numbers.publish(1)
    write_report(numbers.deployment.state_dir, learner_report())
    with served(numbers) as server:
        page = browser.new_page(color_scheme="light")
        page.goto(server.url)
        await_sentence(page, "All is well.")
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        while page.text_content("#theme") != "Theme: dark":
            page.click("#theme")
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        await_sentence(page, "All is well.")
        assert (page.text_content("#theme"), page.evaluate(ground)) == ("Theme: dark", dark)
        page.close()


def act(page, version, action):
    page.click(f"[data-version='{version}'] [data-action={action}]")


def await_fate(page, version, fate):
    page.wait_for_function(
        "([number, fate]) => document.querySelector(`[data-version='${number}']`)?.children[5].textContent === fate",
        arg=[version, fate],
    )


def test_in_a_browser_versions_are_promoted_pinned_and_rejected(browser, numbers, served):
    for number in (1, 2):
        numbers.publish(number)
    numbers.publish(3, verdict="fail", reasons=["worse on old events"])
    write_report(numbers.deployment.state_dir, learner_report())
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_fate(page, 2, "served")
        act(page, 3, "promote")
        assert page.text_content("#command-title") == "Promote version 3?"
        page.click("#command-cancel")
        assert not page.is_visible("#command")
        act(page, 3, "promote")
        page.click("#command-go")
        await_fate(page, 3, "served")
        act(page, 3, "reject")
        page.click("#command-go")
        await_fate(page, 3, "rejected")
        act(page, 2, "pin")  # asks nothing: it can be undone
        await_fate(page, 2, "pinned")
        act(page, 1, "promote")
        page.click("#command-go")
        page.wait_for_function("() => document.getElementById('command-error').textContent")
        assert page.text_content("#command-error") == "Version 2 is pinned, and nothing else is served; unpin it first."
        page.click("#command-cancel")
        act(page, 2, "unpin")
        await_fate(page, 2, "served")
        page.close()


def test_every_action_of_the_page_is_an_order_of_the_server(browser, numbers, served):
    with served(numbers, ready=False) as server:
        page = browser.new_page()
        page.goto(server.url)
        assert set(page.evaluate("Object.values(ACTIONS)")) <= set(COMMANDS)
        page.close()


def test_in_a_browser_the_admin_token_is_asked_for_once_and_stored_nowhere(browser, numbers, served):
    for number in (1, 2):
        numbers.publish(number)
    write_report(numbers.deployment.state_dir, learner_report())
    with served(numbers, tokens=TOKENS) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("#token-form:visible")
        page.fill("#token", "lesen")
        page.keyboard.press("Enter")
        await_fate(page, 2, "served")
        act(page, 2, "pin")
        page.wait_for_selector("#admin-token:visible")
        assert page.text_content("#command-error") == ""
        page.keyboard.type("falsch")  # the field has the focus
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.getElementById('command-error').textContent")
        page.fill("#admin-token", "verwalten")
        page.keyboard.press("Enter")
        await_fate(page, 2, "pinned")
        assert not page.is_visible("#command")
        act(page, 2, "unpin")
        await_fate(page, 2, "served")
        everything = "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie, location.href])"
        assert "verwalten" not in page.evaluate(everything)
        assert "verwalten" not in page.content()
        page.reload()
        await_fate(page, 2, "served")
        act(page, 2, "pin")
        page.wait_for_selector("#admin-token:visible")
        page.close()


def test_in_a_browser_terms_and_verdicts_are_explained_on_hover_and_on_focus(browser, numbers, served):
    numbers.publish(1)
    numbers.publish(2, reasons=["17 of 1000 held-out events, fewer than gate.min_rows"])
    write_report(numbers.deployment.state_dir, learner_report(error={"now": 0.5, "old": 0.25}))
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_fate(page, 2, "served")
        for term in ("now", "old", "verdict", "trained_through", "checkpoint", "holdout"):
            first = page.locator(f"[data-help={term}]").first
            first.focus()
            words = page.text_content("#hint")
            assert page.is_visible("#hint")
            assert len(words) > 40
            assert page.text_content(f"#{first.get_attribute('aria-describedby')}") == words
        assert "lowest accuracy" in page.evaluate("HELP.worst")
        page.keyboard.press("Escape")
        assert not page.is_visible("#hint")
        row = page.locator("[data-version='2']")
        assert "inconclusive: 17 of 1,000 holdout events" in row.text_content()
        row.locator("[data-hint]").hover()
        assert page.text_content("#hint") == "17 of 1000 held-out events, fewer than gate.min_rows"
        row.locator("[data-action=pin]").focus()
        before = page.evaluate("status.time")
        page.wait_for_function("time => status.time > time + 1", arg=before)
        focused = "[document.activeElement.dataset.action, document.activeElement.closest('tr').dataset.version]"
        assert page.evaluate(focused) == ["pin", "2"], "the table is rendered again, and the focus stays"
        page.close()


def test_in_a_browser_events_are_marks_on_the_time_axis_and_the_axis_can_be_zoomed(
    browser, numbers, served, eventually
):
    numbers.publish(1)
    state_dir = numbers.deployment.state_dir
    write_report(state_dir, learner_report(error={"now": 96.0, "old": 97.0}, started=1.0))
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "All is well.")
        page.wait_for_selector("#marks [data-key=swap]")
        for _ in range(2):  # between two reports serving samples one with which the next one is compared
            last = server.report().time
            eventually(lambda last=last: server.report().time > last)
        changed = {"drifts": 1, "drift_step": 40, "checkpoint": 2, "checkpoint_time": time.time(), "behind": True}
        changed["undo"] = UndoReport(number=3, checkpoint=1, offsets=1200, left=50, fraction=0.5)
        write_report(state_dir, learner_report(error={"now": 96.0, "old": 97.0}, started=1.0, **changed))
        for kind in ("drift", "checkpoint", "lag", "undo"):
            page.wait_for_selector(f"#marks [data-key={kind}]")
            assert page.locator(f"#chart .event.{kind}").count()
        assert "number 3, without 1,200 offsets: 50.0 % learned again, 50 offsets left" in page.text_content("#state")
        page.click("#happened summary")
        assert page.locator("[data-event=drift]").first.text_content().endswith("The stream drifted at step 40.")
        ticks = "[...document.querySelectorAll('#chart text[text-anchor=end]')].slice(0, 5).map(t => t.textContent)"
        assert page.evaluate(ticks)[0] == "0"
        page.check("#zoom")
        assert float(page.evaluate(ticks)[0]) >= 80
        page.reload()
        await_sentence(page, "All is well.")
        assert page.is_checked("#zoom")
        page.close()


def test_in_a_browser_a_watched_device_has_its_tile(browser, numbers, served):
    numbers.publish(1)
    state_dir = numbers.deployment.state_dir
    devices = [
        DeviceReport(
            uuid=f"GPU-{number}",
            name="NVIDIA H100",
            temperatures={"gpu": 60.0 + number},
            memory_used=12 * 10**9,
            memory_total=80 * 10**9,
            power=500.0,
            warnings=["it slows down because it is hot"] if number else [],
        )
        for number in range(2)
    ]
    write_report(state_dir, learner_report())
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "All is well.")
        assert not page.is_visible("#device")
        health = DeviceHealthReport(devices=devices, joules_per_event=0.25)
        write_report(state_dir, learner_report(device=health))
        page.wait_for_selector("#device", state="visible")
        assert page.text_content("[data-figure=device_temperature]") == "61 °C"
        assert page.text_content("[data-figure=device_name]") == "hottest of 2"
        assert page.text_content("[data-figure=device_use]") == "24 GB of 160 GB, 1,000 W, 0.25 J an event"
        assert page.text_content("[data-figure=device_state]") == "it slows down because it is hot"
        page.wait_for_selector("[data-spark=device_temperature] path", state="attached")
        page.close()


def test_in_a_browser_series_of_different_meaning_have_their_own_scale_with_its_limits(browser, numbers, served):
    numbers.publish(1)
    write_report(numbers.deployment.state_dir, learner_report(rates={"rows_new": 600.0, "rows_replay": 3.0}))
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        await_sentence(page, "All is well.")
        page.wait_for_selector("[data-spark^=rows_new] path", state="attached")
        svg = page.locator("[data-spark^=rows_new] svg")
        assert svg.get_attribute("aria-label") == "max 600, min 600, max 3, min 3"
        assert svg.locator("text").all_text_contents() == ["max 600", "min 600", "max 3", "min 3"]
        assert page.locator("header a").all_text_contents() == ["HTTP API", "Metrics", "See outcomes"]
        assert httpx.get(f"{server.url}/{page.get_attribute('header a', 'href')}").status_code == 200
        page.close()


def test_in_a_browser_late_labels_have_a_line_and_waiting_events_a_row(browser, numbers, served):
    numbers.publish(1)
    labels = LabelReport(
        waiting=7,
        ready=0,
        kept=0,
        bytes=700,
        bound=10**9,
        ended={"trained": 3, "timed_out": 2},
        labels={},
        lag_p50_seconds=60.0,
        lag_p99_seconds=7200.0,
    )
    write_report(numbers.deployment.state_dir, learner_report(outcomes={"waiting": 12, "label": 3}, labels=labels))
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("[data-outcome=waiting]")
        for outcome, count in (("waiting", "7"), ("trained", "3"), ("timed_out", "2")):
            assert page.text_content(f"[data-outcome={outcome}] td.num") == count
        assert page.query_selector("[data-outcome=label]") is None
        assert "7 events wait, labels take 1 min 0 s, 99 % of them less than 2 h 0 min" in page.text_content("body")
        page.close()


def test_in_a_browser_what_an_extension_reports_has_a_line(browser, numbers, served):
    numbers.publish(1)
    own = {"events": {"night": 1970, "day": 30}, "held_bytes": 2_500_000, "busiest_ratio": 0.985}
    write_report(numbers.deployment.state_dir, learner_report(extensions={"events_by_hour": own}))
    with served(numbers) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("text=Events by hour")
        assert "events night 1,970, day 30; held 2.5 MB; busiest 98.5 %" in page.text_content("body")
        page.close()
