"""`import fnaccel` loads nothing, and each public name is the object that a type checker sees."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fnaccel as fa

SOURCE = ast.parse(Path(fa.__file__).read_text())
STATED = [
    (found.module, name.name)
    for block in SOURCE.body
    if isinstance(block, ast.If)
    for found in block.body
    if isinstance(found, ast.ImportFrom)
    for name in found.names
]


def test_importing_loads_no_torch():
    code = "import sys, fnaccel; print('torch' in sys.modules, fnaccel.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", fa.__version__]


def test_the_names_are_those_that_a_type_checker_sees():
    for module, name in STATED:
        stated = importlib.import_module(f"fnaccel.{name}") if module == "fnaccel" else None
        expected = stated or getattr(importlib.import_module(module), name)
        assert getattr(fa, name) is expected, name
    assert {name for _, name in STATED} <= set(dir(fa))


def test_other_names():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(fa, "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match=r"Did you mean fa\.interchange\.adopt\?"):
        getattr(fa, "adopt")  # noqa: B009
    with pytest.raises(AttributeError, match=r"Did you mean fa\.schedules\.linear\?"):
        getattr(fa, "linear")  # noqa: B009
    code = "import fnaccel as fa; print(fa.testing.RankPool.__name__, fa.track.JsonlTracker.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["RankPool", "JsonlTracker"]
