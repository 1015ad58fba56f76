"""A card that is wrong is found out, each mistake in a line that says what and where."""

import copy
import json
import re

import pytest
import yaml

from perl.evaluation.recounting.published_samples import read_published
from perl.evaluation.recounting.recount import recount
from perl.hub.card.check import Checked, check_card
from perl.hub.card.facts import results_in
from perl.hub.card.form import LARGEST_CARD
from tests.hub.published import FILES, FOUND, with_card
from tests.oracles.metrics import average

RESULTS = json.loads(FILES["eval/results.json"])
CARD = FILES["README.md"].decode()
COUNTED = recount(results_in(FILES), read_published(FILES["eval/samples.jsonl"], "samples.jsonl"))
BODY = CARD.index("\n---\n") + 5


def checked(card=CARD, found=RESULTS, files=FILES, **further) -> Checked:
    there = {**files, "README.md": card.encode(), "eval/results.json": json.dumps(found).encode()}
    if found is RESULTS:  # which need not be counted for each card anew
        further = {"counted": COUNTED, **further}
    return check_card({name: content for name, content in there.items() if content != b"null"}, **further)


def said(*arguments, **further) -> list[str]:
    return [str(problem) for problem in checked(*arguments, **further).mistakes]


def changed(before: str, after: str, count: int = 1) -> str:
    assert before in CARD
    return CARD.replace(before, after, count)


def test_nothing_is_wrong_with_our_own_also_where_its_metadata_are_laid_out_in_another_way():
    assert said() == []
    assert said(weights_sha256=FOUND.subject["adapter_sha256"]) == []
    assert said(CARD.replace("\n", "\r\n")) == []
    # An adapter of the sandbox needs no base of the Hub.
    config = json.loads(FILES["adapter_config.json"]) | {"base_model_name_or_path": "sandbox:base", "revision": None}
    run = json.loads(FILES["perl_run.json"]) | {"base": "sandbox:base", "revision": None}
    changed = {"adapter_config.json": json.dumps(config).encode(), "perl_run.json": json.dumps(run).encode()}
    kept = ("adapter_model.safetensors", "plots/curves.png")
    files = with_card({**{name: FILES[name] for name in kept}, **changed})
    assert said(files["README.md"].decode(), None, files) == []
    # Of a whole model the weights are reported as not looked at.
    run |= {"method": "full", "settings": {}, "checkpoints": []}
    found = check_card(with_card({"perl_run.json": json.dumps(run).encode()}))
    assert found.mistakes == ()
    assert found.unchecked == ("the weights: of a whole model they are no part of what is looked at",)
    metadata = yaml.safe_load(CARD[4 : CARD.index("\n---\n")])
    again = f"---\n{yaml.safe_dump(metadata)}---\n{CARD[BODY:]}"
    assert again != CARD
    assert said(again) == []


def test_p_values_on_cards_of_version_0_1_are_each_tasks_own_and_on_cards_of_now_corrected_for_their_number():
    """Of two tasks; a card of one version is wrong as a card of the other."""
    now, then = ", Holm over 2 tasks;", ", not corrected for the number of tasks;"
    older = changed(now, then)
    for of_now, of_then in (
        (
            "Ask it as below. Other prompts and other sampling settings may give other answers:",
            "Asked otherwise than below it may answer otherwise:",
        ),
        ("  author = {The perl-rl contributors},\n", ""),
    ):
        assert of_now in older
        older = older.replace(of_now, of_then)
    cards = {"0.1.0": older, json.loads(FILES["perl_run.json"])["perl"]: CARD}
    for version in cards:
        run = json.dumps(json.loads(FILES["perl_run.json"]) | {"perl": version}).encode()
        for of, card in cards.items():
            found = said(card, files={**FILES, "perl_run.json": run})
            assert (found == []) is (of == version)
            differing = ("Holm over 2 tasks", "not corrected", "Ask it as below", "Asked otherwise", "author =")
            assert all(any(words in line for words in differing) for line in found)


