"""`import fnaccel` loads nothing, and each public name is the object that a type checker sees."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fnaccel as fa

PACKAGES = [fa, fa.config]


def stated(package):
    """The (module, name) pairs that a package imports in the sight of a type checker."""
    blocks = [
        [block, *getattr(block, "body", ())] for block in ast.parse(Path(package.__file__).read_text()).body
    ]
    return [
        (imported.module, name.name)
        for imported in itertools.chain(*blocks)
        if isinstance(imported, ast.ImportFrom)
        for name in imported.names
        if name.asname == name.name
    ]


def test_importing_loads_no_torch():
    code = "import sys, fnaccel; print('torch' in sys.modules, fnaccel.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", fa.__version__]


def test_a_training_script_imports_no_dtensor():
    """`torch.distributed.tensor` and sympy, which it needs, take longer to import than all of torch."""
    code = (
        "import sys, fnaccel as fa; fa.start, fa.distribute, fa.train_step, fa.adamw, fa.shard, fa.scan, fa.save;"
        "print({'torch', 'torch.distributed.tensor', 'sympy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{'torch'}"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_names_are_those_that_a_type_checker_sees(package):
    for module, name in stated(package):
        imported = importlib.import_module(f"fnaccel.{name}") if module == "fnaccel" else None
        expected = imported or getattr(importlib.import_module(module), name)
        assert getattr(package, name) is expected, name
    names = [name for _, name in stated(package)]
    assert sorted(names) == package.__all__
    assert names
    assert set(names) <= set(dir(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_are_imported_at_once(package):
    names = {}
    exec(f"from {package.__name__} import *", names)
    assert {*names} - {"__builtins__"} == {*package.__all__}
    assert not {"Any", "TYPE_CHECKING", "importlib", "sys"} & {*dir(package)}


def test_help_lists_each_name_once_under_its_topic():
    _, *topics = re.split(r"\n\n(?=[A-Z][a-z ]+\n    )", fa.__doc__)
    listed = [name for topic in topics for name in topic.split("\n", 1)[1].split()]
    assert sorted(listed) == fa.__all__
    assert len(topics) == 9
    spaces = topics[-1].split()[1:]
    assert spaces == sorted(
        name for name in fa.__all__ if inspect.ismodule(getattr(fa, name)) and name != "schedules"
    )


@pytest.mark.long
def test_other_names():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(fa, "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match=r"Did you mean fa\.interchange\.adopt\?"):
        getattr(fa, "adopt")  # noqa: B009
    with pytest.raises(AttributeError, match=r"module 'fnaccel.config' has no attribute 'nothing'$"):
        getattr(fa.config, "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match=r"Did you mean fa\.schedules\.linear\?"):
        getattr(fa, "linear")  # noqa: B009
    code = "import fnaccel as fa; print(fa.testing.RankPool.__name__, fa.track.JsonlTracker.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["RankPool", "JsonlTracker"]
