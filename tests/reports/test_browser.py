"""The page in a real browser: searched, switched and filtered; with a run that attacks it."""

import pytest

import perl
from tests.reports.browser import NARROW, WIDE, needs_browser, opened, scroll_through
from tests.reports.test_page import HOSTILE, hostile_run
from tests.reports.written import alarm, write_run

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser():
    with opened() as found:
        yield found


def cards(page):
    return page.locator("article.answer")


@pytest.mark.nightly
def test_runs_are_drawn_switched_searched_and_taken_out(browser, tmp_path):
    alarms = (alarm(3), alarm(7, "PRL402", stopped=True))
    runs = [write_run(tmp_path / "lora", alarms=alarms), write_run(tmp_path / "dora", method="dora", rate=0.002)]
    perl.report(runs, tmp_path / "page.html")
    with browser.page(tmp_path / "page.html") as page:
        scroll_through(page)
        plots = page.locator(".plot").count()
        assert 20 <= plots <= page.locator(".plot .main-svg").count()
        assert page.locator("#step-name").inner_text() == "step 12"  # the newest
        page.click("#previous")
        assert "Step 11, place 0" in cards(page).first.inner_text()
        page.keyboard.press("/")
        page.keyboard.type("PLACE 2")
        page.check("#every")
        assert cards(page).count() == 12
        assert cards(page).first.locator("mark").inner_text() == "place 2"
        page.fill("#search", "")
        page.select_option("#verdict", "right")
        assert page.locator("article.right").count() == cards(page).count() == 12
        titles = [token.get_attribute("title") for token in cards(page).first.locator(".token").all()]
        assert titles[1:3] == ['"1, ": trainer less engine -0.02 nats', "not compared"]
        plot = page.locator("#curves .plot").first
        names = "(e) => [...new Set(e.data.filter((t) => t.hovertemplate).map((t) => t.name))]"
        assert plot.evaluate(names) == ["lora", "dora"]
        assert plot.evaluate("(e) => e.layout.shapes.map((s) => s.x0)") == [3, 7]  # alarms
        page.get_by_label("Show dora").uncheck()
        plot.scroll_into_view_if_needed()  # drawn again once it is looked at
        page.wait_for_timeout(300)
        assert plot.evaluate(names) == ["lora"]
        assert "peft.method" in page.locator("#differences").inner_text()


@pytest.mark.parametrize("size", [WIDE, pytest.param(NARROW, marks=pytest.mark.nightly)], ids=["wide", "narrow"])
def test_a_run_that_attacks_is_shown_as_it_is_written_and_does_nothing(browser, tmp_path, size):
    perl.report([hostile_run(tmp_path / "hostile <b>run</b>"), write_run(tmp_path / "one")], tmp_path / "page.html")
    with browser.page(tmp_path / "page.html", size) as page:
        for summary in page.locator("summary").all():
            summary.click()
        scroll_through(page)
        page.select_option("#run", "0")
        page.fill("#search", "</script>")
        assert cards(page).first.locator("mark").count() >= 2
        assert page.title() == "2 runs: report"
        assert page.locator("img").count() == 0
        assert page.locator("main b b, main script, svg a").count() == 0
        assert HOSTILE[:40] in page.locator("#settings").inner_text()
