"""The page holds every entry, runs nothing but its own script, and sorts and filters in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from perl.recipe.assets import zoo_folder
from perl.zoo.catalogue import open_zoo
from perl.zoo.page import curve_of, html_page
from tests.zoo.entries import reported, score, seeds, theirs, trained, zoo_of

HOSTILE = """"'><script>document.title='owned'</script><img src=x onerror="document.title='owned'">"""
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def page_of(tmp_path, *entries):
    return html_page(zoo_of(tmp_path / "zoo", *entries))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return page_of(
        tmp_path_factory.mktemp("page"),
        trained("b-good", score(0.9), score(0.2, "products"), tokens=90, seeds=seeds(0.8)),
        trained("a-poor", score(0.1), tokens=1_000, method="vera", curve=[]),
        reported("c-paper", theirs(0.5, "products"), notes=["Only one seed."]),
    )


def test_every_entry_is_there_as_text_and_the_page_requests_nothing(page, tmp_path):
    for said in ("b-good", "a-poor", "c-paper", "90.0 ± 7.1", "base 40.0 ± 1.2 (+50.0)", "Only one seed."):
        assert said in page
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        assert not attributes.keys() & {"src", "href", "action", "style"}
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"@import|url\(|https?://", page)
    assert "0 entries" in page_of(tmp_path / "none")
    where = {"method": HOSTILE, "base": HOSTILE, "source": HOSTILE, "notes": [HOSTILE], "settings": {HOSTILE: HOSTILE}}
    entry = reported("a", theirs(0.5, HOSTILE, metric=HOSTILE), licence=HOSTILE, **where)
    tags = Tags(page_of(tmp_path / "hostile", entry)).found
    assert [tag for tag, _ in tags if tag in ("script", "img")] == ["script"]
    assert {attributes["data-method"] for _, attributes in tags if "data-method" in attributes} == {HOSTILE}


def test_a_curve_is_drawn_to_its_corners_and_only_if_there_are_two_points():
    points = [(1, 0.2), (2, 0.6), (3, 0.4), (7, 0.9), (10, 0.25)]
    curve = curve_of(points, 100, 20)
    drawn = [tuple(map(float, point.split(","))) for point in curve.points.split()]
    # From 2 to 98 by steps and from 18 up to 2 by rewards, of which y counts down.
    expected = [(2 + 96 * (step - 1) / 9, 18 - 16 * (reward - 0.2) / 0.7) for step, reward in points]
    assert drawn == [pytest.approx(place, abs=0.051) for place in expected]
    assert curve_of(points[:3], 100, 20).points == "2.0,18.0 50.0,2.0 98.0,10.0"
    assert (curve.low, curve.high, curve.first, curve.last) == (0.2, 0.9, 1, 10)
    assert curve_of([(1, 0.5)], 100, 20) is None
    assert curve_of([(5, 0.5), (5, 0.5)], 100, 20).points == "2.0,18.0 2.0,18.0"


def test_error_bars_lie_around_the_scores(page, tmp_path):
    circles = [float(a["cx"]) for tag, a in Tags(page).found if tag == "circle" and a["class"] == "adapter"]
    lines = [a for tag, a in Tags(page).found if tag == "line" and a["class"] == "adapter"]
    assert len(circles) == len(lines) == 5  # the key, and four scores
    for place, line in zip(circles, lines, strict=True):
        assert float(line["x1"]) <= place <= float(line["x2"])
    # sums: from 0.09 (a-poor less its error) to 0.9707 (b-good and the spread of its seeds).
    poor = circles[1]
    assert poor == pytest.approx(5 + 90 * (0.1 - 0.09) / (0.9 + 0.0707 - 0.09), abs=0.1)
    # A score without an error to see is drawn and written as an interval, whose exact lower end is 0.025^(1/30).
    all_right = page_of(tmp_path, trained("all-right", score(1.0, stderr=0.0, n=30, base=0.5, base_stderr=0.09)))
    low = re.search(r"100\.0 \[([\d.]+), 100\.0\]", all_right)[1]
    assert float(low) == pytest.approx(100 * 0.025 ** (1 / 30), abs=0.051)
    assert "± 0.0" not in all_right
    ends = {(a["x1"], a["x2"]) for tag, a in Tags(all_right).found if tag == "line" and a.get("class") == "adapter"}
    assert ("95.0", "95.0") not in ends


