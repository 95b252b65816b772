"""Examples in docstrings: finds them, and runs each in a namespace of its own.

The convention is doctest's: a section `Example:` with `>>>` lines, and expected output if it is short. Output that
is left out is not compared. `Example, on 2 ranks:` runs on two real ranks. Error classes have a section `Fails:` and
a section `Works:`. A line `$ fnaccel ...` runs the command line.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import inspect
import math
import operator
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest import mock

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.cli.main import main
from tests.surface.structure import FILES, PACKAGE, name_of

HEADING = re.compile(r"^( *)(Example|Fails|Works)(?:, on (\d+) ranks)?:$")
CODE = re.compile(r" *(>>>|\$) ")
LOOKS_LIKE_AN_EXAMPLE = re.compile(
    r"\b(Examples?|Fails|Works)(, on \d+ ranks)?:|>>>|\bExample\b|\b[Ff]or example,? `"
)


@attrs.frozen(slots=False)
class Section:
    """One example section of one docstring.

    Attributes:
        module: the module's name, without `fnaccel.`.
        owner: the qualified name of the function or class; empty for the module itself.
        kind: `"Example"`, `"Fails"` or `"Works"`.
        ranks: the number of ranks that run it.
        code: the lines below the heading.
        line: the line of the file at which the code starts.
    """

    module: str
    owner: str
    kind: str
    ranks: int
    code: str
    line: int

    @property
    def id(self) -> str:
        return f"{self.module}:{self.owner}:{self.kind}"

    @property
    def path(self) -> str:
        return str(PACKAGE / (self.module.replace(".", "/") + ".py"))

    @functools.cached_property
    def examples(self) -> list[doctest.Example]:
        return doctest.DocTestParser().get_examples(self.code, self.id)


def docstrings():
    """(module, owner, text, line) of every docstring of the package."""
    for path in FILES:
        yield from _docstrings(ast.parse(path.read_text()), name_of(path), "")


def _docstrings(node, module, owner):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            if isinstance(child.value.value, str):
                yield module, owner, inspect.cleandoc(child.value.value), child.lineno
        elif isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from _docstrings(child, module, f"{owner}.{child.name}".lstrip("."))
        else:
            yield from _docstrings(child, module, owner)


def split(text):
    """The prose of a docstring, and its example sections as (kind, ranks, code, line)."""
    prose, parts, lines = [], [], text.splitlines()
    at = 0
    while at < len(lines):
        heading = HEADING.match(lines[at])
        at += 1
        if heading is None:
            prose.append(lines[at - 1])
            continue
        start, indent = at, len(heading[1])
        while at < len(lines) and (not lines[at].strip() or _indent(lines[at]) > indent):
            at += 1
        parts.append((heading[2], int(heading[3] or 1), "\n".join(lines[start:at]) + "\n", start))
    return "\n".join(prose), parts


def _indent(line):
    return len(line) - len(line.lstrip())


@functools.cache
def sections() -> list[Section]:
    """Every example section of the package."""
    return [
        Section(module, owner, kind, ranks, code, line + offset)
        for module, owner, text, line in docstrings()
        for kind, ranks, code, offset in split(text)[1]
    ]


def unexecuted():
    """Text of docstrings that looks like an example, but would not be executed."""
    for module, owner, text, line in docstrings():
        prose, parts = split(text)
        yield from (f"{module}:{owner}:{line}: {hit[0]}" for hit in LOOKS_LIKE_AN_EXAMPLE.finditer(prose))
        yield from (
            f"{module}:{owner}:{line + offset}: no code" for *_, code, offset in parts if not CODE.match(code)
        )


# -- the world that examples see -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class GPT(nn.Module):
    """The model of all examples. It has no attention, so that it is fast."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def loss_fn(model, batch):
    tokens, labels = batch["tokens"], batch["labels"]
    nll = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return fa.Mean(nll, weight=labels.numel())


def make(step, model=GPT, strategy="local"):
    return fa.train_step(step, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.1))


TRAIN = "import fnaccel as fa; recipe = fa.config.recipe(); world = fa.start()"
"""The text of `train.py` in examples of the command line."""


