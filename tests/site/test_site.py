"""The site that `make docs` builds: links, what it loads, its width on a phone, and its search."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import attrs
import pytest

from tests.docs.names import ROOT
from tests.site.browser import Browser

pytestmark = [pytest.mark.long, pytest.mark.environment(".venv-docs/.docs")]
by_browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium: apt-get install chromium"
)
QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text())["questions"]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [ROOT / ".venv-docs" / "bin" / "python", ROOT / "docs" / "build_site.py", "--out", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


# -- links and what is loaded ----------------------------------------------------------------------------------


@attrs.define
class Page(HTMLParser):
    """The anchors of a page, the targets of its links, and what it loads."""

    anchors: set[str] = attrs.field(factory=set)
    links: list[str] = attrs.field(factory=list)
    loaded: list[str] = attrs.field(factory=list)

    def __attrs_pre_init__(self):
        super().__init__()

    def handle_starttag(self, tag, pairs):
        values = dict(pairs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" or values.get("rel") in ("next", "prev", "canonical"):
            self.links += [values["href"]] if values.get("href") else []
        else:
            self.loaded += [values[name] for name in ("src", "href", "srcset", "data") if values.get(name)]


def read(path):
    page = Page()
    page.feed(path.read_text())
    return page


def pages_of(site):
    return {path: read(path) for path in sorted(site.rglob("*.html"))}


def dead_links(pages):
    """The links of pages, and what they load, that are not there."""
    for path, page in pages.items():
        for target in (*page.links, *page.loaded):
            file, _, anchor = unquote(target).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            # the page of a missing address has links from the root of a server
            leads_to = (path.parent / file).resolve() if file else path
            if leads_to in pages:
                if anchor and anchor not in pages[leads_to].anchors:
                    yield f"{path.name}: {target}"
            elif path.name != "404.html" and not leads_to.is_file():
                yield f"{path.name}: {target}"


def loaded_from_elsewhere(site):
    """The addresses on other machines that a page or a style sheet loads."""
    for path, page in pages_of(site).items():
        yield from (f"{path.name}: {target}" for target in page.loaded if re.match(r"(https?:)?//", target))
    for path in site.rglob("*.css"):
        text = path.read_text()
        yield from re.findall(r"url\(\s*[\"']?((?:https?:)?//[^)]*)\)", text)
        yield from re.findall(r"@import[^;]*//[^;]*", text)


def test_links_and_anchors_lead_somewhere(site):
    pages = pages_of(site)
    assert len(pages) > 60
    assert sum(len(page.links) for page in pages.values()) > 5_000
    assert list(dead_links(pages)) == []


def test_nothing_is_loaded_from_elsewhere(site):
    assert list(loaded_from_elsewhere(site)) == []
    drawn = [path.name for path in site.rglob("*.html") if 'class="mermaid' in path.read_text()]
    assert drawn == [], "the theme fetches the script that draws them"


def test_a_dead_link_and_a_foreign_script_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html"></a><a href="#gone"></a><a href="#top">'
    )
    (tmp_path / "b.html").write_text(
        '<img src="gone.png"><script src="//x.y/z.js"></script><link rel="stylesheet" href="https://x.y/z.css">'
    )
    (tmp_path / "c.css").write_text('@font-face { src: url("https://x.y/z.woff") }')
    assert list(dead_links(pages_of(tmp_path)))[:2] == ["a.html: #gone", "b.html: gone.png"]
    assert len(list(loaded_from_elsewhere(tmp_path))) == 3


def test_a_reader_can_copy_code_and_choose_dark_colours(site):
    text = (site / "index.html").read_text()
    assert '"content.code.copy"' in text
    assert 'data-md-color-scheme="slate"' in text


# -- in a browser ----------------------------------------------------------------------------------------------

WIDE = """
(() => {
  const inside = element => element.scrollWidth > element.clientWidth;
  const blocks = [...document.querySelectorAll('pre > code')].filter(inside);
  return {
    page: document.scrollingElement.scrollWidth - innerWidth,
    blocks: blocks.length,
    clipped: blocks.filter(block => getComputedStyle(block).overflowX !== 'auto').length,
  };
})()
"""


@by_browser
def test_no_page_scrolls_sideways_and_code_blocks_do(site, browser):
    found = {}
    for path in sorted(site.rglob("*.html")):
        browser.open(path.as_uri())
        for width in (390, 1200):
            browser.width(width)
            found[str(path.relative_to(site)), width] = browser.evaluate(WIDE)
    assert {name: wide for name, wide in found.items() if wide["page"] > 0 or wide["clipped"]} == {}
    for width in (390, 1200):
        assert sum(wide["blocks"] for (_, at), wide in found.items() if at == width) > 100
    assert {address.partition(":")[0] for address in browser.requests} <= {"file", "about", "data"}


@pytest.fixture(scope="session")
def search(site, browser):
    """The pages that the search box shows for words, the best first."""
    browser.width(1400)
    browser.open((site / "index.html").as_uri())
    box = "document.querySelector('.md-search__input')"

    def ask(words):
        browser.evaluate("document.querySelector('.md-search-result__list').replaceChildren()")
        browser.evaluate(
            f"(() => {{ {box}.focus(); {box}.value = {json.dumps(words)};"
            f" {box}.dispatchEvent(new Event('keyup', {{ bubbles: true }})); }})()"
        )
        hits = browser.wait_for(
            "[...document.querySelectorAll('.md-search-result__item')]"
            ".map(hit => hit.querySelector('a').getAttribute('href'))"
        )
        return [re.split("[?#]", hit)[0].removeprefix(f"{site.as_uri()}/") for hit in hits]

    return ask


@by_browser
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds_the_page_that_answers(search, question):
    hits = search(question)[:3]
    assert {hit.replace(".html", ".md") for hit in hits} & set(QUESTIONS[question]), hits
