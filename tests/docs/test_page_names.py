"""Every file, make target, flag and function that a page names exists."""

from __future__ import annotations

import re

import pytest

import fnaccel as fa
from tests.docs.names import (
    PAGES,
    ROOT,
    THEIRS,
    check,
    commands,
    flags_of_script,
    missing_files,
    missing_flags,
    missing_names,
    missing_targets,
    spans,
)
from tests.surface.structure import FILES

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_the_files_of_a_page_exist(page):
    assert missing_files(page.read_text()) == []


@by_page
def test_the_make_targets_of_a_page_exist(page):
    assert missing_targets(page.read_text()) == []


@by_page
def test_the_flags_of_a_page_exist(page):
    assert missing_flags(page.read_text()) == []


@by_page
def test_the_functions_of_a_page_exist(page, things):
    assert missing_names(page.read_text(), things) == []


@by_page
def test_the_arguments_of_a_page_exist(page, things):
    wrong = []
    for span in spans(page.read_text()):
        if span.startswith("fa."):
            try:
                check(span, things)
            except fa.errors.CapabilityError:  # the page says what is refused
                continue
            except (AssertionError, AttributeError, TypeError) as error:
                wrong.append((span, str(error)))
    assert wrong == []


@pytest.mark.parametrize(
    ("find", "text", "absent"),
    [
        (missing_files, "`step/foresight.py` and `step/spec.py`", ["step/foresight.py"]),
        (missing_files, "`strategies/nothing`, `strategies/tensor/`", []),
        (missing_files, "`docs/nothing` and `docs/index.md`", ["docs/nothing"]),
        (missing_files, "`gone.py`, `./fnaccel.yaml`, `params/0.weight`, `a/b c.py`", ["gone.py"]),
        (missing_files, "```\npython examples/gone.py\nfnaccel plan examples/train_gpt.py:loss_fn\n```\n", ["examples/gone.py"]),
        (missing_files, "| Accelerate | here |\n|---|---|\n| `nlp_example.py` | `gone.py` |\n\n`left.py`", ["gone.py", "left.py"]),
        (missing_targets, "`make lint types`, `make it`\n```\nmake test # all\n```\n", ["it"]),
        (missing_flags, "`fnaccel launch -n 2 --gpu 2 train.py --gpu`", ["fnaccel launch --gpu"]),
        (missing_flags, "`fnaccel launch -n 2 examples/train_gpt.py --dir runs --nothing`", ["examples/train_gpt.py --nothing"]),
        (missing_flags, "```\nOMP_NUM_THREADS=1 fnaccel config show --precision bf16 \\\n    --answers x\n```\n", ["fnaccel config show --answers"]),
        (missing_flags, "```\n$ python examples/train_gpt.py --nothing\n```\n", ["examples/train_gpt.py --nothing"]),
        (missing_flags, "`fnaccel evaluate x`, `fnaccel --version`", ["fnaccel evaluate"]),
        (missing_flags, "`--nothing`, `--max-restarts 3`, `--set=a=b`", ["--nothing"]),
        (missing_flags, "```\npython benchmarks/compiled.py --only gpu --fast\n```\n", ["benchmarks/compiled.py --fast"]),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(find, text, absent):
    assert find(text) == absent


def test_a_function_that_does_not_exist_is_found(things):
    page = "`fa.fsdp(2)` `fa.transforms.nothing`\n```python no-run\nfa.seeing.gone()\nx.fa.other()\n```\n"
    assert missing_names(page, things) == ["fa.transforms.nothing", "fa.seeing.gone"]


def test_scripts_have_the_flags_of_what_they_import():
    assert "--quick" in flags_of_script("benchmarks/step_overhead.py")


def test_the_files_of_others_are_named_somewhere():
    words = {
        word.removeprefix("./")
        for page in PAGES
        for command in commands(page.read_text())
        for word in command
    }
    assert sorted(THEIRS - words) == []


ABOUT_THE_WORK = re.compile(
    r"\b(the|an) (issue|reviewer|brief|founder|stranger)s?\b|\bagreed\s+(design|architecture)|\b(this|last|a) session of|"
    r"REVIEW\.md|\bissues? #?\d|peer review|while building|\bsub-?agents?\b|\bthe helpers?\b",
    re.IGNORECASE,
)
"""Talk about how this repository is written, which tells a reader nothing about fnaccel."""


@pytest.mark.parametrize("path", [*PAGES, *FILES], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_speaks_to_its_reader(path):
    assert [found[0] for found in ABOUT_THE_WORK.finditer(path.read_text())] == []


@pytest.mark.parametrize(
    "text", ["The issue asked for it.", "as the agreed design has it", "see REVIEW.md", "issue 31 says"]
)
def test_talk_about_the_work_is_found(text):
    assert ABOUT_THE_WORK.search(text)
