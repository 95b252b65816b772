"""The diagrams of docs/concepts.md are those that docs/diagrams.py draws from real calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.docs.names import ROOT

IMAGES = ROOT / "docs" / "images"
NAMES = sorted(path.name for path in IMAGES.glob("*.svg"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagrams")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, ROOT / "docs" / "diagrams.py", folder], cwd=folder, env=environ, check=True
    )
    return folder


def test_the_diagrams_are_current(drawn):
    assert sorted(path.name for path in drawn.iterdir()) == NAMES
    assert [name for name in NAMES if (drawn / name).read_text() != (IMAGES / name).read_text()] == []


def test_a_page_shows_each_diagram():
    shown = re.findall(r"\]\(images/(\w+\.svg)\)", (ROOT / "docs" / "concepts.md").read_text())
    assert sorted(shown) == NAMES
    assert len(NAMES) == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_diagram_stay_inside(name):
    """By 8 units a letter at size 13, more than a wide letter takes on average."""
    root = ElementTree.parse(IMAGES / name).getroot()
    width, height = map(int, root.attrib["viewBox"].split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y, size = (float(text.attrib[key]) for key in ("x", "y", "font-size"))
        length = (
            len(text.text) * size * 8 / 13 * {"start": 1, "middle": 0.5, "end": 0}[text.attrib["text-anchor"]]
        )
        assert x + length <= width, text.text
        assert 0 < y < height
