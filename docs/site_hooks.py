"""What MkDocs does with these pages beyond rendering them; ``mkdocs.yml`` names this file.

page as GitHub shows it -> page of the site

Links that lead out of ``docs/`` lead to copies of those files in the site: Markdown becomes a page, anything else is
a file. The zoo's one page (``perl zoo html``) is made anew. ``<!-- api: NAME -->``, which GitHub does not show, becomes
the reference of that name from its docstrings; ``<!-- api: NAME as PUBLIC: one two -->`` has the name that users import
it by, and these members alone.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from perl.zoo.catalogue import open_zoo
from perl.zoo.summary import html_page

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
_API = re.compile(r"^<!-- api: ([\w.]+)(?: as ([\w.]+))?(?:: ([\w ]+))? -->$", re.MULTILINE)
_WIDE = ("coming-from.md", "MODEL_ZOO.md")  # their tables need the place of the table of contents
_HOME = "index.md"
_ZOO, _ZOO_PAGE = "zoo.md", "zoo-page.html"
_PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "MODEL_ZOO.md", "benchmarks/README.md", "eval/README.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside of ``docs/`` that pages link to, and those that these link to."""
    for name in _PROJECT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, _ZOO_PAGE, content=html_page(open_zoo(ROOT / "model_cards" / "zoo"))))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        source = files.get_file_from_path(page)
        for target, _ in _LINK.findall(_FENCE.sub("", source.content_string if source else "")):
            place = _in_site(page, target)
            path = ROOT / _in_checkout(page, target)
            if not path.is_file() or place == _HOME or files.get_file_from_path(place):
                continue
            files.append(File.generated(config, place, abs_src_path=str(path)))
            if place.endswith(".md"):
                waiting.append(place)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrites links and puts the reference in."""
    kept: list[str] = []

    def put_by(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    def rewritten(match: re.Match[str]) -> str:
        if not (ROOT / _in_checkout(page.file.src_uri, match[1])).is_file():
            return match[0]
        place = _in_site(page.file.src_uri, match[1])
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".") + (match[2] or "")

    text = _LINK.sub(rewritten, _FENCE.sub(put_by, markdown))
    text = _API.sub(_reference, text)
    if page.file.src_uri in _WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == _ZOO:
        text += f"\n[The zoo that comes with the package, as one page]({_ZOO_PAGE}) made by `perl zoo html`.\n"
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], text)


def _reference(match: re.Match[str]) -> str:
    options = [f"heading: {match[2]}", f"toc_label: {match[2].rpartition('.')[2]}"] if match[2] else []
    options += [f"members: [{', '.join(match[3].split())}]"] if match[3] else []
    lines = [f"::: {match[1]}", "    options:", *(f"      {option}" for option in options)]
    return "\n".join(lines if options else lines[:1]) + "\n"


def _in_checkout(page: str, target: str) -> str:
    """Where a link of a page leads, from the root of the checkout."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_source_of(page)), target))


def _source_of(page: str) -> str:
    """A page of the site lies in ``docs/`` if there is one, else at its own place."""
    return f"docs/{page}" if (ROOT / "docs" / page).is_file() else page


def _in_site(page: str, target: str) -> str:
    """Where the site has that file."""
    path = _in_checkout(page, target)
    if path in ("README.md", "docs/index.md"):
        return _HOME
    return path.removeprefix("docs/")
