"""The line that each deliberate bug changes is there, and so are the rows that should notice it.

`make test` says so: the bugs themselves take half an hour.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.mutants.test_mutants import MUTANTS

PACKAGE = Path(__file__).parents[2] / "fnaccel"


def test_each_bug_finds_its_line_once():
    counts = {mutant.name: (PACKAGE / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert len(counts) == len(MUTANTS) > 200
    assert {name: count for name, count in counts.items() if count != 1} == {}


def named(tests, rows):
    """The rows that the arguments of a deliberate bug choose: a file or folder, and what `-k` says."""
    place, *chosen = tests
    found = [row for row in rows if row.nodeid.startswith((f"{place}/", f"{place}::"))]
    if not chosen:
        return found
    pattern = Expression.compile(chosen[1])
    return [row for row in found if pattern.evaluate(KeywordMatcher.from_item(row))]


def test_each_bug_names_rows_of_make_test(request):
    rows = request.session.items
    files = {str(row.path.relative_to(request.config.rootpath)) for row in rows}
    if len(files) < 200:
        pytest.skip("a run of some files does not collect the rows that deliberate bugs name")
    short = [row for row in rows if row.get_closest_marker("long") is None]
    assert [mutant.name for mutant in MUTANTS if not named(mutant.tests, short)] == []
