"""The notebooks and the README's Python run as they are written, and show what they say."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def cells(name):
    """Return the code of a notebook, cell by cell."""
    notebook = json.loads((ROOT / f"examples/notebooks/{name}.ipynb").read_text(encoding="utf-8"))
    found = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in found)
    return ["".join(cell["source"]) for cell in found]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook in an empty folder, and returns its names."""

    def notebook(name):
        monkeypatch.chdir(tmp_path)
        torch.manual_seed(0)
        names = {"__name__": "notebook"}
        for cell in cells(name):
            exec(cell, names)
        return names

    return notebook


def test_the_notebook_shows_that_replay_helps(run):
    pytest.importorskip("sklearn")
    ran = run("replay")
    assert ran["accuracy"] > 0.8
    assert ran["without"] < ran["accuracy"] - 0.15
    assert ran["batch"]["x"].shape == (32, 64)
    for name in ("learner", "forgetful", "again"):
        ran[name].close()


def test_a_frame_is_learned_as_a_stream(run):
    ran = run("stream")
    assert ran["schema"].label.classes == 2
    assert {feature.name for feature in ran["schema"].features} == {"at", "amount", "shop"}
    table = ran["with_replay"]
    assert table.num_rows >= 10
    assert table["overall_accuracy"][-1].as_py() > table["constant_overall_accuracy"][-1].as_py() + 0.05
    assert ran["predicted"].num_rows == 5
    assert ran["measures"]["events"] == 2000


@pytest.mark.process
@pytest.mark.services
@pytest.mark.timeout(300)
def test_a_pipeline_runs_from_a_notebook(run, monkeypatch, kafka, make_topic, free_port):
    for key, value in {
        "STREAM__BOOTSTRAP_SERVERS": kafka.bootstrap,
        "STREAM__TOPICS": json.dumps([make_topic(1)]),
        "LEARNER__STATUS": "127.0.0.1:0",
        "SERVING__PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(f"ANABRANCH__{key}", value)
    ran = run("pipeline")
    assert ran["answers"]["prediction"].shape == (5,)
    assert ran["model"].version == ran["answers"]["model_version"][0]
    assert ran["pipeline"].status()["serving"]["condition"] == "not running"


def test_the_readme_has_the_first_cell_in_ten_lines():
    first = cells("replay")[0]
    assert f"```python\n{first}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in first.splitlines() if line]
    assert len(lines) <= 12
    assert not any("anabranch." in line and "import" in line for line in lines)  # no inner module
