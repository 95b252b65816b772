"""docs/why.md counts the statements of ports beside those of plain loops: here they are counted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.examples import raw_loops, test_nanogpt
from tests.examples.running import ROOT

SHARED = {
    "dpo": ("Preferences",),
    "grpo": ("Policy",),
    "contrastive": ("data", "Encoders"),
    "teachers": ("data", "Net"),
    "diffusion": ("Denoiser", "sample", "digits"),
    "nanogpt": ("Config", "Block", "GPT", "Windows", "prepare", "build", "generate"),
}
"""The models, the data and what both would print: no part of a loop."""


def statements(node):
    """Without docstrings, imports and the parsing of flags."""
    kinds = (ast.Import, ast.ImportFrom)
    flags = re.compile(r"^(parser|args|save)\b|parser\.add_argument|argparse|__main__")
    return sum(
        isinstance(each, ast.stmt)
        and not isinstance(each, kinds)
        and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        and not flags.search(ast.unparse(each).split("\n")[0])
        for each in ast.walk(node)
    )


def of_functions(path, wanted):
    tree = ast.parse(path.read_text())
    tree.body = [each for each in tree.body if wanted(getattr(each, "name", ""))]
    return tree, statements(tree)


def of_port(name):
    left_out = {*SHARED[name], "cached", "cache"}  # GradCache is an option of one script, in no plain loop
    return of_functions(ROOT / "examples" / f"{name}.py", lambda own: own not in left_out)[1]


def of_loop(name):
    if name == "nanogpt":
        return of_functions(Path(test_nanogpt.__file__), lambda own: own == "plain_loop")[1]
    path = Path(raw_loops.__file__)
    tree, count = of_functions(path, lambda own: own == name)
    clips = "clipped(" in ast.unparse(tree)
    return count + (of_functions(path, lambda own: own == "clipped")[1] if clips else 0)


@pytest.mark.parametrize("name", SHARED)
def test_the_page_has_the_counts(name):
    row = rf"\| \[{name}.py\]\(\.\./examples/{name}.py\)[^|]*\| (\d+) \| (\d+) \|"
    found = re.search(row, (ROOT / "docs" / "why.md").read_text())
    assert found, (name, of_port(name), of_loop(name))
    assert (int(found[1]), int(found[2])) == (of_port(name), of_loop(name))