def test_what_no_other_file_says_is_reported():
    run = json.loads(FILES["perl_run.json"]) | {"reload_difference": 0.0, "tags": ["math"], "checkpoints": []}
    run["settings"] |= {"batch": "8 prompts x 2 generations = 16 completions a step = 16 rows x 1 passes"}
    alone = ("adapter_config.json", "adapter_model.safetensors", "metrics.jsonl", "plots/curves.png")
    files = {name: FILES[name] for name in alone} | {"perl_run.json": json.dumps(run).encode()}
    found = check_card(with_card(files))
    assert found.mistakes == ()
    # Of what lies there config and log say base, revision, method, rank and steps, and nothing else.
    settings = "settings (learning rate, batch)"
    expected = {
        "name", "repository", "licence", "version of the data", "seed", "loss", "importance ratio", "rewards",
        "numbers of parameters", "wall time", "hardware", "round trip", "form of the questions", "tags", "versions",
        settings,
    }  # fmt: skip
    assert set(found.reported) == expected
    whole = checked()
    held = {"seed", "loss", "importance ratio", "rewards", settings, "tags"}
    assert {"engine and versions of the evaluation", "checkpoints", "hardware"} <= set(whole.reported)
    assert not held.intersection(whole.reported)


def of_lines_of_their_own(places, most=25):
    """Groups of places in the card, no two on a line, no more than the differences that are listed."""
    rounds = {}
    for at in places:
        line = CARD.count("\n", 0, at)
        rounds.setdefault(sum(line in lines for lines in rounds.values()), {})[line] = at
    groups = [list(lines.values()) for lines in rounds.values()]
    return [group[start : start + most] for group in groups for start in range(0, len(group), most)]


def unseen(places, named=""):
    """Digits of the card, by their places, which may be another digit without a line that names the place."""
    found = []
    for group in of_lines_of_their_own(places):
        mutant = list(CARD)
        for at in group:
            mutant[at] = str((int(CARD[at]) + 1) % 10)
        lines = said("".join(mutant))
        for at in group:
            where = f"README.md:{CARD.count(chr(10), 0, at) + 1}: {named}"
            if not any(line.startswith(where) for line in lines):
                found.append(CARD[CARD.rindex("\n", 0, at) + 1 : at + 1])
    return found


def test_every_number_of_a_card_is_compared_with_the_files_and_every_number_of_the_results_with_it():
    numbers = [BODY + match.end() - 1 for match in re.finditer(r"\d+(?:\.\d+)?", CARD[BODY:])]
    assert len(numbers) > 150
    assert sorted(at for group in of_lines_of_their_own(numbers) for at in group) == numbers
    assert unseen(numbers) == []
    begin = CARD.index("model-index:")
    values = re.finditer(r" (?:value|stderr|k|n): \d+(?:\.\d+)?", CARD[begin:BODY])
    numbers = [begin + match.end() - 1 for match in values]
    assert len(numbers) >= 15
    assert unseen(numbers, "model-index: says") == []
    parts = [("results",), ("perl", "tasks")]
    paths = [p for part in parts for p in leaves(_at(RESULTS, part), part) if p[-3:-1] != ("tasks", "problems")]
    shown = [p for p in paths if p[0] == "results" or p[-1] in SHOWN_LEAVES or "pass_at" in p or "difference" in p]
    assert len(shown) > 60
    missed = []
    for path in shown:
        mutant = copy.deepcopy(RESULTS)
        inner = _at(mutant, path[:-1])
        inner[path[-1]] += 3 if isinstance(inner[path[-1]], int) or path[-1] == "mean_tokens" else 0.3
        if said(found=mutant) == []:
            missed.append(path)
    assert missed == []


