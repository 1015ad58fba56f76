"""The page in a real browser: searched, switched, narrow and wide, light and dark, with runs that attack it."""

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


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Of one run, of three runs, and of a run that attacks."""
    folder = tmp_path_factory.mktemp("pages")
    alarms = (alarm(3), alarm(7, "PRL402", stopped=True))
    one = write_run(folder / "lora", alarms=alarms)
    runs = [
        one,
        write_run(folder / "dora", method="dora", rate=0.002),
        write_run(folder / "going", status="running", steps=5),
    ]
    made = {"one": [one], "three": runs, "hostile": [hostile_run(folder / "hostile <b>run</b>"), one]}
    for name, of in made.items():
        perl.report(of, folder / f"{name}.html")
    return lambda name: folder / f"{name}.html"


def cards(page):
    return page.locator("article.answer")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "three"])
def test_everything_is_drawn_and_nothing_is_wider_than_the_window(browser, pages, name, scheme, size):
    with browser.page(pages(name), size, scheme) as page:
        scroll_through(page)
        plots, drawn = page.locator(".plot").count(), page.locator(".plot .main-svg").count()
        assert plots >= 20
        assert drawn >= plots
        assert page.get_attribute("html", "data-theme") == scheme
        widest = page.evaluate(
            "Math.max(...[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, .plot'))"
            ".map((e) => e.getBoundingClientRect().right))"
        )
        assert widest <= size[0]
        assert page.locator("h1").inner_text() == ("lora" if name == "one" else "3 runs compared")


def test_steps_are_switched_by_hand_slider_and_keys(browser, pages):
    with browser.page(pages("one")) as page:
        assert page.locator("#step-name").inner_text() == "step 12"  # the newest
        assert page.locator("#next").is_disabled()
        page.click("#previous")
        assert page.locator("#step-name").inner_text() == "step 11"
        assert "Step 11, place 0" in cards(page).first.inner_text()
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowLeft")
        assert page.locator("#step-name").inner_text() == "step 10"
        page.keyboard.press("ArrowRight")
        assert page.locator("#step-name").inner_text() == "step 11"
        page.locator("#step").fill("0")
        assert page.locator("#step-name").inner_text() == "step 1"
        assert page.locator("#previous").is_disabled()


def test_completions_are_searched_filtered_and_ordered(browser, pages):
    with browser.page(pages("one")) as page:
        assert cards(page).count() == 4
        page.keyboard.press("/")
        page.keyboard.type("PLACE 2")
        assert cards(page).count() == 1
        assert page.locator("article mark").inner_text() == "place 2"
        page.check("#every")
        assert cards(page).count() == 12
        assert page.locator("#found").inner_text().startswith("12 of 48 completions")
        page.fill("#search", "no such text")
        assert cards(page).count() == 0
        page.fill("#search", "")
        page.select_option("#verdict", "right")
        assert cards(page).count() == 12
        assert page.locator("article.right").count() == 12
        page.select_option("#verdict", "")
        page.select_option("#which", "accuracy")
        page.fill("#most", "0.5")
        assert cards(page).count() == 36
        page.fill("#most", "")
        page.uncheck("#every")
        page.select_option("#order", "high")
        assert "place 1" in cards(page).first.inner_text()


def test_tokens_are_coloured_by_their_gap_and_say_it(browser, pages):
    with browser.page(pages("one")) as page:
        tokens = cards(page).first.locator(".token")
        titles = [tokens.nth(i).get_attribute("title") for i in range(tokens.count())]
        assert titles[1] == '"12, ": trainer less engine -0.02 nats'
        assert titles[2] == "not compared"
        strength = [tokens.nth(i).evaluate("(e) => getComputedStyle(e).backgroundColor") for i in (1, 2)]
        assert "0.75" in strength[0]
        assert strength[1] == "rgba(0, 0, 0, 0)"


def test_a_run_is_taken_out_and_put_back(browser, pages):
    with browser.page(pages("three")) as page:
        plot = page.locator("#curves .plot").first
        plot.scroll_into_view_if_needed()
        page.wait_for_selector("#curves .plot .main-svg")

        def colours():
            return plot.evaluate("(e) => [...new Set(e.data.filter((t) => t.hovertemplate).map((t) => t.name))]")

        assert colours() == ["lora", "dora", "going"]
        page.get_by_label("Show dora").uncheck()
        assert colours() == ["lora", "going"]
        assert page.locator("#overview .card:visible").count() == 2
        page.get_by_label("Show dora").check()
        assert colours() == ["lora", "dora", "going"]
        assert "running, step 5 of 12" in page.locator("#runs").inner_text()
        differences = page.locator("#differences").inner_text()
        assert "peft.method" in differences
        assert "data.train" not in differences


def test_alarms_are_marked_on_curves_and_listed(browser, pages):
    with browser.page(pages("one")) as page:
        plot = page.locator("#curves .plot").first
        plot.scroll_into_view_if_needed()
        page.wait_for_selector("#curves .plot .main-svg")
        assert plot.evaluate("(e) => e.layout.shapes.map((s) => s.x0)") == [3, 7]
        listed = page.locator("#alarms").inner_text()
        assert "PRL401 step 3: entropy fell" in listed
        assert "step 7, stopped the run" in listed


def test_the_theme_is_switched_and_charts_follow(browser, pages):
    with browser.page(pages("one")) as page:
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        page.click("#theme")
        assert page.get_attribute("html", "data-theme") == "dark"
        assert page.evaluate(background) != light
        page.click("#theme")
        assert page.evaluate(background) == light


def test_smoothing_and_the_other_metrics_are_there_when_asked_for(browser, pages):
    with browser.page(pages("one")) as page:
        plot = page.locator("#curves .plot").first
        plot.scroll_into_view_if_needed()
        page.wait_for_selector("#curves .plot .main-svg")
        page.select_option("#smoothing", "0.2")
        assert plot.evaluate("(e) => e.data.length") == 2  # the steps and their means
        page.select_option("#smoothing", "0")
        assert plot.evaluate("(e) => e.data.length") == 1
        more = page.locator("#curves details")
        assert more.locator(".plot").count() == 0
        more.locator("summary").click()
        more.locator(".plot .main-svg").nth(1).wait_for()


def test_what_can_be_used_has_a_name(browser, pages):
    with browser.page(pages("three")) as page:
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, input, select')].filter((e) => !(e.getAttribute('aria-label')"
            " || e.textContent.trim() || (e.labels && e.labels.length))).map((e) => e.outerHTML)"
        )
        assert unnamed == []
        assert (
            page.locator("main > section:not([hidden]) > :is(h2, .head)").count() == page.locator("#contents a").count()
        )


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_run_that_attacks_is_shown_as_it_is_written_and_does_nothing(browser, pages, size):
    with browser.page(pages("hostile"), size) as page:
        scroll_through(page)
        for summary in page.locator("summary").all():
            summary.click()
        scroll_through(page)
        page.select_option("#run", "0")
        page.fill("#search", "</script>")
        assert cards(page).first.locator("mark").count() >= 2
        page.fill("#search", "")
        assert page.title() == "2 runs: report"
        assert page.locator("img").count() == 0
        assert page.locator("main b b, main script, svg a").count() == 0
        assert HOSTILE[:40] in page.locator("#completions").inner_text()
        assert HOSTILE[:40] in page.locator("#settings").inner_text()


def test_a_notebooks_frame_is_the_page_and_reaches_nothing_outside(browser, pages, tmp_path):
    made, wrong = perl.report(pages("one").parent / "lora"), []
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><title>notebook</title>{made._repr_html_()}")
    page = browser.browser.new_page(viewport={"width": 1100, "height": 900})
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(file.as_uri())
    shown = page.frame_locator("iframe")
    shown.locator("html[data-ready] .plot .main-svg").first.wait_for()
    assert shown.locator("h1").inner_text() == "lora"
    (frame,) = page.main_frame.child_frames
    assert frame.evaluate(
        "(() => { try { return parent.document.title; } catch (error) { return error.name; } })()"
    ) == ("SecurityError")
    assert not wrong
    page.close()
