"""What counts as what a page shows: lines, gaps, what changes between machines, numbers that were learned."""

import pytest

from tests.documents.pages import Block, anchors, blocks
from tests.documents.printed import missing

OUTPUT = """base 66.6 ± 1.5, in 0:02
step 1/50  reward 0.594
step 2/50  reward 0.641
adapter 99.2 ± 0.3
4 s, sha256 377178c12ccc
"""


@pytest.mark.parametrize(
    "shown",
    [
        ["base 66.6 ± 1.5, in 3:47", "...", "adapter 99.2 ± 0.3", "..."],
        ["...", "step 2/50 ...", "...", "12.5 s, sha256 0123456789ab"],
        ["base ... in ...", "step ... 0.594", "..."],
    ],
)
def test_what_was_printed_is_found(shown):
    assert missing(OUTPUT, shown, learned=False) == []


def test_learned_numbers_may_be_near_and_words_may_not_differ():
    for line, found in (("adapter 98.6 ± 0.4", True), ("adapter 80.0 ± 0.3", False), ("adaptor 99.2 ± 0.3", False)):
        assert missing(OUTPUT, ["...", line, "..."], learned=True) == ([] if found else [line])
    learned = "reward 0.95 kl 0.01"
    assert missing("reward 0.97 kl 0.02", [learned], learned=True) == []
    assert missing("reward 0.05 kl 0.01", [learned], learned=True) == [learned]
    assert missing("reward 0.95 kl 0.90", [learned], learned=True) == [learned]


def test_blocks_are_commands_with_what_follows_them_and_headings_are_called_as_github_calls_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n\n```bash\none # remark\ntwo \\\n  --more\n```\n\nso:\n\n```text\nout\n```\n"
        "## A `b`, c\n```bash\nthree\n```\n```yaml\na: 1\n```\n"
    )
    assert blocks(page) == [
        Block("page.md", 4, ("one", "two    --more"), ("out",)),
        Block("page.md", 16, ("three",), ()),
    ]
    assert anchors(page) == {"a-b-c", "a-b-c-1"}
