"""The notebook and the README's Python run as they are written, and show what they say."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Run the cells of the notebook in an empty folder, and return their names."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    notebook = json.loads((ROOT / "examples/notebooks/replay.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    yield names
    for name in ("learner", "forgetful", "again"):
        names[name].close()


def test_the_notebook_shows_that_replay_helps(ran):
    assert ran["accuracy"] > 0.8
    assert ran["without"] < ran["accuracy"] - 0.15
    assert ran["batch"]["x"].shape == (32, 64)


def test_the_readme_has_the_first_cell_in_ten_lines():
    notebook = json.loads((ROOT / "examples/notebooks/replay.ipynb").read_text(encoding="utf-8"))
    first = next("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert f"```python\n{first}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in first.splitlines() if line]
    assert len(lines) <= 12
    assert not any("anabranch." in line and "import" in line for line in lines)  # no inner module
