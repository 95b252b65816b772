"""Docs are code: every Python block of README and docs runs, page by page, top to bottom.

A block ```text output``` shows the output of the block before it, and is compared.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import types

import pytest
import torch

import fnaccel as fa
from tests.docs.names import PAGES as LINKED
from tests.docs.names import ROOT, resolve

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page):
    """(language, flags, code, line) of each fenced block."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield found[1], found[2].strip(), found[3], text[: found.start()].count("\n") + 2


@pytest.mark.long_except(r"^(?!performance|meta-learning|estimate)")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)).removeprefix("docs/"))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)  # where torch.compile looks globals up
    names = main.__dict__
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        for language, flags, code, line in blocks(page):
            if (language, flags) == ("text", "output"):
                assert _same(code, out.getvalue()), (
                    f"{page.name}:{line} shows\n{code}and prints\n{out.getvalue()}"
                )
            if language != "python" or "no-run" in flags:
                continue
            lines = "\n" * (line - 1) + code
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                exec(compile(lines, str(page), "exec"), names)
        world = names.get("world")
        if world is not None and hasattr(world, "close"):
            stack.callback(world.close)


def _same(shown, printed):
    """Whether a block `text output` shows the output of the block before it. `...` stands for any text."""
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


LINK = re.compile(r"\]\(([^)#\s]*)(#[^)]*)?\)")


def dead_links(page):
    """The links of a page to files, and to headings of pages, that do not exist."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in LINK.findall(text):
        if not target.startswith("http"):
            path = (page.parent / target) if target else page
            if not path.exists() or (anchor and anchor[1:] not in anchors(path)):
                yield target + anchor


def anchors(page):
    """The anchors that the hosting site makes of the headings of a page."""
    return set(heading_anchors(page))


def heading_anchors(page):
    lines = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
    headings = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return [re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert list(dead_links(page)) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A page: `it`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md#a-page-it) [b](#top) [c](gone.md) [d](other.md#gone) [e](#gone) [f](https://x.y#z)\n"
    )
    assert list(dead_links(page)) == ["gone.md", "other.md#gone", "#gone"]


def test_few_blocks_are_left_out():
    """A block that does not run has a reason: it needs several ranks or a GPU."""
    left_out = [
        (p.name, line)
        for p in PAGES
        for lang, flags, _, line in blocks(p)
        if lang == "python" and "no-run" in flags
    ]
    runs = [1 for p in PAGES for lang, flags, _, _ in blocks(p) if lang == "python" and "no-run" not in flags]
    assert len(left_out) <= len(runs) // 4, left_out


def test_the_plan_in_the_readme_is_the_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    names = {"__name__": "__main__"}
    shown = next(code for lang, _, code, _ in _all_blocks(page) if code.startswith("train step of"))
    for language, _, code, _ in blocks(page):
        if language == "python":
            exec(compile(code, str(page), "exec"), names)
            if "print(train_step.plan)" in code:
                break
    try:
        for wanted, found in zip(shown.splitlines(), str(names["train_step"].plan).splitlines(), strict=True):
            assert found.startswith(wanted.removesuffix(" ...)").rstrip()), (wanted, found)
    finally:
        names["world"].close()


def test_the_first_program_of_the_readme_is_a_file(tmp_path):
    """It is complete, 25 lines at most, and its last line is the one that the page shows."""
    programs = [code for lang, _, code, _ in _all_blocks(ROOT / "README.md") if lang == "python"]
    shown = next(code for lang, _, code, _ in _all_blocks(ROOT / "README.md") if lang == "text")
    assert len(programs[0].splitlines()) <= 25
    (tmp_path / "train.py").write_text(programs[0])
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == shown.splitlines()[-1:]
    assert "48/48" in done.stderr


def test_the_readme_has_no_captions_of_figures():
    """They are beside the tables in `benchmarks/README.md`."""
    assert "<sub>" not in (ROOT / "README.md").read_text()
    assert "Reproduce: `make bench-jax`" in (ROOT / "benchmarks" / "README.md").read_text()


def _all_blocks(page):
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield found[1], found[2], found[3], 0


WRITTEN = [path for path in PAGES if path.parent.name == "reference" or path.name == "errors.md"]
"""The pages that docs/reference.py writes."""


def test_the_reference_is_current():
    """`python docs/reference.py` writes these pages; a public name has to be in a group."""
    made = runpy.run_path(str(ROOT / "docs" / "reference.py"))["pages"]()
    assert {str(path.relative_to(ROOT / "docs")): path.read_text() for path in WRITTEN} == made


def test_the_reference_has_one_page_for_a_topic_and_an_index():
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    index = (ROOT / "docs" / "reference" / "README.md").read_text()
    for topic, names in reference["GROUPS"].items():
        page = ROOT / "docs" / reference["topic_path"](topic)
        listed = re.search(rf"^## {topic}\n\n(.*?)\n\n", index, re.DOTALL | re.MULTILINE)
        assert re.findall(r"^- \[`([\w.]+)`\]\(([\w-]+\.md)#[\w-]+\): \S", listed[1], re.MULTILINE) == [
            (name, page.name) for name in names
        ]
        assert len(listed[1].splitlines()) == len(names), "one line each"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_anchor_of_the_reference_is_one_name(page):
    """GitHub and the site count the second heading of a name in ways of their own."""
    found = heading_anchors(page)
    assert sorted(set(found)) == sorted(found)


NAMESPACES = tuple(name for name in fa.__all__ if inspect.ismodule(getattr(fa, name)))


def undocumented(text, things, api):
    """Functions and classes `fa.namespace.name` that a page names and the reference has no entry for."""
    for chain in re.findall(rf"(?<![\w./])fa\.((?:{'|'.join(NAMESPACES)})\.\w+)", text):
        with contextlib.suppress(AttributeError):  # another test finds names that don't exist
            value = resolve(f"fa.{chain}", things)
            entries = (
                f"\n## `{chain}`\n",
                f"\n## `{chain}` (class)\n",
                f"\n## {chain.removeprefix('errors.')}\n",
            )
            if not inspect.ismodule(value) and not any(entry in api for entry in entries):
                yield chain


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_reference_has_each_namespace(namespace):
    pages = [path for path in WRITTEN if (path.name == "errors.md") == (namespace == "errors")]
    entry = r"^## \w+Error$" if namespace == "errors" else rf"^## `{namespace}\.\w+`( \(class\))?$"
    assert sum(len(re.findall(entry, path.read_text(), re.MULTILINE)) for path in pages) > 1


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_reference_has_what_pages_name(page, things):
    api = "".join(path.read_text() for path in WRITTEN)
    assert sorted(set(undocumented(page.read_text(), things, api))) == []


def test_a_name_without_an_entry_is_found(things):
    assert list(undocumented("`fa.tree.map` fa.tree.join", things, "\n## `tree.map`\n")) == ["tree.join"]
