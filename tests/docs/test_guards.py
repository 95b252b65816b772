"""CONTRIBUTING says which test guards which promise: its table leaves no test of a promise out."""

from __future__ import annotations

import re

import pytest

from tests.docs.names import ROOT
from tests.surface.structure import ROW

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
TABLE = PAGE.partition("### Which test guards which promise")[2].partition("\n## ")[0]
GUARDS = [re.findall(r"`(tests/[\w/]+\.py)`", line) for line in TABLE.splitlines() if line.startswith("| ")][
    1:
]
SPANNING = (
    "benchmarks",
    "docs",
    "examples",
    "laws",
    "long_tier",
    "messages",
    "mutants",
    "parity",
    "promises",
    "site",
    "soak",
    "surface",
)
"""Folders of what spans rooms."""
BESIDE = {"gpu", "nvme", "services", "trackers"}
"""Folders of an environment of their own, each with a make target."""


def test_every_promise_has_a_test_that_is_there():
    assert len(GUARDS) > 20
    assert all(GUARDS)
    assert [name for names in GUARDS for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("folder", SPANNING)
def test_every_folder_that_spans_rooms_guards_a_promise(folder):
    assert f"`tests/{folder}/" in TABLE


@pytest.mark.parametrize("folder", ["laws", "parity", "soak"])
def test_every_file_of_laws_and_parity_stands_in_it(folder):
    files = {f"tests/{folder}/{path.name}" for path in (ROOT / "tests" / folder).glob("test_*.py")}
    assert files <= {name for names in GUARDS for name in names}


def test_a_folder_is_a_room_or_spans_rooms():
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    rooms = {room for room in ROW if (ROOT / "fnaccel" / room).is_dir()}
    assert folders - rooms - BESIDE == set(SPANNING)
    assert rooms - folders == set(), "each room has its tests"
