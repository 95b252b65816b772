"""Tables and pictures show the results, and nothing else does."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import attrs
import charts
import pages
import plots
import pytest
import tables
from matplotlib import pyplot as plt

from tests.docs.names import ROOT

MEASURED = tables.read(pages.RESULTS)
SHOWN = [page for page in pages.PAGES if pages.names(page.read_text())]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_made_from_the_results(page):
    text = page.read_text()
    assert pages.filled(text, MEASURED) == text, "python benchmarks/pages.py"


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_picture_is_made_from_the_results(name):
    drawn = charts.stored(pages.IMAGES / f"{name}.png")
    assert drawn == charts.CHARTS[name](MEASURED), "python benchmarks/pages.py"
    assert any(name in page.read_text() for page in SHOWN)


def test_every_table_is_on_a_page():
    assert {name for page in SHOWN for name in pages.names(page.read_text())} == set(tables.BLOCKS)


def test_every_file_of_results_is_of_a_script():
    assert all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in MEASURED)


def test_comparing_needs_no_matplotlib():
    code = "import sys, charts, pages; print([name for name in ('matplotlib', 'torch', 'PIL') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_changed_figure_is_found_on_pages_and_pictures():
    rows = [
        {**row, "ours": 880.0} if row["what"] == "save, 480 MiB" else row
        for row in MEASURED["checkpoint"].rows
    ]
    results = {**MEASURED, "checkpoint": attrs.evolve(MEASURED["checkpoint"], rows=rows)}
    text = (ROOT / "benchmarks" / "README.md").read_text()
    assert pages.filled(text, results) != text
    assert "| save, 480 MiB | write + fsync | 880 ms |" in pages.filled(text, results)
    assert charts.growth(results) != charts.stored(pages.IMAGES / "growth.png")


@pytest.mark.parametrize(
    "text", ["<!-- benchmarks: nothing -->\n<!-- end -->\n", "<!-- benchmarks: seeing -->\n"]
)
def test_a_marker_without_a_table_or_an_end(text):
    with pytest.raises(SystemExit, match="markers"):
        pages.filled(text, MEASURED)


def test_text_around_the_markers_stays():
    text = pages.filled("before\n<!-- benchmarks: seeing -->\nof before\n<!-- end -->\nafter\n", MEASURED)
    assert text.startswith("before\n<!-- benchmarks: seeing -->\n| what |")
    assert text.endswith("</sub>\n<!-- end -->\nafter\n")
    assert "of before" not in text


FIGURE = re.compile(r"\b\d[\d.,]* (us|ms|s|GB/s)\b|\b[01]\.\d\d\b(?! release)")
BY_HAND = ("benchmarks/README.md", "docs/performance.md", "docs/why.md")


@pytest.mark.parametrize("page", BY_HAND)
def test_prose_repeats_no_figures(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [found[0] for found in FIGURE.finditer(pages.BLOCK.sub("", text))] == []


def test_figures_in_prose_are_found():
    assert [found[0] for found in FIGURE.finditer("0.83 or 11.9 ms, in 1,359 us, of 48 MiB")] == [
        "0.83",
        "11.9 ms",
        "1,359 us",
    ]


# -- what a table says ------------------------------------------------------------------------------------------


def row(**changes):
    figures = {"ours": 50.0, "peer": 100.0, "ratio": 0.5, "low": 0.4567, "high": 0.6, "rounds": 9}
    return {"what": "a step", "against": "a peer", **figures, "goal": None, "unit": "ms", **changes}


def test_a_row():
    assert tables.cells(row()) == ["a step", "a peer", "50.0 ms", "100 ms", "0.50", "0.46 to 0.60", ""]
    assert tables.cells(row(ratio=1.204, goal=1.2))[4:] == ["1.20", "0.46 to 0.60", "1.20"]
    assert tables.cells(row(ratio=1.206, goal=1.2))[4] == "**1.21**"
    assert tables.cells(row(low=None, high=None))[5] == ""
    absent = row(ours=None, peer=None, ratio=None, low=None, high=None, goal=0.5, not_run="no GPU")
    assert tables.cells(absent) == ["a step", "a peer", "", "", "not run: no GPU", "", "0.50"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1359.4, "ms", "1,359 ms"),
        (45.67, "us", "45.7 us"),
        (2.831, "ms", "2.83 ms"),
        (16645.1, "bytes", "16,645 bytes"),
        (4.0, "micro-batches", "4 micro-batches"),
        (27.27, "%", "27.3 %"),
    ],
)
def test_a_figure(value, unit, text):
    assert tables.figure(value, unit) == text


def results_of(name):
    environment = {
        "date": "2027-01-02",
        "commit": "abc",
        "cpu": "a processor",
        "cores": 2,
        "threads_per_process": 1,
    }
    environment["versions"] = {"python": "3.11", "torch": "2.13"}
    return tables.Results(name, environment, (), [row()])


def test_under_a_table_stand_place_time_and_command():
    absent = attrs.evolve(results_of("seeing"), absent=("Lightning Fabric",))
    text = tables.BLOCKS["seeing"]({"seeing": absent})
    for said in (
        "2027-01-02", "commit abc", "a processor", "2 cores", "torch 2.13", "`python benchmarks/seeing.py`", "Range:",
        "left out: Lightning Fabric",
    ):  # fmt: skip
        assert said in text


def test_results_that_are_not_there_are_named():
    assert tables.BLOCKS["jax_step"]({}) == "Not measured yet: `make bench-jax`."


def jax_results():
    step, cold = row(against=tables.JAX), row(against=tables.JAX, ours=38.0, peer=4.0, ratio=9.5, unit="s")
    rows = [
        {**step, "what": f"{tables.ON_JAX} 128, 8 x 64 tokens", "ours": 20.0, "peer": 25.0, "ratio": 0.8},
        {**cold, "what": f"{tables.ON_JAX} 128: first loss, cold"},
    ]
    return attrs.evolve(results_of("jax_step"), rows=rows)


def test_rows_of_jax_are_steps_per_second_and_first_losses():
    text = tables.BLOCKS["jax_step"]({"jax_step": jax_results()})
    assert "| 128 | 50 | 40 | 0.80 | 0.46 to 0.60 | 38.0 s | 4.00 s |  |  |" in text


def test_the_first_screen_shows_jax_if_it_has_run():
    without = {name: results for name, results in MEASURED.items() if name != "jax_step"}
    assert "JAX" not in tables.BLOCKS["first_screen"](without)
    table = tables.BLOCKS["first_screen"]({**without, "jax_step": jax_results()})
    assert "| captured step, GPT of width 128 | 20.0 ms |  |  |  |  | 25.0 ms (0.80, 0.46 to 0.60) |" in table
    panels = charts.first_screen({**without, "jax_step": jax_results()})["panels"]
    assert panels[-3]["bars"] == [["fnaccel", 20.0], ["JAX", 25.0]]


# -- what a picture shows ---------------------------------------------------------------------------------------


def test_a_drawn_picture_holds_its_numbers(tmp_path):
    chart = charts.first_screen(MEASURED)
    plots.draw(chart, tmp_path / "drawn.png")
    assert charts.stored(tmp_path / "drawn.png") == chart


def test_a_picture_without_numbers():
    assert charts.stored(pages.IMAGES / "tensorboard.png") is None


def test_contestants_of_a_panel_have_colors_of_their_own():
    for panel in charts.growth(MEASURED)["panels"]:
        assert len(set(panel["colors"].values())) == len(panel["series"])


@pytest.mark.parametrize("name", charts.CHARTS)
def test_nothing_leaves_its_axes(name):
    chart = json.loads(json.dumps(charts.CHARTS[name](MEASURED)))
    if chart["kind"] == "ratios":
        chart["rows"][0].update(ratio=7.5, high=9.0, low=0.0007)
    figure = plots.FIGURES[chart["kind"]](chart)
    figure.canvas.draw()
    for axes in figure.axes:
        if axes.get_visible():
            outer = axes.get_window_extent().padded(1)
            inner = [line.get_window_extent() for line in axes.lines]
            inner += [patch.get_window_extent() for patch in axes.patches]
            inner += [text.get_window_extent() for text in axes.texts]
            assert all(outer.x0 <= box.x0 and box.x1 <= outer.x1 for box in inner)
    plt.close(figure)
