"""A copy of the package without some of its tenants trains, saves and restores, and says what it lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.surface.tenants import (
    COMMANDS,
    PACKAGE,
    SCRIPT,
    TENANTS,
    USES,
    copy_without,
    core_names,
    mass,
)

ROOT = Path(__file__).parents[2]
CORE = [
    "tests/program/test_program.py", "tests/loop/test_running.py", "tests/tree/test_tree.py", "tests/world/test_world_ranks.py",
    "tests/loop/test_preemption.py", "tests/collectives", "tests/engine/test_order_of_passes.py", "tests/extend",
    "tests/program/test_second_gradient.py", "tests/checkpoint/test_restore.py", "tests/checkpoint/test_resume.py",
    "tests/checkpoint/test_background.py", "tests/loop/test_saves.py",
]  # fmt: skip
"""Files of tests that use little beside the core."""


MOST_NAMES = 289
"""Names of the core that tenants import beside what is public. They only sink."""

MOST_LINES, MOST_STATEMENTS = 86_087, 47_309
"""Of the package. A change that deletes lowers them, and a capability adds the lines that its issue names."""


def run(folder, *words):
    environ = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def test_each_tenant_is_there():
    missing = [path for paths in TENANTS.values() for path in paths if not (PACKAGE / path).exists()]
    assert not missing


def test_tenants_import_no_more_of_the_core():
    assert len(core_names()) <= MOST_NAMES, "python -m tests.surface.tenants prints them"


def test_the_package_gets_no_longer():
    lines, statements = mass()
    assert lines <= MOST_LINES
    assert statements <= MOST_STATEMENTS


LAUNCHED = """\
import fnaccel as fa
with fa.start() as world:
    world.barrier()
    print(f"{world.rank} of {world.size}\\n", end="", flush=True)  # one write: lines of two ranks do not mix
"""


def without(names, folder):
    """Run the script and a launch in a copy without these, and each of their commands."""
    copy_without(names, folder)
    uses = [USES[name] for name in names if name in USES]
    done = run(folder, "-c", SCRIPT.replace("USES", repr(uses)))
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert len(said) == len(uses)
    assert all(line.startswith("this copy of fnaccel has no fnaccel.") for line in said), said
    (folder / "launched.py").write_text(LAUNCHED)
    done = run(folder, "-m", "fnaccel", "launch", "--cpu", "-n", "2", "launched.py")
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"], done.stderr[-2000:]
    for name in names:
        if name in COMMANDS:
            done = run(folder, "-m", "fnaccel", *COMMANDS[name].split())
            assert "this copy of fnaccel has no fnaccel." in done.stderr, (name, done.stderr[-2000:])
            assert done.returncode == 2


@pytest.mark.long
@pytest.mark.parametrize("name", TENANTS)
def test_a_copy_without_one_trains_and_names_it(tmp_path, name):
    without([name], tmp_path)


@pytest.mark.long
def test_a_copy_without_all_of_them_trains_and_names_each(tmp_path):
    without(list(TENANTS), tmp_path)


@pytest.mark.long
def test_the_core_suite_passes_in_a_copy_without_all_of_them(tmp_path):
    copy_without(list(TENANTS), tmp_path)
    for name in ("tests", "docs", "pyproject.toml", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.surface.core_suite"]
    done = run(tmp_path, "-m", "pytest", *words, "-m", "not long", *CORE)
    assert done.returncode == 0, done.stdout[-4000:]
    passed, left_out = map(int, re.search(r"counts (\d+) (\d+)", done.stdout).groups())
    assert passed > 400
    assert left_out < passed / 10
