"""A card that is wrong is found out, each mistake in a line that says what and where."""

import copy
import json
import re

import pytest

from perl.evaluation.recounting.files import read_published
from perl.evaluation.recounting.recount import recount
from perl.hub.card.check import Checked, check_card
from perl.hub.card.published import LARGEST_CARD, read_front_matter, results_in
from tests.hub.published import FILES, FOUND, with_card
from tests.oracles.metrics import average

RESULTS = json.loads(FILES["eval/results.json"])
CARD = FILES["README.md"].decode()
COUNTED = recount(results_in(FILES), read_published(FILES["eval/samples.jsonl"], "samples.jsonl"))


def checked(card=CARD, found=RESULTS, files=FILES, **further) -> Checked:
    there = {**files, "README.md": card.encode(), "eval/results.json": json.dumps(found).encode()}
    if found is RESULTS:  # which need not be counted for each card anew
        further = {"counted": COUNTED, **further}
    return check_card({name: content for name, content in there.items() if content != b"null"}, **further)


def said(*arguments, **further) -> list[str]:
    return [str(problem) for problem in checked(*arguments, **further).mistakes]


def changed(before: str, after: str) -> str:
    assert before in CARD
    return CARD.replace(before, after, 1)


def test_nothing_is_wrong_with_our_own_of_an_adapter_on_the_hub_of_the_sandbox_and_of_a_whole_model():
    assert said() == []
    assert said(weights_sha256=FOUND.subject["adapter_sha256"]) == []
    config = json.loads(FILES["adapter_config.json"]) | {"base_model_name_or_path": "sandbox:base", "revision": None}
    run = json.loads(FILES["perl_run.json"]) | {"base": "sandbox:base", "revision": None}
    files = {"adapter_config.json": json.dumps(config).encode(), "perl_run.json": json.dumps(run).encode()}
    files = with_card({"adapter_model.safetensors": FILES["adapter_model.safetensors"], **files})
    assert said(files["README.md"].decode(), None, files) == []
    run |= {"method": "full", "settings": {}, "checkpoints": []}
    found = check_card(with_card({"perl_run.json": json.dumps(run).encode()}))
    assert found.mistakes == ()
    assert found.unchecked == ("the weights: of a whole model they are no part of what is looked at",)


def test_what_no_other_file_says_is_reported_and_what_is_no_file_of_ours_is_named():
    run = json.loads(FILES["perl_run.json"]) | {"tags": ["math"], "checkpoints": []}
    alone = ("adapter_config.json", "adapter_model.safetensors", "metrics.jsonl")
    files = {name: FILES[name] for name in alone} | {"perl_run.json": json.dumps(run).encode()}
    found = check_card({**with_card(files), "modeling_x.py": b"", "evil.pkl": b""})
    assert found.mistakes == ()
    assert {"modeling_x.py: not a file of perl's", "evil.pkl: not a file of perl's"} <= set(found.unchecked)
    assert found.reported == ("what perl_run.json says of the training",)
    assert {"engine and versions of the evaluation", *found.reported} <= set(checked().reported)


def test_every_number_of_a_card_is_compared_with_the_files():
    places = [match.end() - 1 for match in re.finditer(r"\d+(?:\.\d+)?", CARD)]
    assert len(places) > 150
    for at in places[::7]:
        mutant = f"{CARD[:at]}{(int(CARD[at]) + 1) % 10}{CARD[at + 1 :]}"
        (line,) = [line for line in said(mutant) if "its files give" in line]
        assert line.startswith(f"README.md:{CARD.count(chr(10), 0, at) + 1}: says ")


