"""Rules with teeth: what the code base may not look like."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import fnaccel
from tests.surface.structure import (
    FILES,
    LOOSE,
    PACKAGE,
    ROW,
    ROWS,
    circles,
    edges,
    for_types,
    imports,
    name_of,
    room_of,
    tree_of,
)

ROOT = PACKAGE.parent


def dotted_names(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file(path):
    text = path.read_text()
    relative = path.relative_to(PACKAGE)
    assert len(text.splitlines()) <= 500
    assert not {"utils", "helpers", "common", "misc"} & {*relative.with_suffix("").parts}
    assert ast.get_docstring(ast.parse(text)), "the first lines say what lives here"
    modules = [module for module, _ in imports(path)]
    if relative.name != "trees.py":
        assert not any(module.split(".")[0] == "optree" for module in modules)
    if relative.parts[0] not in ("world", "launch", "cli"):
        assert not re.search(r"os\.(environ|getenv)", text)
    if relative.name != "_torch.py":
        found = [name for name in dotted_names(text) if re.match(r"(torch|dist)(\.\w+)*\._[a-z]", name)]
        assert not found, f"private torch names belong in _torch.py: {found}"
        assert not any(re.match(r"torch(\.\w+)*\._", module) for module in modules)


def test_the_root_holds_rooms():
    loose = {path.stem for path in FILES if path.parent == PACKAGE}
    assert loose <= LOOSE, "give it a room"
    rooms = {room_of(name_of(path)) for path in FILES} - {"", "__main__"}
    assert rooms == set(ROW), "each room has its row"


def test_imports_point_down():
    up = [
        f"{name} imports {target}"
        for name, targets in edges().items()
        if name not in ("", "__main__")
        for target in targets
        if target and room_of(target) != room_of(name) and ROW[room_of(target)] >= ROW[room_of(name)]
        if ROW[room_of(name)] > 0
    ]
    assert not up, "\n".join(up)


def test_few_imports_are_for_types_only():
    """Annotations may name what stands above, in the place of a Protocol. No picture shows these arrows."""
    assert sum(len(for_types(path)) for path in FILES) <= 24


def test_no_two_files_import_each_other():
    assert circles() == []


ANSWERS = {
    "puts back random streams": {
        "set_state set_rng_state setstate": {
            "world/undo.py": "`StreamStates`",
            "world/random_streams.py": "the streams of devices",
            "data/seeding.py": "Python's and NumPy's, and those of a sampler",
            "checkpoint/random_streams.py": "restore",
            "launch/rendezvous.py": "a state of torch's rendezvous",
        },
        "fork_rng": {
            "models/building.py": "a model is built from a seed",
            "models/meta.py": "as well, of empty values",
            "estimate/trace.py": "as well, to be traced",
        },
    },
    "puts back torch's settings": {
        "set_grad_enabled set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled": {
            "world/undo.py": "`TorchSettings`",
        },
    },
    "asks all ranks for objects": {
        "all_gather_object gather_object broadcast_object_list": {
            "collectives/signature.py": "`gather_objects` and `meet`",
            "data/same_data.py": "readers have a group of their own",
            "data/reader_ranks.py": "as well",
        },
    },
    "compares by the store, where a rank may be late": {
        "compare_set multi_get": {
            "world/record_board.py": "the records of ranks",
            "world/same_order.py": "the order of gathers",
            "world/stall_watch.py": "the first that reports the end",
            "world/joining.py": "who joins",
            "launch/elastic.py": "launchers, before there are ranks",
        },
    },
}
"""Questions that a step or a job has, the calls that answer them, and the files that make these."""


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_in_one_place(question):
    for calls, expected in ANSWERS[question].items():
        callers = {
            str(path.relative_to(PACKAGE))
            for path in FILES
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute) and node.attr in calls.split()
        }
        assert callers <= {*expected}, "use what is there already"
        assert callers == {*expected}, "take it off the list"


def test_the_design_shows_the_same_floor_plan():
    shown = (ROOT / "docs" / "design.md").read_text()
    assert "\n".join(f"{number:2} {row}" for number, row in enumerate(ROWS, 1)) in shown


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
    listed = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
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
