"""What docs/build_site.py changes in a copy of a page, and the glossary that the search reads. No environment is needed."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.names import ROOT

SITE = runpy.run_path(str(ROOT / "docs" / "build_site.py"))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text())["questions"]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The folder that MkDocs reads."""
    folder = tmp_path_factory.mktemp("copies")
    SITE["stage"](folder)
    return folder


def rewritten(text, source="docs/page.md"):
    return SITE["Stage"](SITE["entries"](), {}).rewritten(Path(source), text)


def test_the_name_of_a_public_function_is_a_link():
    assert rewritten("`fa.clip_norm(step, 1.0)`") == (
        "[`fa.clip_norm(step, 1.0)`](reference/transforms.md#clip_norm)"
    )
    assert rewritten("`fa.errors.ArgumentError`", "README.md") == (
        "[`fa.errors.ArgumentError`](../errors.md#argumenterror)"
    )
    for kept in ("# `fa.clip_norm`", "[`fa.clip_norm`](#here)", "`fa.nothing`", "```\n`fa.clip_norm`\n```"):
        assert rewritten(kept) == kept


def test_flags_of_code_and_comments_are_left_out():
    assert (
        rewritten("```python no-run\nx = 1\n```\n<!-- end -->\n| a |\n") == "```python\nx = 1\n```\n\n| a |\n"
    )


def test_files_outside_of_docs_are_pages_of_the_site(copies):
    assert "(repository/examples/nanogpt.py.md)" in (copies / "index.md").read_text()
    script = (copies / "repository" / "examples" / "nanogpt.py.md").read_text()
    assert (ROOT / "examples" / "nanogpt.py").read_text() in script
    notebook = (copies / "repository" / "examples" / "notebooks" / "train_digits.ipynb.md").read_text()
    assert "# Train in a notebook\n" in notebook
    assert "```python\nimport torch\n" in notebook
    assert "(../tutorial.md)" in (copies / "repository" / "README.md").read_text()
    assert "(pytorch_job.yaml.md)" in (copies / "repository" / "examples" / "jobs" / "README.md").read_text()
    assert not [path for path in copies.rglob("*") if path.name.startswith(".")], "MkDocs leaves these out"


def test_a_link_that_leads_nowhere_raises():
    with pytest.raises(SystemExit, match=r"docs/page.md: the link to gone.md leads nowhere"):
        rewritten("[a](gone.md)")


def test_the_words_of_the_glossary_lead_to_pages(copies):
    hints = json.loads((copies / "troubleshooting.md").read_text().split("---\n")[1])
    assert {"deadlock", "hangs", "oom"} <= set(hints["tags"])
    entries = [line for line in GLOSSARY.splitlines() if line.startswith("- ")]
    assert sum(map(len, SITE["glossary"]().values())) == sum(
        entry.partition(": ")[0].count(", ") + 1 for entry in entries
    ), "each line has words, a colon and a link"
    words = [re.match(r"- \*\*(.+?)\*\*", entry)[1].lower() for entry in entries]
    assert words == sorted(words)
    assert len(GLOSSARY.splitlines()) <= 80


def test_the_parts_of_the_site_are_in_order():
    class Loader(yaml.SafeLoader):
        """Knows the tags of MkDocs."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    assert [name for part in nav for name in part] == ["Start", "Guides", "Strategies", "Reference", "Extend"]


def test_there_are_thirty_questions():
    assert len(QUESTIONS) >= 30
    pages = {page for answers in QUESTIONS.values() for page in answers}
    assert [page for page in pages if not (ROOT / "docs" / page).exists()] == []
    assert "glossary.md" not in pages, "a page answers, and not a list of pages"
