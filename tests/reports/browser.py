"""A real browser that looks at a page and tells of everything that it should not have done."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
)
WIDE, NARROW = (1440, 900), (375, 800)


def absent() -> str | None:
    """Why no browser can look at pages here; None: one can."""
    if BROWSER is None:
        return "no Chromium is installed (apt-get install chromium)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return None


@contextmanager
def opened() -> Iterator["Browser"]:
    """A browser, closed at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        try:
            yield Browser(browser)
        finally:
            browser.close()


class Browser:
    """Opens pages of files."""

    def __init__(self, browser) -> None:
        self.browser = browser

    @contextmanager
    def page(self, file: Path, size: tuple[int, int] = WIDE, scheme: str = "light") -> Iterator:
        """A page, in which nothing may go wrong: errors, warnings of the policy, requests, a scroll bar below."""
        page = self.browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        wrong, requested = [], []
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda request: requested.append(request.url))
        page.add_init_script(
            "document.addEventListener('securitypolicyviolation', (event) => console.error(event.violatedDirective));"
        )
        try:
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready]")
            yield page
            assert not wrong
            assert requested == [file.as_uri()]
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        finally:
            page.close()


def scroll_through(page) -> None:
    """Down to the end, so that every chart is drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for top in range(0, height, 500):
        page.evaluate(f"scrollTo(0, {top})")
        page.wait_for_timeout(60)
    page.wait_for_timeout(200)


needs_browser = pytest.mark.skipif(absent() is not None, reason=str(absent()))
