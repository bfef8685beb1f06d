"""tools/draw_benchmarks.py: which saved figures the page shows, and that they depend on nothing else."""

import json
import xml.etree.ElementTree as ET

import pytest

from tools import draw_benchmarks
from tools.draw_benchmarks import main, newest, plot, written

SVG = "{http://www.w3.org/2000/svg}"


def figure(key, value, **others):
    return {"key": key, "value": value, "unit": "s", "least": None, "most": None, "target": None, "met": None, **others}


@pytest.fixture
def save(tmp_path):
    """Saves a run: `save(benchmark, day, *figures, form="long", cpu="one")`."""

    def save(benchmark, day, *figures, form="long", cpu="one"):
        machine = {"name": cpu, "cpu": cpu, "cores": 2, "gpu": None, "python": "3.11", "torch": "2.13"}
        run = {
            "benchmark": benchmark,
            "time": f"2026-11-{day:02}T10:00:00+00:00",
            "revision": f"r{day}",
            "parameters": {"form": form},
            "machine": machine,
            "figures": list(figures),
        }
        with (tmp_path / f"{benchmark}.jsonl").open("a") as file:
            file.write(json.dumps(run) + "\n")

    return save


@pytest.fixture(autouse=True)
def _nothing_changed(monkeypatch):
    monkeypatch.setattr(draw_benchmarks, "CHANGED", "2026-11-01")


def block(comment, tmp_path):
    """Return what is written between a comment and its end."""
    page = written(f"before\n<!-- {comment} -->\nold\n<!-- end -->\nafter\n", tmp_path)
    assert page.startswith(f"before\n<!-- {comment} -->\n\n")
    assert page.endswith("\n\n<!-- end -->\nafter\n")
    return page.split("\n\n")[1]


def test_the_page_is_up_to_date(monkeypatch):
    """If this fails, run python tools/draw_benchmarks.py."""
    monkeypatch.undo()
    assert main(["--check"]) == 0


def test_the_newest_long_form_is_shown_with_its_spread_and_target(tmp_path, save):
    spread = {"least": 0.1, "most": 1234.5, "target": "<= 0.3", "remark": "ten"}
    save("toy", 2, figure("speed", 0.4, **spread, met=False))
    save("toy", 1, figure("speed", 0.2, **spread, met=True))
    save("toy", 3, figure("speed", 0.1, **spread, met=True), form="quick")
    expected = "* `speed`: **0.4 s** (0.1..1234), target \N{LESS-THAN OR EQUAL TO} 0.3: **missed**; 2026-11-02, one"
    assert block("figures: toy speed", tmp_path) == expected


def test_the_quick_form_is_shown_if_there_is_no_other(tmp_path, save):
    save("toy", 1, figure("speed", None))
    save("toy", 1, figure("speed", 1.0, unit="", target="= 1", met=True), form="quick")
    assert block("figures: toy speed", tmp_path) == "* `speed`: **1**, target = 1: met; 2026-11-01, one, quick"


def test_a_figure_from_before_the_code_changed_is_marked(tmp_path, save, monkeypatch):
    monkeypatch.setattr(draw_benchmarks, "CHANGED", "2026-11-02")
    save("toy", 1, figure("old", 1.0))
    save("toy", 2, figure("new", 1.0))
    old, new = block("figures: toy old new", tmp_path).splitlines()
    assert old.endswith("2026-11-01 \N{DAGGER}, one")
    assert new.endswith("2026-11-02, one")


def test_a_missed_target_is_on_the_page_even_if_no_comment_names_it(tmp_path, save):
    missed = {"target": ">= 2", "met": False}
    save("toy", 1, figure("hidden", 1.5, **missed), figure("shown", 1.0, **missed))
    save("other", 1, figure("met", 3.0, target=">= 2", met=True), figure("repaired", 1.0, **missed))
    save("other", 2, figure("repaired", 2.5, target=">= 2", met=True))
    page = written("<!-- figures: toy shown -->\n<!-- end -->\n<!-- missed -->\n<!-- end -->\n", tmp_path)
    assert page.endswith(
        "<!-- missed -->\n\n* toy: `hidden` 1.5, target \N{GREATER-THAN OR EQUAL TO} 2\n\n<!-- end -->\n"
    )


def test_a_figure_that_no_result_has_is_an_error(tmp_path, save):
    save("toy", 1, figure("speed", 1.0))
    with pytest.raises(ValueError, match=r"no saved result has these figures of the page: other speed, toy gone$"):
        written("<!-- figures: toy gone -->\n<!-- end -->\n<!-- figures: other speed -->\n<!-- end -->\n", tmp_path)


def test_a_second_run_changes_nothing(tmp_path, save, capsys):
    save("toy", 1, figure("speed", 1.0))
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: toy speed -->\n<!-- end -->\n")
    assert main(["--check"], page, tmp_path) == 1
    assert "**" not in page.read_text()
    assert main([], page, tmp_path) == 0
    assert "* `speed`: **1 s**; 2026-11-01, one\n" in page.read_text()
    capsys.readouterr()
    assert main(["--check"], page, tmp_path) == 0
    assert capsys.readouterr().out == ""


def test_all_newest_figures_are_printed(tmp_path, save, capsys):
    save("toy", 1, figure("speed", 1.0), figure("cost", 2.0))
    assert main(["--show"], results=tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "## toy",
        "",
        "* `speed`: **1 s**; 2026-11-01, one",
        "* `cost`: **2 s**; 2026-11-01, one",
        "",
    ]


def test_a_plot_has_a_bar_for_each_figure_of_the_first_ones_unit(tmp_path, save):
    save(
        "toy",
        1,
        figure("half", 1.0, target="<= 0.5", met=False),
        figure("whole", 2.0, least=1.5, most=2.5),
        figure("negative", -1.0),
        figure("other", 9.0, unit="ratio"),
    )
    image = ET.fromstring("\n".join(plot("toy", list(newest(tmp_path / "toy.jsonl").values()))))
    bars = [bar for bar in image.iter(f"{SVG}rect") if bar.get("class")]
    assert [bar.get("class") for bar in bars] == ["bar missed", "bar", "bar"]
    half, whole, negative = (float(bar.get("width")) for bar in bars)
    assert half == pytest.approx(negative, abs=0.1) == pytest.approx(whole / 2, abs=0.1)
    assert len([path for path in image.iter(f"{SVG}path") if path.get("class") == "target"]) == 1