def in_browser(tmp_path, page, script):
    """What a script finds in the page once it is shown; with the policy that forbids such scripts taken out."""
    file = tmp_path / "page.html"
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert policy.search(page)
    told = f"<script>document.title = JSON.stringify((() => {{ {script} }})());</script>"
    file.write_text(policy.sub("", page).replace("</body>", f"{told}</body>"))
    return json.loads(title_of(tmp_path, file))


def title_of(tmp_path, file):
    """What the page calls itself after its scripts ran."""
    parser = HTMLParser()
    texts, inside = [], []
    parser.handle_starttag = lambda tag, _: inside.append(tag)
    parser.handle_data = lambda data: texts.append(data) if inside[-1:] == ["title"] else None
    parser.feed(shown(tmp_path, file))
    return texts[0]


def shown(tmp_path, file):
    """The page as it is after its scripts ran, in a window as wide as a small laptop's."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [BROWSER, *flags.split(), "--disable-component-update", "--disable-sync", "--dump-dom"]
    command += ["--window-size=1280,900", f"--user-data-dir={tmp_path / 'profile'}", f"file://{file}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

ASK = """
const names = () => [...document.querySelectorAll("tr.entry:not([hidden]) button.name")].map((b) => b.textContent);
const click = (column) => { document.querySelector(`th[data-column="${column}"] button`).click(); return names(); };
const set = (field, value) => {
  document.getElementById(field).value = value;
  document.getElementById("controls").dispatchEvent(new Event("input"));
  return names();
};
"""


@needs_browser
def test_a_browser_sorts_filters_and_opens(tmp_path, page):
    found = in_browser(
        tmp_path,
        page,
        ASK
        + """
const steps = { first: names() };
steps.up = click("score");
steps.name = click("name");
steps.fewest_tokens = click("tokens");
steps.most_tokens = click("tokens");
steps.other_task = [set("task", "sums"), click("score")][1];
steps.filtered = set("filter", "VERA trained");
steps.count = document.getElementById("count").textContent;
set("filter", "");
steps.method = set("method", "dora");
steps.closed = document.querySelectorAll("tr.more:not([hidden])").length;
document.querySelector("tr.entry:not([hidden]) button.name").click();
steps.open = [...document.querySelectorAll("tr.more:not([hidden])")].map((r) => r.innerText.includes("Only one seed."));
return steps;""",
    )
    assert found == {
        "first": ["c-paper", "b-good", "a-poor"],  # by products, which two have
        "up": ["b-good", "c-paper", "a-poor"],
        "name": ["a-poor", "b-good", "c-paper"],
        "fewest_tokens": ["b-good", "a-poor", "c-paper"],
        "most_tokens": ["a-poor", "b-good", "c-paper"],
        "other_task": ["b-good", "a-poor", "c-paper"],
        "filtered": ["a-poor"],
        "count": "1 of 3",
        "method": ["c-paper"],
        "closed": 0,
        "open": [True],
    }


@needs_browser
def test_all_columns_of_the_shipped_zoo_are_seen_on_a_small_laptop(tmp_path):
    script = """
const frame = document.querySelector(".scroll");
const ends = [...document.querySelectorAll("#zoo > thead th")].map((h) => h.getBoundingClientRect().right);
return { window: window.innerWidth, hidden: frame.scrollWidth - frame.clientWidth, last: Math.max(...ends) };"""
    found = in_browser(tmp_path, html_page(open_zoo(zoo_folder())), script)
    assert found["window"] == 1280
    assert found["hidden"] <= 0
    assert found["last"] <= 1280


@needs_browser
def test_a_browser_runs_the_pages_script_under_its_policy_and_no_other(tmp_path):
    page = page_of(tmp_path, reported("a", theirs(0.5, HOSTILE), notes=[HOSTILE], method=HOSTILE))
    assert '<form id="controls" hidden>' in page
    injected = tmp_path / "page.html"
    injected.write_text(page.replace("</body>", "<script>document.title = 'foreign'</script></body>"))
    after = shown(tmp_path, injected)
    assert '<form id="controls">' in after
    assert "1 of 1</span>" in after
    assert title_of(tmp_path, injected) == "Model zoo"
