"""The line that each deliberate bug changes is there. `make test` says so: the bugs themselves take half an hour."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.test_mutants import MUTANTS

PACKAGE = Path(__file__).parents[2] / "fnaccel"


def test_each_bug_finds_its_line_once():
    counts = {mutant.name: (PACKAGE / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert len(counts) == len(MUTANTS) > 200
    assert {name: count for name, count in counts.items() if count != 1} == {}
