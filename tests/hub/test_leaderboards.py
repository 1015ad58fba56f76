"""A stranger's files for leaderboards are read as plain values, and nothing but single values is shown of them."""

import pytest

from perl.evaluation.recounting.published_samples import read_published
from perl.evaluation.recounting.recount import recount
from perl.hub.card.check import check_card
from perl.hub.card.facts import results_in
from tests.hub.published import FILES

COUNTED = recount(results_in(FILES), read_published(FILES["eval/samples.jsonl"], "samples.jsonl"))
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
BOARD = b"- dataset: {id: openai/gsm8k, task_id: gsm8k, revision: null}\n  value: 50.0\n  notes: x\n"


def said(name: str, content: bytes) -> list[str]:
    return [str(problem) for problem in check_card({**FILES, name: content}, counted=COUNTED).mistakes]


def said_of_expected(content: bytes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a file that the results give."""
    name = ".eval_results/gsm8k.yaml"
    monkeypatch.setattr("perl.hub.card.leaderboards.eval_result_files", lambda _: {name: BOARD.decode()})
    return said(name, content)


def test_what_is_no_entry_is_one_short_line(monkeypatch):
    for content in (BOMB.encode(), b"- value: 0x" + b"f" * 50_000, b"\xff", b"- !!int 3"):  # a file of others
        (line,) = said(".eval_results/mine.yaml", content)
        assert line.startswith(".eval_results/mine.yaml: ")
        assert len(line) < 250
    for content in (
        BOMB.encode(),
        b"- &a [*a]\n",
        b"- !!python/name:os.system\n",
        b"[" * 50_000,
        b"- value: " + b"9" * 50_000,
        b"- value: 0x" + b"f" * 50_000,
        b"- value: [1, 2]\n",
        b"- dataset: {id: {a: b}}\n  value: 1\n",
        b"- 1\n- 2\n",
        b"\xff",
        b"x" * 100_001,
        b"",
    ):
        (line,) = said_of_expected(content, monkeypatch)
        assert line.startswith(".eval_results/gsm8k.yaml: "), content[:40]
        assert len(line) < 250, content[:40]


def test_each_value_that_differs_is_a_line_and_what_claims_to_be_ours_is_read_as_data(monkeypatch):
    (line,) = said(".eval_results/mine.yaml", b'- {value: 99.9, notes: "perl\\x20eval"}\n')
    assert line == (
        ".eval_results/mine.yaml: shows scores that eval/results.json does not give (perl push takes it away)"
    )
    assert said(".eval_results/mine.yaml", b"- {value: 99.9, notes: mine}\n") == []
    assert said_of_expected(BOARD, monkeypatch) == []
    changed = BOARD.replace(b"50.0", b"99.9").replace(b"null", b"main").replace(b"notes: x", b"more: 1")
    assert said_of_expected(changed, monkeypatch) == [
        ".eval_results/gsm8k.yaml: says dataset.revision main, eval/results.json says None (perl push writes it)",
        ".eval_results/gsm8k.yaml: says value 99.9, eval/results.json says 50.0 (perl push writes it)",
        ".eval_results/gsm8k.yaml: says notes None, eval/results.json says x (perl push writes it)",
        ".eval_results/gsm8k.yaml: says more 1, eval/results.json says None (perl push writes it)",
    ]
