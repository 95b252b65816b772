"""docs/accelerate-tests.md names each test of Accelerate 1.15, and each test and page that it cites exists."""

from __future__ import annotations

import collections
import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "accelerate-tests.md"
NAMES = json.loads((Path(__file__).parent / "accelerate_tests.json").read_text())
"""The names of its tests, without `test_`, by file or folder."""

ROW = re.compile(r"^\| ((?:`\w+` ?)+) \| ([\w ]+) \| (.+) \|$")


def sections():
    """The rows of the page by file or folder of Accelerate: names, verdict, where."""
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        key = title.split()[-1].strip("`")
        rows = [ROW.match(line) for line in body.splitlines() if line.startswith("| `")]
        assert all(rows), title
        found["scripts" if key == "test_utils" else key] = [
            (row[1].replace("`", "").split(), row[2], row[3]) for row in rows if row
        ]
    return found


SECTIONS = sections()


@cache
def names_in(path):
    """The names of the tests in one of our files."""
    return set(re.findall(r"^ *def (test_\w+)\(", (ROOT / path).read_text(), re.MULTILINE))


@pytest.mark.parametrize("section", NAMES)
def test_each_test_of_accelerate_stands_on_the_page(section):
    assert sorted({name for names, _, _ in SECTIONS[section] for name in names}) == NAMES[section]


@pytest.mark.parametrize("section", SECTIONS)
def test_what_the_page_cites_exists(section):
    for names, verdict, where in SECTIONS[section]:
        cited = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", where)
        pages = re.findall(r"\]\(([\w/-]+\.md)(?:#[\w-]+)?\)", where)
        assert bool(cited) if verdict == "kept" else bool(pages) == (verdict == "differently"), names
        missing = [f"{path}::{name}" for path, name in cited if name not in names_in(path)]
        assert not missing, names
        assert all((ROOT / "docs" / page).exists() for page in pages), names


def test_its_counts_are_those_of_its_rows():
    counted = collections.Counter()
    for rows in SECTIONS.values():
        for names, verdict, _ in rows:
            counted[verdict] += len(names)
    head = PAGE.read_text().partition("\n## ")[0]
    assert dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", head, re.MULTILINE)) == {
        verdict: str(count) for verdict, count in counted.items()
    }
    assert f"\n{counted.total()} names." in head
    assert "missing" not in counted
