"""MODEL_ZOO.md and the page say what the entries say, and the committed ones are of the committed entries."""

import re

from perl.zoo.catalogue import open_zoo
from perl.zoo.entry import Location
from perl.zoo.summary import html_page, rendered, sheet
from tests.html_tags import Tags
from tests.zoo.entries import OTHER_PROTOCOL, PROTOCOL, reported, score, seeds, theirs, trained, zoo_of


def markdown(zoo):
    return next(text for path, text in rendered(zoo).items() if path.name == "MODEL_ZOO.md")


def test_the_committed_file_is_what_the_committed_entries_give(checkout):
    [(path, text)] = rendered(open_zoo()).items()
    assert path == checkout / "MODEL_ZOO.md"
    assert path.read_text(encoding="utf-8") == text


def test_a_protocol_has_a_table_of_its_own_with_the_best_first_and_its_notes_below(tmp_path):
    zoo = zoo_of(
        tmp_path / "protocols",
        trained("a-low", score(0.5)),
        trained("b-high", score(0.6), seeds=seeds(0.8)),
        trained("c-hot", score(0.9, protocol_hash=OTHER_PROTOCOL)),
    )
    first, second = markdown(zoo).split("### ")[1:]
    assert second.startswith(f"sandbox:base, protocol of sums {OTHER_PROTOCOL}\n")
    assert first.splitlines() == [
        f"sandbox:base, protocol of sums {PROTOCOL}",
        "",
        "| name | method | base | sums | tokens | parameters | size |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
        "| b-high | lora | sandbox:base | 60.0 ± 14.1 | 123,456 | 19,456 | 81.2 kB |",
        "| a-low | lora | sandbox:base | 50.0 ± 1.0 | 123,456 | 19,456 | 81.2 kB |",
        "",
        "Base: sums 40.0 ± 1.2.",
        "",
        "",
    ]
    # Notes are numbered once, and tables with scores come first.
    zoo = zoo_of(
        tmp_path / "notes",
        reported("a", theirs(0.5), notes=["One seed.", "Its own."]),
        reported("b", theirs(0.4), notes=["One seed."]),
        reported("z", source="A folder", notes=["One seed."], adapter=Location(repo="user/all", subfolder="run|1")),
    )
    text = markdown(zoo)
    for said in ("| a | dora | someone/base-7B | 50.0 | 1, 2 |", "| 40.0 | 1 |", r"user/all | run\|1 | 1 |"):
        assert said in text
    assert text.index("### A paper") < text.index("2. Its own.") < text.index("### A folder")
    assert text.count("1. One seed.") == 2


HOSTILE = """"'><script>document.title='owned'</script><img src=x onerror="document.title='owned'">"""


def test_the_page_holds_every_entry_asks_for_nothing_and_escapes_what_others_wrote(tmp_path):
    entry = trained("b-good", score(0.9), score(0.2, "products"), tokens=90, seeds=seeds(0.8))
    page = html_page(zoo_of(tmp_path / "zoo", entry, reported("c-paper", theirs(0.5), notes=["Only one seed."])))
    cell = '<td class="number" data-value="0.9">90.0 ± 7.1</td>'
    for said in ("b-good", "c-paper", cell, "Only one seed.", *sheet(entry)[:3]):
        assert said in page
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        assert not attributes.keys() & {"src", "href", "action", "style"}
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"@import|url\(|https?://", page)
    where = {"method": HOSTILE, "base": HOSTILE, "source": HOSTILE, "notes": [HOSTILE], "settings": {HOSTILE: HOSTILE}}
    entry = reported("a", theirs(0.5, HOSTILE, metric=HOSTILE), licence=HOSTILE, **where)
    tags = Tags(html_page(zoo_of(tmp_path / "hostile", entry))).found
    assert [tag for tag, _ in tags if tag in ("script", "img")] == ["script"]
    assert HOSTILE in {attributes.get("data-value") for _, attributes in tags}
