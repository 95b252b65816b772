"""Deliberate bugs: each is patched into a copy of the package, and the suite has to go red.

A mutant that survives means that the tests named beside it are blind to that kind of bug.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants import (
    axes,
    big,
    context,
    core,
    estimate,
    functional,
    launching,
    losses,
    modules,
    optim,
    pipelines,
    pure,
    quantize,
    replicas,
    seeing,
    tensor,
    tracking,
    watchdog,
)
from tests.mutants.mutant import Mutant
from tests.mutants.running import run

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
MUTANTS = [
    *core.MUTANTS,
    *axes.MUTANTS,
    *launching.MUTANTS,
    *losses.MUTANTS,
    *watchdog.MUTANTS,
    *context.MUTANTS,
    *tensor.MUTANTS,
    *tracking.MUTANTS,
    *seeing.MUTANTS,
    *big.MUTANTS,
    *quantize.MUTANTS,
    *modules.MUTANTS,
    *functional.MUTANTS,
    *optim.MUTANTS,
    *pure.MUTANTS,
    *estimate.MUTANTS,
    *replicas.MUTANTS,
    *pipelines.MUTANTS,
]  # fmt: skip


def outcome(mutant: Mutant, where: Path) -> tuple[int | None, str]:
    """pytest's exit code on a mutated copy: 1 is a failed test, anything else is another story."""
    for part in ("fnaccel", "tests"):  # what is compiled keeps its date, and is used
        shutil.copytree(ROOT / part, where / part, ignore=shutil.ignore_patterns("mutants"))
    shutil.copy(ROOT / "pyproject.toml", where)
    (where / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "extending.md", where / "docs")  # tests/extend runs its code
    path = where / "fnaccel" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, (
        f"{mutant.name}: the text to replace stands {text.count(mutant.old)} times"
    )
    path.write_text(text.replace(mutant.old, mutant.new))
    # `make test` has to find it
    arguments = ["-x", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "-m", "not long"]
    code, said = run(where, [*arguments, *mutant.tests], 200)
    return code, said[-2000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_suite_goes_red(tmp_path, mutant):
    code, said = outcome(mutant, tmp_path)
    found = code == 1 and " failed" in said.splitlines()[-1]  # and not an error of pytest
    why = "its -k selects no test" if code == 5 else f"pytest exit code {code}"
    assert found, f"{mutant.name} survived ({why}):\n{said}"


def test_a_copy_without_a_bug_is_green(tmp_path):
    line, tests = (
        "from __future__ import annotations\n",
        ("tests/big", "tests/parity/test_matrix.py", "-k", "facts or 2-sgd and fp64"),
    )
    code, said = outcome(Mutant("none", "errors.py", line, line + "\n", tests), tmp_path)
    assert code == 0, said
    assert " passed" in said.splitlines()[-1]
