"""Each notebook runs in a kernel of Jupyter, cell by cell, and shows what it promises."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from tests.examples.running import ROOT
from tests.launch.kernel import Notebook

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells_of(path):
    return json.loads(path.read_text())["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_listed_and_holds_no_output(path):
    assert f"](notebooks/{path.name})" in (ROOT / "examples" / "README.md").read_text()
    cells = cells_of(path)
    assert len({cell["id"] for cell in cells}) == len(cells), "GitHub shows no notebook without them"
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []


def run(name, folder):
    """What the cells of a notebook show together, and the folder in which they ran."""
    notebook = Notebook(folder)
    try:
        shown = []
        for cell in cells_of(FOLDER / f"{name}.ipynb"):
            if cell["cell_type"] == "code":
                shown.append(notebook.run("".join(cell["source"])))
                assert shown[-1].error == "", cell["source"]
    finally:
        notebook.close()
    fields = ("stdout", "stderr", "value", "html")
    return SimpleNamespace(**{name: "\n".join(getattr(cell, name) for cell in shown) for name in fields})


def in_a_kernel(test):
    """The marks of a test that runs a notebook."""
    # jupyter_client 8 leaves an event loop open, which is collected at some time
    calm = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    return pytest.mark.long(pytest.mark.launcher(calm(test)))


@in_a_kernel
def test_training_with_a_bar_and_a_report(tmp_path):
    shown = run("train_digits", tmp_path)
    assert "clip_norm" in shown.html, "the plan is a table"
    assert "/480" in shown.stderr + shown.stdout, "the bar"
    accuracies = re.findall(r"epoch \d+: accuracy ([\d.]+)", shown.stdout)
    assert 3 < len(accuracies) < 20
    assert float(accuracies[-1]) > 0.85
    assert "report.html" in shown.html
    assert "</html>" in (tmp_path / "report.html").read_text()
    assert re.search(r"after epoch \d+: [1-4]?\d of 297 are wrong", shown.stdout)


@in_a_kernel
def test_several_ranks(tmp_path):
    shown = run("several_ranks", tmp_path)
    found = re.findall(r"(\w+), ranks: (\d), held-out loss: ([\d.]+)", shown.stdout)
    assert [(strategy, ranks) for strategy, ranks, _ in found] == [
        ("ddp", "2"),
        ("local", "1"),
        ("fsdp", "2"),
    ]
    assert float(re.search(r"largest difference: (\S+)", shown.stdout)[1]) < 1e-4
    restored = re.search(r"step 48: held-out loss ([\d.]+)", shown.stdout)
    assert float(restored[1]) == pytest.approx(float(found[2][2]), abs=2e-4)
    assert "rank 1 raised ValueError: no such column" in shown.stdout
