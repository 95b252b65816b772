"""Every example in a docstring of fnaccel is executed, and prints the output that it shows."""

from __future__ import annotations

import contextlib
import inspect
import operator
from pathlib import Path

import pytest

import fnaccel as fa
from tests.docs.examples import (
    GROUPS,
    LOOKS_LIKE_AN_EXAMPLE,
    FailedAsShownError,
    Section,
    run,
    sections,
    split,
    unexecuted,
)

SECTIONS = sorted(sections(), key=lambda section: -section.ranks)
"""Sections with several ranks come first, so that ranks are forked before this process has run anything."""


def test_every_example_is_executed():
    assert list(unexecuted()) == [], "write it as `Example:` with `>>>` lines"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.id)
def test_example(section, pools, tmp_path):
    expected = pytest.raises(FailedAsShownError) if section.kind == "Fails" else contextlib.nullcontext()
    with expected:
        if section.ranks > 1:
            pools.run(section.ranks, run, section, tmp_path)
        else:
            run(section, tmp_path)


EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"
PUBLIC = [name for names in GROUPS.values() for name in names]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_an_example(name):
    value = operator.attrgetter(name)(fa)
    if name.startswith("extend."):  # the page is the example
        assert f"`{name.removeprefix('extend.')}`" in EXTENDING.read_text()
        return
    assert inspect.ismodule(value) or split(inspect.getdoc(value) or "")[1], f"fa.{name} has no example"


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [
        ("Example", ">>> 1 + 1\n3", AssertionError),
        ("Example", ">>> 1 / 0", ZeroDivisionError),
        ("Fails", ">>> fa.config.from_yaml('precison: bf16')", fa.errors.ConfigError),
        ("Fails", "$ fnaccel --versoin", AssertionError),
    ],
)
def test_wrong_example_is_noticed(kind, code, error, tmp_path):
    with pytest.raises(error):
        run(Section("errors", "ArgumentError", kind, 1, code + "\n", 1), tmp_path)


@pytest.mark.parametrize("text", ["Example: `fa.gather(x)`.", "Fails: `x`. Works: `y`.", "For example `x`."])
def test_example_in_prose_is_noticed(text):
    assert LOOKS_LIKE_AN_EXAMPLE.search(text)
