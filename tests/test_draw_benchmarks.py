"""tools/draw_benchmarks.py: which saved results are shown, and that the output depends on nothing else."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import draw_benchmarks
from tools.draw_benchmarks import BEGIN, END, ROOT, Scale, outputs

BLOCK = BEGIN.format("toy") + "old\n" + END

SVG = "{http://www.w3.org/2000/svg}"
Save = Callable[..., None]


def figure(key: str, value: float | None, **others: Any) -> dict[str, Any]:
    return {"key": key, "value": value, "unit": "s", "least": None, "most": None, "target": None, "met": None, **others}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text(f"before\n\n{BLOCK}\nafter\n")
    return tmp_path


@pytest.fixture
def save(root: Path) -> Save:
    """Saves a result: `save(benchmark, day, *figures, form="long", cpu="one")`."""

    def save(benchmark: str, day: int, *figures: dict[str, Any], form: str = "long", cpu: str = "one") -> None:
        machine = {"name": cpu, "cpu": cpu, "cores": 2, "gpu": None, "python": "3.11", "torch": "2.13"}
        document = {
            "benchmark": benchmark,
            "time": f"2026-11-{day:02}T10:00:00+00:00",
            "revision": f"r{day}",
            "parameters": {"form": form},
            "machine": machine,
            "figures": list(figures),
        }
        path = root / "benchmarks" / "results" / benchmark / f"{day}-{cpu}-{form}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))

    return save


@pytest.fixture(autouse=True)
def _nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_benchmarks, "CHANGED", "2026-11-01")


def rows(root: Path) -> list[list[str]]:
    """Return the cells of the tables' rows, the first with the key alone."""
    page = outputs(root)[root / "docs" / "benchmarks.md"]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| [")]
    return [[cells[0].partition("`")[2].partition("`")[0], *cells[1:]] for cells in found]


def plots(root: Path) -> dict[str, ET.Element]:
    return {path.name: ET.fromstring(text) for path, text in outputs(root).items() if path.suffix == ".svg" and text}


def test_the_page_and_the_plots_are_up_to_date(monkeypatch):
    """If this fails, run python tools/draw_benchmarks.py."""
    monkeypatch.undo()
    assert draw_benchmarks.main(["--check"], ROOT) == 0


def test_the_newest_long_form_is_shown_with_its_spread_target_and_remark(root, save):
    spread = {"least": 0.1, "most": 1234.5, "target": "<= 0.3", "remark": "ten"}
    save("toy", 1, figure("speed", 0.2, **spread, met=True))
    save("toy", 2, figure("speed", 0.4, **spread, met=False))
    save("toy", 3, figure("speed", 0.1, **spread, met=True), form="quick")
    assert rows(root) == [["speed", "0.4", "s", "0.1 to 1234", "at most 0.3: missed", "ten", "long", "2026-11-02, r2"]]


def test_a_figure_from_before_the_code_changed_is_marked(root, save, monkeypatch):
    monkeypatch.setattr(draw_benchmarks, "CHANGED", "2026-11-02")
    save("toy", 1, figure("old", 1.0, target="<= 1", met=True))
    save("toy", 2, figure("new", 1.0, target="<= 1", met=True))
    assert {cells[0]: cells[7] for cells in rows(root)} == {"old": "2026-11-01, r1 \N{DAGGER}", "new": "2026-11-02, r2"}


def test_each_machine_has_its_own_table_and_the_quick_form_if_there_is_no_other(root, save):
    save("toy", 1, figure("speed", 1.0, target="<= 1", met=True))
    save("toy", 2, figure("speed", 2.0, target="<= 1", met=False), form="quick", cpu="other")
    assert [(cells[1], cells[6]) for cells in rows(root)] == [("1", "long"), ("2", "quick")]
    (image,) = plots(root).values()
    legend = [text.text for text in image.iter(f"{SVG}text")][-2:]
    assert legend == ["one, 2 cores, no GPU, long form", "other, 2 cores, no GPU, quick form"]


def test_figures_with_a_target_ratios_percentages_and_chosen_keys_are_shown(root, save, monkeypatch):
    monkeypatch.setitem(draw_benchmarks.ALSO_SHOWN, "toy", ("chosen",))
    kinds = [figure("plain", 1.0), figure("ratio", 1.0, unit="ratio"), figure("percentage", 1.0, unit="%")]
    kinds += [figure("chosen", 1.0), figure("unknown", None), figure("bound", 0.0, target="= 0", met=True)]
    save("toy", 1, *kinds)
    assert [(cells[0], cells[4]) for cells in rows(root)] == [
        ("bound", "exactly 0: met"),
        ("ratio", ""),
        ("percentage", ""),
        ("chosen", ""),
    ]
    assert len(plots(root)) == 4


def test_a_plot_has_a_point_for_each_result_in_the_order_of_time(root, save):
    for day in (9, 1, 4):
        save("toy", day, figure("speed", float(day), target="<= 5", met=True))
    (image,) = plots(root).values()
    *points, _legend = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in image.iter(f"{SVG}circle")]
    assert len(points) == 3
    assert points == sorted(points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


def test_a_second_run_changes_nothing_and_old_plots_are_deleted(root, save, capsys):
    save("toy", 1, figure("speed", 1.0, target="<= 1", met=True))
    images = root / "docs" / "images" / "benchmarks"
    images.mkdir(parents=True)
    (images / "toy-gone.svg").write_text("<svg/>")
    assert draw_benchmarks.main(["--check"], root) == 1
    assert (images / "toy-gone.svg").exists()
    assert draw_benchmarks.main([], root) == 0
    assert [path.name for path in images.iterdir()] == ["toy-speed.svg"]
    page = (root / "docs" / "benchmarks.md").read_text()
    assert page.startswith(f"before\n\n{BEGIN.format('toy')}\none, 2 cores, no GPU; Python 3.11, torch 2.13:\n")
    assert page.endswith(f"|\n\n{END}\nafter\n")
    assert "old" not in page
    capsys.readouterr()
    assert draw_benchmarks.main(["--check"], root) == 0
    assert capsys.readouterr().out == ""


def test_a_page_without_the_comments_of_a_benchmark_is_an_error(root, save):
    save("other", 1, figure("speed", 1.0))
    with pytest.raises(ValueError, match=r"benchmarks\.md lacks these lines, .* other .*\n<!-- results of other: "):
        outputs(root)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.9, 0.984], [0.9, 0.95, 1.0]),
        ([-1.0, 7.0], [-2.0, 0.0, 2.0, 4.0, 6.0, 8.0]),
        ([3.0], [1.0, 2.0, 3.0, 4.0, 5.0]),
        ([0.0], [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_numbers_around_all_values(values, ticks):
    assert Scale.over(values).ticks == ticks
