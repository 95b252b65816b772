"""Rules with teeth: what the code base may not look like."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fnaccel

PACKAGE = Path(fnaccel.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
# imports point down: a file may import from its own floor and from those below
FLOORS = [
    ["errors", "_torch", "tree"], ["ranks", "devices", "calls", "connections"], ["faults", "joining"], ["peers"], ["world", "units", "interrupts"], ["every_rank"], ["mesh", "state", "loss", "leaf", "step", "notice"],
    ["collectives", "data", "optim", "remote"], ["rows"], ["transforms", "aux_values", "reports", "gradients", "buckets", "capture"],
    ["engine", "scoring", "compiled", "checked_metrics", "skipped_updates", "moving_buffers", "trained_modules", "exchange", "user_draws", "whole_parameters"], ["strategies", "whole_step"], ["plan", "scoping", "lowering", "lending", "updating"],
    ["owned", "state_owner"], ["stepping"], ["program", "tracking"], ["checkpoint"], ["running", "autosave", "signals", "batch_size", "track", "interchange"], ["launch", "testing"], ["config"], ["benching"], ["cli"],
]  # fmt: skip
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []


def dotted_names(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def name_of(path):
    return path.relative_to(PACKAGE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(name_of(path)))
def test_a_file(path):
    text = path.read_text()
    relative = name_of(path)
    assert len(text.splitlines()) <= 400
    assert not {"utils", "helpers", "common", "misc"} & {*relative.with_suffix("").parts}
    assert ast.get_docstring(ast.parse(text)), "the first lines say what lives here"
    modules = [module for module, _ in imports(path)]
    if relative.name != "tree.py":
        assert not any(module.split(".")[0] == "optree" for module in modules)
    if relative.parts[0] not in ("world.py", "launch", "cli"):
        assert not re.search(r"os\.(environ|getenv)", text)
    if relative.name != "_torch.py":
        found = [name for name in dotted_names(text) if re.match(r"(torch|dist)(\.\w+)*\._[a-z]", name)]
        assert not found, f"private torch names belong in _torch.py: {found}"
        assert not any(re.match(r"torch(\.\w+)*\._", module) for module in modules)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(name_of(path)))
def test_imports_point_down(path):
    relative = name_of(path)
    mine = relative.parts[0].removesuffix(".py")
    if mine == "__init__":
        return
    for module, names in imports(path):
        if not module.startswith("fnaccel"):
            continue
        parts = module.split(".")
        targets = [parts[1]] if len(parts) > 1 else [name for name in names if name in FLOOR]
        for target in targets:
            assert target in FLOOR, f"give {target} a floor"
            assert FLOOR[target] <= FLOOR[mine], f"{mine} imports {target}, which stands above it"


def test_every_file_has_a_floor():
    names = {name_of(path).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert names == set(FLOOR)


def test_import_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import fnaccel\n"
        "heavy = ['fnaccel.checkpoint', 'fnaccel.interchange', 'fnaccel.config', 'fnaccel.launch', 'yaml', 'unittest.mock', 'deepspeed', 'torch_xla', 'transformers', 'wandb', 'cattrs', 'tqdm', 'numpy',"
        " 'torch.distributed.tensor', 'torch.distributed.fsdp', 'torch.distributed.checkpoint']\n"
        "print([name for name in heavy if name in sys.modules and name not in before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


PUBLIC = [name for name in dir(fnaccel) if not name.startswith("_")]


def test_public_names_are_few_and_written_down():
    submodules = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    names = [name for name in PUBLIC if name not in submodules or name in ("tree", "errors")]
    listed = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in names if f"`{name}" not in listed and f"fa.{name}" not in listed]
    assert not missing


def test_every_public_thing_says_what_it_does():
    import inspect

    for name in PUBLIC:
        value = getattr(fnaccel, name)
        if not inspect.ismodule(value):
            assert inspect.getdoc(value), name


def test_no_absolute_path_of_a_machine():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    pattern = re.compile(r"(^|[^\w.])/(work|farm|root|home)/")
    for name in listed:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".yaml", ".json") and path.is_file():
            hits = [line for line in path.read_text().splitlines() if pattern.search(line)]
            assert not hits or name.endswith("test_rules.py"), (name, hits[:2])