def leaves(value, path=()):
    """Path of every number within the scores of both parts of a results file."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    return [path] if isinstance(value, int | float) and not isinstance(value, bool) and value is not None else []


SHOWN_LEAVES = (
    "accuracy",
    "stderr",
    "n",
    "k",
    "pass_at",
    "majority",
    "mean_tokens",
    "truncated",
    "no_answer",
    "unjudged",
)


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def test_what_is_wrong_is_named_with_its_place_and_both_values():
    mutant = copy.deepcopy(RESULTS)
    problems = mutant["perl"]["tasks"]["sums"]["problems"]
    marks = {who: [[mark == "1" for mark in row[who]] for row in problems.values()] for who in ("base", "adapter")}
    mutant["perl"]["tasks"]["sums"]["adapter"]["accuracy"] = 0.1
    lines = said(found=mutant)
    shown = [
        re.match(r"eval/results\.json: sums: adapter\.accuracy is 0\.1 in the file, counted is ([\d.]+)", x)
        for x in lines
    ]
    (accuracy,) = [float(match[1]) for match in shown if match]
    assert accuracy == pytest.approx(average(marks["adapter"]))
    (line,) = said(weights_sha256="f" * 64)
    assert line == (
        "eval/results.json: is of another adapter: sha256 0123456789ab, the weights beside it have ffffffffffff "
        "(perl eval scores the one that is there)"
    )
    cell = re.search(r"\*\*81\.2 ± ([\d.]+)\*\*", CARD)[0]
    (line,) = said(changed(cell, "**91.2 ± 0.1**"))
    number = CARD[: CARD.index("| Sums |")].count("\n") + 1
    said_of_both = re.fullmatch(rf"README\.md:{number}: says “(.*)”, eval/results\.json says “(.*)” \(.*\)", line)
    assert "91.2 ± 0.1**" in said_of_both[1]
    assert cell.removeprefix("**") in said_of_both[2]
    problems = said(found=None)
    assert any(
        line.startswith("README.md:") and "lacks" not in line and "which no file says" in line for line in problems
    )
    assert any("there is no file eval/results.json" in line for line in problems)
    assert said("a: b\n" * LARGEST_CARD) == [
        f"README.md: has {5 * LARGEST_CARD:,} characters, a card has at most {LARGEST_CARD:,}"
    ]


MISTAKES = [
    (CARD[BODY:], "has no YAML between"),
    ("---\n{a: [\n---\n# x\n", "not valid YAML"),
    ("---\n- a\n---\n# x\n", "not a mapping"),
    (changed("library_name: peft", "library_name: transformers"), "library_name: is 'transformers'"),
    (changed("library_name: peft\n", ""), "library_name: is absent (peft)"),
    (changed("pipeline_tag: text-generation", "pipeline_tag: fill-mask"), "pipeline_tag: is 'fill-mask'"),
    (changed("base_model: owner/base-7b", "base_model: /data/me/base"), "'/data/me/base' is not a name on the Hub"),
    (changed("base_model: owner/base-7b", "base_model: [a/b, c/d]"), "is not a name on the Hub"),
    (changed("base_model: owner/base-7b\n", ""), "base_model: is absent"),
    (changed("base_model_relation: adapter", "base_model_relation: merge"), "base_model_relation: is 'merge'"),
    (changed("- base_model:adapter:owner/base-7b\n", ""), "tags: lack base_model:adapter:owner/base-7b"),
    (changed("- perl-rl\n", ""), "tags: lack perl-rl"),
    (changed("- someone/problems", "- data/train.jsonl"), "datasets: 'data/train.jsonl' is not a name"),
    (changed("license: mit", "license: other"), "license: other needs license_name and license_link"),
    (changed("license: mit", "license: mit\nlicense: mit"), "license"),
    (changed("# my-adapter", "# my-adapter [More Information Needed]"), "placeholder is left: [More Information"),
    (changed("| seed | 4711 |", "| seed | None |"), "a placeholder is left: None"),
    (changed("| seed | 4711 |", "| seed | nan |"), "a placeholder is left: nan"),
    (changed("## Citation", "TODO\n\n## Citation"), "a placeholder is left: TODO"),
    (changed("## Citation", "{{ facts }}\n\n## Citation"), "a placeholder is left: {{"),
    (changed('"me/my-adapter")', '"/' + 'home/me/runs/x")'), "a path of somebody's machine: /" + "home/me/runs/x"),
    (changed("## Citation", "C:\\Users\\me\n\n## Citation"), "a path of somebody's machine: C:\\Users\\me"),
    (changed("## Citation", "in ~/runs/x\n\n## Citation"), "a path of somebody's machine: ~/runs/x"),
    (changed("(plots/curves.png)", "(plots/other.png)"), "there is no picture plots/other.png"),
    (changed("(plots/curves.png)", "(../plots/curves.png)"), "there is no picture ../plots/curves.png"),
    (changed("## Citation", '<img src="a.png">\n\n## Citation'), "there is no picture a.png"),
    (changed("(eval/results.json)", "(eval/other.json)"), "there is no file eval/other.json"),
    (changed("## Citation", "It scores 99.9 ± 0.1 %.\n\n## Citation"), "says “It scores 99.9 ± 0.1 %.”"),
    (changed("- Protocol hash", "- Better than all: 99.\n- Protocol hash"), "says “- Better than all: 99.”"),
    (changed("| Sums |", "| Others | 1 |\n| Sums |"), "says “| Others | 1 |”, which no file says"),
    (re.sub(r"## Results.*?(?=## Learning)", "", CARD, flags=re.DOTALL), "lacks “## Results”"),
    (re.sub(r"\| Products .*\n", "", CARD, count=1), "lacks “| Products |"),
    (changed("name: avg@4", "name: avg@64"), "model-index: says"),
    (re.sub(r"model-index:.*?(?=---\n)", "model-index: 3\n", CARD, count=1, flags=re.S), "says “model-index: 3”"),
]  # fmt: skip


HOSTILE = {
    "bomb": "a: &a [x]\nb: [*a, *a]",
    "alias": "a: &a [x]\nb: *a",
    "object": "a: !!python/object/apply:os.system [id]",
    "name": "!!python/name:os.system",
    "deep": "a: " + "[" * 50_000,
    "digits": "a: " + "9" * 10_000,
    "key": "? {a: b}\n: c",
    "control": "a: b\n\x00",
}


NO_RESULTS = [
    lambda r: r.clear(),
    lambda r: r["perl"].update(version=99),
    lambda r: r["perl"]["tasks"]["sums"]["adapter"].update(accuracy="much"),
    lambda r: r["perl"]["tasks"]["sums"]["adapter"].update(accuracy=None),
    lambda r: r["perl"]["tasks"]["sums"]["base"]["pass_at"].update({"4": "x"}),
    lambda r: r["perl"]["tasks"]["sums"]["base"]["pass_at"].update({"9": 0.5}),
    lambda r: r["perl"]["tasks"].update(sums=3),
    lambda r: r["perl"].update(subject=[]),
    lambda r: r["perl"]["tasks"]["sums"].update(title=3),
    lambda r: r["perl"]["tasks"]["sums"].update(data=None),
]


def test_each_mistake_is_a_line_and_so_are_hostile_yaml_and_malformed_results():
    for card, expected in MISTAKES:
        lines = said(card)
        assert any(expected in line for line in lines), (expected, lines)
        assert len(lines) <= 31, expected
        assert all("\n" not in line for line in lines), expected
    for name, front_matter in HOSTILE.items():
        lines = said(f"---\n{front_matter}\n---\n# x\n", None, {})
        assert lines, name
        assert len([line for line in lines if "is absent" not in line]) <= 1, name
        assert all(len(line) < 300 for line in lines), name
    for number, change in enumerate(NO_RESULTS):
        broken = copy.deepcopy(RESULTS)
        change(broken)
        lines = said(found=broken)
        assert len(lines) == 1, (number, lines)
        assert lines[0].startswith("eval/results.json: "), (number, lines)