def test_what_is_wrong_is_named_with_its_place_and_both_values():
    mutant = copy.deepcopy(RESULTS)
    problems = mutant["perl"]["tasks"]["sums"]["problems"]
    right = average([[mark == "1" for mark in row["adapter"]] for row in problems.values()])
    mutant["perl"]["tasks"]["sums"]["adapter"]["accuracy"] = 0.1
    pattern = r"eval/results\.json: sums: adapter\.accuracy is 0\.1 in the file, counted is ([\d.]+)"
    (accuracy,) = [float(match[1]) for line in said(found=mutant) if (match := re.match(pattern, line))]
    assert accuracy == pytest.approx(right)
    (line,) = said(weights_sha256="f" * 64)
    assert re.match(
        r"eval/results\.json: is of another adapter: sha256 0123456789ab, .* ffffffffffff \(perl eval", line
    )
    cell = re.search(r"\*\*81\.2 ± ([\d.]+)\*\*", CARD)[0]
    (line,) = said(changed(cell, "**91.2 ± 0.1**"))
    assert line.startswith(f"README.md:{CARD[: CARD.index('| sums |')].count(chr(10)) + 1}: says “")
    one, other = re.findall("“(.*?)”", line)
    assert "91.2 ± 0.1**" in one
    assert cell.removeprefix("**") in other
    assert line.endswith("(perl card RUN writes it anew)")
    assert said(found=None)
    assert len(said("a: b\n" * LARGEST_CARD)) == 1


HOSTILE = {
    "bomb": "a: &a [x]\nb: [*a, *a]",
    "object": "a: !!python/object/apply:os.system [id]",
    "deep": "a: " + "[" * 50_000,
    "digits": "a: " + "9" * 10_000,
    "key": "? {a: b}\n: c",
    "control": "a: b\n\x00",
    "list": "- a",
    "open": "{a: [",
}
NO_RESULTS = [
    lambda r: r.clear(),
    lambda r: r["perl"].update(version=99),
    lambda r: r["perl"]["tasks"]["sums"]["adapter"].update(accuracy="much"),
    lambda r: r["perl"]["tasks"]["sums"]["base"]["pass_at"].update({"9": 0.5}),
    lambda r: r["perl"]["tasks"].update(sums=3),
    lambda r: r["perl"].update(subject=[]),
    lambda r: r["perl"]["tasks"]["sums"].update(data=None),
]
MISTAKES = [
    (CARD[CARD.index("\n---\n") + 5 :], "has no YAML between"),
    (changed("pipeline_tag: text-generation", "pipeline_tag: fill-mask"), "says “pipeline_tag: fill-mask”"),
    (changed("## Citation", '<img src="a.png">\n\n## Citation'), "holds HTML"),
    (changed("## Citation", "![a](https://example.org/a.png)\n\n## Citation"), "a picture from elsewhere"),
    (changed("(eval/results.json)", "(eval/other.json)"), "there is no file eval/other.json"),
    (changed("- Protocol hash", "- Better than all: 99.\n- Protocol hash"), "says “- Better than all: 99.”"),
    (re.sub(r"## Results.*?(?=## Learning)", "", CARD, flags=re.DOTALL), "its files give “## Results”"),
]


def test_each_mistake_is_a_line_and_so_are_hostile_yaml_and_malformed_results():
    for card, expected in MISTAKES:
        (line,) = said(card)
        assert expected in line, (expected, line)
        assert line.startswith("README.md"), line
    assert said(f"{CARD}\nMore.\n")
    for name, front_matter in HOSTILE.items():
        metadata, mistakes = read_front_matter(f"---\n{front_matter}\n---\n# x\n")
        assert metadata is None, name
        assert [len(str(one)) < 300 for one in mistakes] == [True], name
    for number, change in enumerate(NO_RESULTS):
        broken = copy.deepcopy(RESULTS)
        change(broken)
        lines = said(found=broken)
        assert len(lines) == 1, (number, lines)
        assert lines[0].startswith("eval/results.json: "), (number, lines)


def test_scores_for_leaderboards_are_those_of_the_results_or_others(monkeypatch):
    name, board = ".eval_results/mine.yaml", b"- {value: 50.0}\n"

    def lines_of(content):
        return [str(one) for one in check_card({**FILES, name: content}, counted=COUNTED).mistakes]

    assert lines_of(b"- {value: 99.9, notes: mine}\n") == []
    assert lines_of(b"\xff") == []
    for content in (b"- {value: 99.9, notes: perl eval}\n", b"- {value: 99.9, dataset: {id: someone/sums}}\n"):
        (line,) = lines_of(content)
        assert line.startswith(f"{name}: shows scores that eval/results.json does not give")
    monkeypatch.setattr("perl.hub.card.eval_results.eval_result_files", lambda _: {name: board.decode()})
    assert lines_of(board) == []
    (line,) = lines_of(board.replace(b"50", b"99"))
    assert line.startswith(f"{name}: is not what eval/results.json gives")