def _dataset():
    tokens = torch.randint(16, (12, 9), generator=torch.Generator().manual_seed(0))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def namespace(world, code):
    """The names that an example of a public name can use. docs/reference/README.md lists them."""
    dataset = _dataset()
    loader = DataLoader(dataset, batch_size=4)
    names = {
        "fa": fa, "torch": torch, "nn": nn, "F": F, "attrs": attrs, "math": math, "Path": Path,
        "DataLoader": DataLoader,
        "world": world, "GPT": GPT, "loss_fn": loss_fn, "dataset": dataset, "loader": loader,
        "make": make, "batch": next(iter(loader)), "batches": list(loader),
    }  # fmt: skip
    if re.search(r"\binfo\b", code):
        names["info"] = fa.LossInfo(fa.random.key(0), rows=torch.arange(4))
    if re.search(r"\b(train_step|state)\b", code):
        names["train_step"] = make(loss_fn, strategy="ddp" if world.size > 1 else "local")
        names["state"] = names["train_step"].init(seed=0)
    return names


GROUPS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "reference.py"))["GROUPS"]
"""The public names, as docs/reference lists them."""


@functools.cache
def public():
    """(module, qualified name) of each public function and class."""
    values = [operator.attrgetter(name)(fa) for names in GROUPS.values() for name in names]
    values += vars(fa.errors).values()
    return {
        (value.__module__, value.__qualname__)
        for value in values
        if inspect.isclass(value) or inspect.isfunction(value)
    }


def names_for(section, world):
    """The namespace of a section. An example of an internal name also sees the globals of its module."""
    module = f"fnaccel.{section.module}".rstrip(".")
    names = namespace(world, section.code)
    if module.startswith("fnaccel.launch.carrier"):  # what each carrier takes
        request = vars(importlib.import_module("fnaccel.launch.request"))
        names |= {name: value for name, value in request.items() if name[:2] != "__"}
    if (module, section.owner.split(".")[0]) not in public():
        names |= {
            name: value for name, value in vars(importlib.import_module(module)).items() if name[:2] != "__"
        }
    return names | {"__name__": "__main__"}


# -- running ---------------------------------------------------------------------------------------------------


class Checker(doctest.OutputChecker):
    """Output that a docstring leaves out is not compared."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


class FailedAsShownError(Exception):
    """A `Fails:` section raised the error that its docstring describes."""


def run(section, folder):
    """Run one section, with `folder` as the working directory.

    Raises:
        FailedAsShownError: the last example of a `Fails:` section raised the error class that it belongs to.
        AssertionError: the output differs, or a command failed.
    """
    with contextlib.chdir(folder), mock.patch.dict(os.environ):
        if section.code.lstrip().startswith("$"):
            _run_shell(section)
            return
        with fa.start(device="cpu") as world:
            torch.manual_seed(0)
            _run_python(section, names_for(section, world))


def _run_python(section, names):
    test = doctest.DocTest(section.examples, names, section.id, section.path, section.line, section.code)
    runner = doctest.DebugRunner(
        Checker(), verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    try:
        runner.run(test, out=lambda text: None, clear_globs=False)
    except doctest.DocTestFailure as failure:
        shown = failure.example
        raise AssertionError(
            f"{section.id}\n{shown.source}expected\n{shown.want}got\n{failure.got}"
        ) from None
    except doctest.UnexpectedException as failure:
        error = failure.exc_info[1]
        last = failure.example is section.examples[-1]
        if section.kind == "Fails" and last and type(error).__name__ == section.owner:
            raise FailedAsShownError(section.id) from None
        error.add_note(f"in the example of {section.id}: {failure.example.source}")
        raise error from None


def _run_shell(section):
    """Run the `$ fnaccel` lines of a section."""
    Path("train.py").write_text(TRAIN)
    for line in section.code.splitlines():
        command = shlex.split(line.strip().removeprefix("$ "), comments=True)
        if not command:
            continue
        assert command[0] == "fnaccel", line
        code, printed = _fork(command[1:])
        if section.kind == "Fails" and code != 0 and section.owner in printed:
            raise FailedAsShownError(section.id)
        assert code == 0, f"{section.id}: {line.strip()} ended with {code}\n{printed}"


def _fork(arguments):
    """The exit code of `fnaccel ARGUMENTS`, and everything that it and its ranks print.

    It runs in a fork of this process, because the fork needs no imports.
    """
    with Path("printed").open("w+") as file:
        pid = os.fork()
        if pid == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            code = 1
            try:
                code = main(arguments)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        return code, file.read()
