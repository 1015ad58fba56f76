"""The site is made of the documents without a network, loads nothing from another host, and no link leads nowhere."""

import html.parser
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import CHECKOUT
from tests.documents.pages import DOCS, DOCUMENTS, anchors, links

# What a browser fetches by itself, by element and attribute.
_FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
_NOT_FETCHED = {"canonical", "next", "prev", "alternate", "edit"}  # of <link rel>


class _Page(html.parser.HTMLParser):
    """Links, anchors, and what is fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        for name, value in found.items():
            if (tag, name) in _FETCHED and found.get("rel", "") not in _NOT_FETCHED:
                self.fetched.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as ``make site`` builds it."""
    if not all(find_spec(name) for name in ("mkdocs", "material", "mkdocstrings_handlers")):
        pytest.skip("the extra docs is not installed: mkdocs-material and mkdocstrings build the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_PROXY": "", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, _Page]:
    return {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_no_link_of_the_site_is_dead(site, pages):
    dead, followed = [], 0
    for path, page in pages.items():
        for link in page.links:
            file, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or path.name == "404.html":
                continue
            place = (path.parent / unquote(file)).resolve() if file else path
            place = place / "index.html" if place.is_dir() else place
            followed += 1
            found = pages.get(place)
            if not place.is_file() or (anchor and found is not None and unquote(anchor) not in found.names):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    assert followed >= 2000


def test_a_page_fetches_nothing_from_another_host(site, pages):
    fetched = [
        f"{path.relative_to(site)}: {address}"
        for path, page in pages.items()
        for address in page.fetched
        if re.match(r"(https?:)?//", address)
    ]
    styles = [
        f"{path.relative_to(site)}: {found}"
        for path in [*site.rglob("*.css"), *pages]
        for found in re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", path.read_text(encoding="utf-8"))
    ]
    assert fetched + styles == []


def test_the_reference_has_signatures_and_arguments_of_every_public_name(site):
    import perl

    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text(encoding="utf-8"))
    for name in [*(set(perl.__all__) - {"callbacks", "rewards"}), *perl.callbacks.__all__, "accuracy_reward"]:
        assert name in text
    assert "<!-- api" not in (site / "api.html").read_text(encoding="utf-8")
    assert text.count("Parameters:") + text.count("Attributes:") >= 15


def test_links_and_anchors_lead_somewhere():
    dead, followed = [], 0
    for page in DOCUMENTS:
        for target in links(page):
            if target.startswith(("https://", "http://localhost")):
                continue
            file, _, anchor = target.partition("#")
            found = (page.parent / file).resolve() if file else page
            followed += 1
            if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
                dead.append(f"{page.relative_to(CHECKOUT)}: {target}")
    assert dead == []
    assert followed >= 150


def test_contributing_fits_a_screen():
    assert len((CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 90


def test_every_page_is_in_the_navigation_of_the_site_and_the_readme_leads_to_it():
    navigation = re.findall(r"(?<=: )[\w-]+\.md$", (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {page.name for page in DOCS.glob("*.md")}
    assert len(set(navigation)) == len(navigation)
    assert pages - set(navigation) == set()
    reached = {
        target.partition("#")[0] for page in (CHECKOUT / "README.md", DOCS / "index.md") for target in links(page)
    }
    assert [page for page in pages - {"index.md"} if page not in reached and f"docs/{page}" not in reached] == []
