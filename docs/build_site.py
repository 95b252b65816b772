"""Builds the site of these pages: `make docs`, or `python docs/build_site.py --out FOLDER`.

The pages stay plain Markdown with links that work in the repository. This script copies them to a
temporary folder, of which MkDocs makes the site by mkdocs.yml. A copy differs from its page in this:

- Files outside of docs/ to which a page links are pages of the site, under repository/. The site has no address of a
  repository to link to, and a reader without a network has no repository: Markdown is copied as a page, a script or a
  recipe as a page with its text, a notebook as a page with its cells, a folder as a list.
- A code span that names a public function, `fa.clip_norm(1.0)`, is a link to its entry in the reference.
- Comments of HTML and the flags of code blocks are left out.
- The head of a copy has hints for the search: how much a hit counts, and the words of docs/glossary.md that lead to
  the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOKEN = re.compile(
    r"(?P<fence>^(?P<ticks>`{3,})(?P<language>\w*)[^\n]*\n.*?^(?P=ticks)$)"
    r"|(?P<comment>^<!--.*?-->$)"
    r"|(?P<heading>^#[^\n]*$)"
    r"|(?P<link>\[(?:[^\[\]`]|`[^`]*`|\[[^\[\]]*\])*\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\))"
    r"|(?P<span>`[^`\n]+`)",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(r"`fa\.([A-Za-z_][\w.]*)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
PICTURES = (".png", ".svg")
BOOST = {
    "reference/": 0.7,
    "repository/": 0.2,
    "decisions.md": 0.3,
    "accelerate-tests.md": 0.2,
    "accelerate-names.md": 0.5,
    "errors.md": 0.5,
}
"""How much a hit in these pages counts beside a hit in a guide, by the start of the path."""


@dataclasses.dataclass
class Stage:
    """The copies of the pages. `waiting` has the files, relative to the root, that are still to be copied."""

    entries: dict[str, str]
    words: dict[str, list[str]]
    pages: dict[str, str] = dataclasses.field(default_factory=dict)
    waiting: list[Path] = dataclasses.field(default_factory=list)

    def fill(self) -> None:
        """Copy docs/ and the files to which its pages link, and so on."""
        self.waiting = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
        while self.waiting:
            source = self.waiting.pop()
            if place_of(source) not in self.pages:
                self.pages[place_of(source)] = ""  # its links may lead back to it
                self.pages[place_of(source)] = self.text_of(source)

    def text_of(self, source: Path) -> str:
        """The text of a page of the site."""
        path, place = ROOT / source, place_of(source)
        boost = next((boost for start, boost in BOOST.items() if place.startswith(start)), 1.0)
        hints: dict[str, object] = {"search": {"boost": boost}, "tags": self.words.get(place, [])}
        if source.suffix == ".md":
            text = self.rewritten(source, path.read_text())
        elif path.is_dir():
            listed = "".join(
                f"- [{file.name}]({file.name})\n" for file in sorted(path.iterdir()) if file.is_file()
            )
            text = self.rewritten(source / "README.md", f"# {source}/\n\n{listed}")
        elif source.suffix == ".ipynb":
            hints = {"search": {"exclude": True}}
            text = self.rewritten(source, cells_of(path))
        else:
            hints = {"search": {"exclude": True}}
            language = LANGUAGES.get(source.suffix, "text")
            text = f"# {source}\n\n`````{language}\n{path.read_text().rstrip()}\n`````\n"
        return f"---\n{json.dumps(hints)}\n---\n\n{text}"

    def rewritten(self, source: Path, text: str) -> str:
        """The text of a page with links that work on the site."""

        def replace(found: re.Match[str]) -> str:
            whole = found[0]
            if found["fence"]:
                code = whole.partition("\n")[2]
                return f"{found['ticks']}{found['language']}\n{code}"
            if found["comment"]:
                return ""
            if found["link"]:
                return self.link(source, found)
            return self.named(source, whole) if found["span"] else whole

        return TOKEN.sub(replace, text)

    def link(self, source: Path, found: re.Match[str]) -> str:
        """A link with the place of its target on the site."""
        target = found["target"]
        if not target or ":" in target:
            return found[0]
        path = Path(os.path.normpath(source.parent / target))
        if not (ROOT / path).exists():
            raise SystemExit(f"{source}: the link to {target} leads nowhere")
        place = place_of(path)
        if path.suffix in PICTURES:
            self.pages.setdefault(place, "")
        else:
            self.waiting.append(path)
        text = found[0][: found.start("target") - found.start() - 1]
        return f"{text}({_relative(place, source)}{found['anchor'] or ''})"

    def named(self, source: Path, span: str) -> str:
        """A code span, as a link if it starts with a public name."""
        name = NAME.match(span)
        entry = self.entries.get(name[1]) if name else None
        return f"[{span}]({_relative(entry, source)})" if entry else span


def place_of(source: Path) -> str:
    """Where a file of the repository is in the folder that MkDocs reads."""
    if source.parts[0] == "docs":
        return str(source.relative_to("docs"))
    inside = Path("repository") / source
    if (ROOT / source).is_dir():
        return str(inside / "README.md")
    if source.suffix in (".md", *PICTURES):
        return str(inside)
    return str(inside.with_name(source.name.lstrip("."))) + ".md"  # MkDocs leaves hidden files out


def _relative(place: str, source: Path) -> str:
    return os.path.relpath(place, Path(place_of(source)).parent)


def cells_of(notebook: Path) -> str:
    """The cells of a notebook as Markdown."""
    cells = json.loads(notebook.read_text())["cells"]
    sources = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for text, kind in sources)


def entries() -> dict[str, str]:
    """The entry of each public name: a page of docs/ with an anchor."""
    index = (ROOT / "docs" / "reference" / "README.md").read_text()
    listed = re.findall(r"^- \[`([\w.]+)`\]\(([\w-]+\.md#[\w-]+)\)", index, re.MULTILINE)
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    return {name: f"reference/{entry}" for name, entry in listed} | {
        f"errors.{name}": f"errors.md#{name.lower()}" for name in headings
    }


def glossary() -> dict[str, list[str]]:
    """The words of docs/glossary.md by the page to which they lead."""
    words: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        if entry := re.fullmatch(r"- (\*\*.+?): .*?\]\(([\w-]+\.md).*", line):
            words.setdefault(entry[2], []).extend(entry[1].replace("*", "").split(", "))
    return words


def stage(folder: Path) -> None:
    """Write the copies of the pages, their pictures and scripts."""
    copies = Stage(entries(), glossary())
    copies.fill()
    for place, text in copies.pages.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in PICTURES:
            inside = place.removeprefix("repository/")
            shutil.copy(ROOT / (inside if place != inside else f"docs/{place}"), path)
        else:
            path.write_text(text)
    for name in ("images", "assets"):
        shutil.copytree(ROOT / "docs" / name, folder / name, dirs_exist_ok=True)


def build(site: Path) -> int:
    """Build the site in a folder. MkDocs prints what is wrong, and its exit code is the result."""
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        environ = {**os.environ, "STAGED": folder, "NO_MKDOCS_2_WARNING": "1"}
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
        return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the site of these pages.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder of the site (site)")
    sys.exit(build(parser.parse_args().out.absolute()))
