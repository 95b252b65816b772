"""Two pages name each test of Accelerate 1.15, and each test and page that they cite exists.

docs/accelerate-tests.md has the counts, and the tests without a counterpart. tests/docs/accelerate_tests.md has the tests that are kept.
"""

from __future__ import annotations

import collections
import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "accelerate-tests.md"
KEPT = Path(__file__).with_name("accelerate_tests.md")
NAMES = json.loads((Path(__file__).parent / "accelerate_tests.json").read_text())
"""The names of its tests, without `test_`, by file or folder."""

VERDICTS = {
    "Different on purpose": "differently",
    "Needs hardware": "needs hardware",
    "Of its internals": "of its internals",
}
"""The verdict of the rows under each heading of the page."""
ROW = re.compile(r"^\| ([\w.]+) \| ((?:`\w+` ?)+) \| (.+) \|$")


def rows_of(text, verdict):
    """The rows of the table in a text: file or folder of Accelerate, names, verdict, where."""
    rows = [ROW.match(line) for line in text.splitlines() if line.startswith("| ")]
    assert rows
    assert rows[0] is None, "the head of the table"
    assert all(rows[1:]), verdict
    for row in rows[1:]:
        yield row[1], row[2].replace("`", "").split(), verdict, row[3]


def sections():
    """The rows of both pages by file or folder of Accelerate: names, verdict, where."""
    found = collections.defaultdict(list)
    parts = [part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:]]
    assert [title for title, _, _ in parts] == list(VERDICTS)
    texts = [(body, VERDICTS[title]) for title, _, body in parts]
    for text, verdict in [*texts, (KEPT.read_text(), "kept")]:
        for key, names, word, where in rows_of(text, verdict):
            found["scripts" if key == "test_utils" else key].append((names, word, where))
    return found


SECTIONS = sections()


@cache
def names_in(path):
    """The names of the tests in one of our files."""
    return set(re.findall(r"^ *def (test_\w+)\(", (ROOT / path).read_text(), re.MULTILINE))


@pytest.mark.parametrize("section", NAMES)
def test_each_test_of_accelerate_stands_on_a_page(section):
    assert sorted({name for names, _, _ in SECTIONS[section] for name in names}) == NAMES[section]


def test_the_pages_have_no_other_file():
    assert sorted(SECTIONS) == sorted(NAMES)


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
    assert f" {counted.total()} names." in head
    assert "missing" not in counted
