"""No link of a document leads nowhere, within the project: files and headings exist."""

import re

from tests.conftest import CHECKOUT
from tests.documents.pages import DOCS, DOCUMENTS, anchors, links


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
